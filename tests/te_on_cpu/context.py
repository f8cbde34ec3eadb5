"""Context parallelism's rearrangements of packs (csrc/extensions/attention.cpp, thd_*)."""

from __future__ import annotations

__all__ = []
