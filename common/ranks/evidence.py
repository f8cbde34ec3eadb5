"""What a process can tell of itself when a run hangs: where its main thread is, what it reads and writes, its
collectives."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from common.cli import one_line

RECORDER_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # torch's names: the new, the old


def main_thread_is_at() -> tuple[bool, str]:
    """Whether the main thread waits for other ranks as far as Python can tell, and its place."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    if frame is None:
        return True, ""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    waits = os.sep + os.path.join("torch", "distributed") + os.sep in file or function == "_engine_run_backward"
    return waits, f"{Path(file).name}:{frame.f_lineno} in {function}"


def disk_traffic() -> int:
    """Bytes this process has read and written by system calls; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def write_flight_recorder(rank: int) -> str:
    """Torch's latest collectives of this rank to `<prefix><rank>`; a line that says so, "" where no prefix is set.

    Torch itself writes them when a collective times out on NCCL, with TORCH_NCCL_DUMP_ON_TIMEOUT. The watch ends the
    process before that, so it has them written, by gloo too, to the same place and in the same format.
    """
    prefix = next((os.environ[name] for name in RECORDER_PREFIXES if os.environ.get(name)), None)
    if prefix is None:
        return ""
    path = Path(f"{prefix}{rank}")
    try:
        # Builds with CUDA keep NCCL's collectives apart from gloo's.
        dump = getattr(c10d, "_dump_nccl_trace", None) or c10d._dump_fr_trace
        path.write_bytes(dump())
    except Exception as error:  # the run ends for another reason, which must be told whatever comes of this
        return f"Flight recorder: not written to {path}: {one_line(error)[:160]}"
    return f"Flight recorder: {path}"
