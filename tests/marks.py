"""The mark `slow` on some rows of a table that parametrises a test."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The values in their order; those in `slow` only run when slow tests do. Rows of one argument each."""
    values = list(values)
    assert all(value in values for value in slow), "no such row"
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]
