"""What communication between GPUs costs a step by a model: rings, latencies, and what the layers' work hides of them.

Nothing here was measured: `assumptions_table` of benchmarks/step_model.py says what is assumed. Each collective takes
its bytes over the slowest link and a latency for every hop, one runs at a time, and it hides behind the work that the
strategy starts before waiting for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.distributed.strategy import default_bucket_mb


@dataclass(frozen=True)
class Network:
    """GPUs of a node; bytes a second that a ring reaches over a GPU's links in the node, and over all adapters of a
    node together; seconds a hop."""

    node: int = 8
    inside: float = 360e9
    between: float = 320e9
    hop_inside: float = 3e-6
    hop_between: float = 20e-6

    def gather(self, size: float, ranks: int) -> float:
        """Seconds of a ring of consecutive ranks: all-gather of `size` bytes altogether, or their reduce-scatter."""
        between = ranks // self.node if ranks > self.node else 0
        speed = min(self.inside, self.between) if between else self.inside
        hops = (ranks - 1 - between) * self.hop_inside + between * self.hop_between
        return (ranks > 1) * (size * (ranks - 1) / ranks / speed + hops)

    def all_reduce(self, size: float, ranks: int) -> float:
        """The faster of a ring (twice what `gather` takes) and a tree over the nodes, a chain in each."""
        nodes = max(1, ranks // self.node)
        chain = (min(ranks, self.node) - 1) * self.hop_inside
        speed = min(self.inside, self.between) if nodes > 1 else self.inside
        tree = 2 * (size / speed + math.ceil(math.log2(nodes)) * self.hop_between + chain)
        return min(2 * self.gather(size, ranks), tree) if ranks > 1 else 0.0

    def all_reduce_of_replicas(self, size: float, replicas: int) -> float:
        """The same of one GPU a node, whose adapters the node's other GPUs use for theirs."""
        speed = self.between / self.node
        ring = 2 * (size * (replicas - 1) / replicas / speed + (replicas - 1) * self.hop_between)
        tree = 2 * (size / speed + math.ceil(math.log2(max(replicas, 1))) * self.hop_between)
        return min(ring, tree) if replicas > 1 else 0.0


@dataclass(frozen=True)
class Times:
    """Of one GPU's step without communication. seconds: all of it; forward, backward: of a layer; attention: of a
    layer's forward and backward; parameters: of a layer, and of the rest."""

    seconds: float
    layers: int
    forward: float
    backward: float
    attention: tuple[float, float]
    parameters: tuple[int, int]
    tokens: int
    hidden: int


FP32, BF16 = 4, 2  # bytes of a gradient, of a gathered weight


def ddp(times: Times, ranks: int, net: Network, bucket: float | None = None) -> float:
    """Seconds that are not hidden. Buckets are all-reduced one after the other from when the first is full; the last
    is full when the backward pass ends."""
    size = FP32 * (times.layers * times.parameters[0] + times.parameters[1])
    buckets = math.ceil(size / (bucket or 1e6 * default_bucket_mb(ranks)))
    each = net.all_reduce(size / buckets, ranks)
    return max(each, buckets * each - times.layers * times.backward * (buckets - 1) / buckets)


def fsdp(times: Times, ranks: int, net: Network, last: bool = True) -> float:
    """`full`: a layer's weights are gathered while the layer before computes, forward and backward; its gradients are
    reduce-scattered by the same communicator. The first gather and the last reduce-scatter hide behind nothing. last:
    the last pack of a step; gradients of the others stay where they are."""
    return _sharded(times, ranks, net, lambda size: 0.0, last)


def hsdp(times: Times, ranks: int, net: Network, last: bool = True) -> float:
    """`hybrid` within nodes: as `full` there; each GPU's part of a layer's gradients is then all-reduced over the
    replicas by another communicator, during the next layer."""
    shards, replicas = min(ranks, net.node), max(1, ranks // net.node)
    return _sharded(times, shards, net, lambda size: net.all_reduce_of_replicas(size / shards, replicas), last)


def _sharded(times: Times, shards: int, net: Network, again: Callable[[float], float], last: bool) -> float:
    """again: seconds of the all-reduce of a gradient of so many bytes over the replicas."""
    layer, rest = times.parameters
    gather, scatter = net.gather(BF16 * layer, shards), last * net.gather(FP32 * layer, shards)
    reduce = last * again(FP32 * layer)
    f, b, between = times.forward, times.backward, times.layers - 2

    forward = gather + (between + 1) * max(0.0, gather - f)
    # While a layer computes, its successor's gradients are reduced and its predecessor's weights gathered.
    backward = gather + max(0.0, gather - b) + between * max(0.0, max(gather + scatter, reduce) - b)
    backward += max(0.0, scatter - b) + scatter + reduce
    root = net.gather(BF16 * rest, shards) + last * (net.gather(FP32 * rest, shards) + again(FP32 * rest))
    return forward + backward + root


def cp_ddp(times: Times, ranks: int, net: Network) -> float:
    """CP within a node x DDP, p2p: keys and values of cp - 1 other ranks pass while a block before is attended to,
    and in the backward pass their gradients too, in fp32, of all cp blocks."""
    cp = min(ranks, net.node)
    block = 2 * times.tokens * times.hidden  # numbers: keys and values of a rank

    def exposed(size: float, turns: int, attention: float) -> float:
        return turns * max(0.0, size / net.inside + net.hop_inside - attention / cp)

    forward = exposed(BF16 * block, cp - 1, times.attention[0])
    backward = exposed((BF16 + FP32) * block, cp, times.attention[1])
    return times.layers * (forward + backward) + ddp(times, ranks, net)
