"""Memory of the host: what glibc does with freed blocks."""

from __future__ import annotations

import ctypes
import os


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step instead of returning them to the kernel.

    Activations are large blocks, freed and asked for again every step; by default each is mapped and zeroed by the
    kernel anew. benchmarks/results/train_throughput_cpu.md has transformers' model with and without it. Whoever sets
    glibc's own variables (MALLOC_MMAP_THRESHOLD_=65536 gives every large block back at once) is left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
