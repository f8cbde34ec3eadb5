"""Run a train script on a CPU, and say what torch's own allocator held at most: bytes, by its profiler's records.

    torchrun --nproc_per_node=2 -m benchmarks.allocator_peak OUT train_fsdp2.py --bf16 ...

Writes OUT.RANK, a number. Saving and exporting count too where they hold more than a step: --async_save False and
--save_final_model False leave a step's.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os
import runpy
import sys
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import ROOT
from common.compat import ProfilerEventType

PLAIN = {"async_save": False, "save_final_model": False, "dataloader_num_workers": 0, "disable_tqdm": True}


def run_measured(script: str, argv: list[str], out: str) -> None:
    """In this process, which is a rank of the run. train_mfsdp.py finds the tests' stand-ins for CUDA and NCCL."""
    if script == "train_mfsdp.py":
        from tests import megatron_on_cpu

        megatron_on_cpu.install()
        dist.reduce_scatter_tensor = megatron_on_cpu.reduce_in_place
    sys.argv = [script, *argv]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    blocks, todo = [], recorded.profiler.kineto_results.experimental_event_tree()
    while todo:
        event = todo.pop()
        todo += event.children
        if event.typed[0] == ProfilerEventType.Allocation:
            blocks.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    Path(f"{out}.{os.environ.get('RANK', 0)}").write_text(str(peak_of((at, size) for _, at, size in sorted(blocks))))


def peak_of(blocks: Iterable[tuple[int, int]]) -> int:
    """The most bytes live at a time, of (address, bytes) in order; bytes are negative where the block is freed.

    The profiler records nothing of threads that it was not started in, and its own total counts for ever what one of
    gloo's frees: a bucket of DDP, now and then. But memory that is allocated again has been freed.
    """
    starts: list[int] = []
    ends: dict[int, int] = {}
    live = peak = 0
    for at, size in blocks:
        until = at + max(size, 1)
        first = bisect_left(starts, at)
        first -= first > 0 and ends[starts[first - 1]] > at
        last = bisect_left(starts, until)
        live -= sum(ends.pop(start) - start for start in starts[first:last])
        starts[first:last] = [at] if size > 0 else []
        if size > 0:
            ends[at] = until
            live += size
        peak = max(peak, live)
    return peak


if __name__ == "__main__":
    run_measured(sys.argv[2], sys.argv[3:], sys.argv[1])
