"""Torch's flight recorder: the latest collectives of this rank, kept in memory and written when the run hangs.

Torch itself writes them when a collective times out on NCCL, with TORCH_NCCL_DUMP_ON_TIMEOUT. watchdog.py ends
the process before that, so it has them written here, by gloo too, to the same place and in the same format.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch._C import _distributed_c10d as c10d

PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # torch's names: the new one, the old one


def write(rank: int) -> str:
    """Write what is recorded to `<prefix><rank>` and return a line that says so; "" where no prefix is set."""
    prefix = next((os.environ[name] for name in PREFIXES if os.environ.get(name)), None)
    if prefix is None:
        return ""
    path = Path(f"{prefix}{rank}")
    try:
        # Builds with CUDA keep NCCL's collectives apart from gloo's.
        dump = getattr(c10d, "_dump_nccl_trace", None) or c10d._dump_fr_trace
        path.write_bytes(dump())
    except Exception as error:  # the run ends for another reason, which must be told whatever comes of this
        return f"Flight recorder: not written to {path}: {' '.join(str(error).split())[:160]}"
    return f"Flight recorder: {path}"
