"""What preflight measures between ranks: clocks, and the time of an all-reduce over pairs of nodes and over all.

Pairs are the neighbours in a ring of the nodes, measured in two rounds (three if their number is odd) of pairs that
have no node in common: hundreds of nodes take as long as four, and each node is in two pairs.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.distributed.run import use_loopback_interface
from common.distributed.world import World

PINGS = 5
SMALL = 8  # bytes, whose all-reduce is all latency
LARGE = {"cuda": 64 << 20, "cpu": 4 << 20}  # bytes
SLOW = 3.0  # times worse than the median pair: an outlier


@dataclass(frozen=True)
class Timing:
    """An all-reduce among some ranks: of SMALL in seconds, of LARGE in bytes a second (size / time)."""

    ranks: list[int]
    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:.0f} us, {self.bandwidth / 1e9:.2f} GB/s"


def start_group(world: World, store: dist.Store, seconds: float) -> None:
    """The process group of all ranks, in which a lost rank is an exception, not a hang nor the end of this one."""
    use_loopback_interface()
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else NCCL's watchdog ends a rank before it can say why
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=seconds)
    )


# ---- clocks -------------------------------------------------------------------------------------------------


def clock_offset(samples: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(offset, uncertainty) in seconds of another clock, from (sent, the other's time, received) by our own.

    The shortest round trip tells most: the other's time was taken somewhere within it.
    """
    sent, theirs, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return theirs - (sent + received) / 2, (received - sent) / 2


def measure_clocks(world: World, leaders: list[int]) -> dict[int, tuple[float, float]]:
    """On rank 0: the clock offsets of the other nodes' leaders. Those answer; other ranks do not call."""
    time_of = torch.zeros(1, dtype=torch.float64)
    if not world.is_main:
        for _ in range(PINGS):
            dist.recv(time_of, src=0)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
        return {}
    offsets = {}
    for rank in leaders:
        if rank == world.rank:
            continue
        samples = []
        for _ in range(PINGS):
            sent = time.time()
            dist.send(time_of, dst=rank)
            dist.recv(time_of, src=rank)
            samples.append((sent, time_of.item(), time.time()))
        offsets[rank] = clock_offset(samples)
    return offsets


# ---- all-reduce ---------------------------------------------------------------------------------------------


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring of `count` nodes, in rounds in which no node occurs twice."""
    if count < 3:
        return [[(0, 1)]] if count == 2 else []
    pairs = [(node, (node + 1) % count) for node in range(count)]
    rounds = [pairs[0 : count - count % 2 : 2], pairs[1::2], pairs[count - 1 :] if count % 2 else []]
    return [each for each in rounds if each]


def time_pair(world: World, pair: tuple[int, int], seconds: float) -> tuple[Timing, dist.ProcessGroup]:
    """Both ranks of the pair call, no other. The group is to be destroyed before either rank's next pair.

    torch 2.13 names such a group by its ranks and by how many groups a rank has: unless that is the same number on
    both, they wait for each other under different names.
    """
    group = dist.new_group(sorted(pair), timeout=timedelta(seconds=seconds), use_local_synchronization=True)
    return time_all_reduce(world, sorted(pair), group), group


def time_all_reduce(world: World, ranks: list[int], group: dist.ProcessGroup | None = None) -> Timing:
    """All ranks of the group call; every one gets its own timing."""
    times = {}
    for size, repeats in ((SMALL, 5), (LARGE[world.device.type], 3)):
        values = torch.ones(size // 4, device=world.device)
        taken = []
        for _ in range(1 + repeats):  # the first makes the connections
            started = time.perf_counter()
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
            values[0].item()  # until the device is done
            taken.append(time.perf_counter() - started)
        times[size] = statistics.median(taken[1:])
    return Timing(ranks, times[SMALL], LARGE[world.device.type] / times[LARGE[world.device.type]])


def outliers(timings: list[Timing]) -> list[Timing]:
    """Pairs that are SLOW times slower than the median pair, in latency or bandwidth. Of three pairs at least."""
    if len(timings) < 3:
        return []
    latency = statistics.median(each.latency for each in timings)
    bandwidth = statistics.median(each.bandwidth for each in timings)
    return [each for each in timings if each.latency > SLOW * latency or each.bandwidth * SLOW < bandwidth]
