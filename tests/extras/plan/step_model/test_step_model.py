"""The step model counts what can be counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from common.compat import foreach_copy_
from common.models.esm2.config import load_config
from extras.plan.step_model.communication import Network, Times, cp_ddp, ddp, fsdp, hsdp
from extras.plan.step_model.counts import counted
from extras.plan.step_model.fused import fused_work, graphs_of
from extras.plan.step_model.model import BF16, COMPILED, DEVICES, EAGER, GELU, Shape, layer_work, step_of

TOKENS = 1024
SMALL = Shape.of(load_config("facebook/esm2_t6_8M_UR50D"))


def test_counted_has_bytes_kernels_and_waits():
    with counted() as work:
        x = torch.ones(10, 8)  # written: 320 bytes
        y = x + x[:1]  # 10 x 8 and 1 x 8 read, 10 x 8 written
        y.view(80)  # costs nothing
        y.add_(1)  # read and written
        (y @ torch.ones(8, 4)).sum().item()
        x.nonzero().tolist()
    assert work.by_operator["ones"] == 320 + 128
    assert work.by_operator["add"] == 320 + 32 + 320
    assert work.by_operator["add_"] == 640
    assert dict(work.matmuls) == {(10, 4, 8): 1}
    assert dict(work.waits) == {"_local_scalar_dense": 1, "nonzero": 1, "tolist": 1}


def test_fused_work_joins_a_chain_between_matmuls():
    def function(x, w, v):
        return F.gelu(x @ w, approximate="tanh") * 2 @ v

    with FakeTensorMode():
        x, w, v = (torch.empty(64, 64, requires_grad=True) for _ in range(3))
        forward, backward = (fused_work(graph) for graph in graphs_of(function, x, w, v))
    one = 64 * 64 * 4
    assert (forward.kernels, forward.moved) == (3, 2 * one)  # reads the first result, writes the second operand
    assert (backward.kernels, backward.moved) == (5, 3 * one)  # the same result, the gradient; writes one
    assert forward.matmul_flops + backward.matmul_flops == 6 * 2 * 64**3


@pytest.mark.parametrize(("tokens", "width", "mixed"), [(64, 32, False), (8192, 1024, True), (8192, 4096, True)])
def test_fused_work_of_a_layer_norm_reads_rows_once(tokens, width, mixed):
    def function(x, w, b):
        return F.layer_norm(x, (width,), w, b)

    with FakeTensorMode():
        x, (w, b) = torch.empty(tokens, width), (torch.empty(width, requires_grad=True) for _ in range(2))
        forward, backward = (fused_work(graph) for graph in graphs_of(function, x.requires_grad_(), w, b))
    rows, row, column = tokens * width * 4, width * 4, tokens * 4
    assert (forward.kernels, forward.moved) == (1, 2 * rows + 2 * row + 2 * column)  # mean and 1/deviation are kept
    # Gradient and input, with mean and 1/deviation; rows are written, and two rows.
    once = 2 * rows + 2 * column
    assert (backward.kernels, backward.moved) == (1 if mixed else 2, once * (1 if mixed else 2) + row + rows + 2 * row)


def test_layer_work_has_the_flops_of_the_formula():
    eager, compiled = (sum(layer_work(SMALL, TOKENS, mode), start=counted_nothing()) for mode in (EAGER, COMPILED))
    assert eager.matmul_flops == compiled.matmul_flops == 3 * 2 * 12 * SMALL.hidden**2 * TOKENS
    assert eager.attention == compiled.attention == 7  # two forward; five backward, scores once more among them
    assert compiled.kernels < eager.kernels
    assert compiled.moved < 0.6 * eager.moved


def test_layer_work_without_the_kernels_of_gelu():
    (forward, backward), fused = layer_work(SMALL, TOKENS, BF16), layer_work(SMALL, TOKENS, GELU)
    one = 2 * TOKENS * 4 * SMALL.hidden  # bytes of what GELU is applied to
    assert forward.moved - fused[0].moved == 2 * one  # fc1's sums, and their GELU
    assert backward.moved - fused[1].moved == 3 * one  # the sums, and both gradients
    assert [work.matmuls for work in fused] == [forward.matmuls, backward.matmuls]


def counted_nothing():
    with counted() as nothing:
        pass
    return nothing


def test_step_of_adds_layers_and_ends():
    step = step_of(SMALL, TOKENS, EAGER)
    layers = SMALL.layers
    of_layers = layers * sum(work.matmul_flops for work in step.layer)
    head = step.all.matmul_flops - of_layers
    assert 0 < head < 0.05 * of_layers
    assert step.parameters == 7_512_353 + 31 * (320 + 1)  # the vocabulary's padding rows
    # MFU leaves out attention's second look at its scores, and fillers.
    h100 = DEVICES[0]
    assert 0 < step.mfu(h100) < h100.of_matmuls
    assert step.seconds(h100) >= step.parts(h100)["matmuls"]


def test_counted_does_not_read_what_a_copy_overwrites():
    with counted() as work:
        torch.zeros(10, dtype=torch.bfloat16).copy_(torch.ones(10))
        foreach_copy_([torch.empty(10, dtype=torch.bfloat16)], [torch.ones(10)])
    assert work.by_operator["copy_"] == work.by_operator["_foreach_copy_"] == 10 * (4 + 2)


# ---- communication -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_network_gathers_in_a_ring(ranks):
    """Each of N - 1 turns waits for its slowest hop; a ring of nodes crosses between them once a node."""
    net, size, hops = Network(), 3e8, []
    for rank in range(ranks - 1):
        crosses = rank % 8 == 7 or (ranks > 8 and rank == 0)  # the ring closes where it began
        hops.append(20e-6 if crosses else 3e-6)
    slowest = 320e9 if ranks > 8 else 360e9
    assert net.gather(size, ranks) == pytest.approx(sum(size / ranks / slowest + hop for hop in hops))
    assert net.all_reduce(size, ranks) <= 2 * net.gather(size, ranks) + 1e-12


def _replayed(times: Times, gather: float, scatter: float) -> float:
    """Seconds of the layers' passes, launched one after the other on two queues: kernels, and one communicator."""
    computes, sends, gathered = 0.0, gather, gather
    for number in range(times.layers):
        start = max(computes, gathered)
        if number + 1 < times.layers:
            sends = gathered = max(sends, start) + gather
        computes = start + times.forward
    sends = gathered = max(computes, sends) + gather
    for number in range(times.layers):
        start = max(computes, gathered)
        if number + 1 < times.layers:
            sends = gathered = max(sends, start) + gather
        computes = start + times.backward
        sends = max(sends, computes) + scatter
    return max(computes, sends)


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_fsdp_hides_what_two_queues_hide(ranks):
    times, net = Times(0.1, 33, 1.6e-3, 3.1e-3, (0.0, 0.0), (19_677_440, 0), 16384, 1280), Network()
    gather, scatter = (net.gather(size * times.parameters[0], ranks) for size in (2, 4))
    without = times.layers * (times.forward + times.backward)
    replayed = _replayed(times, gather, scatter) - without + net.gather(0, ranks) * 2  # of no other weights
    assert fsdp(times, ranks, net) == pytest.approx(replayed)


@pytest.mark.parametrize("ranks", [8, 512])
@pytest.mark.parametrize("bucket", [1e6, 25e6, 200e6])
def test_ddp_hides_what_a_queue_of_buckets_hides(ranks, bucket):
    times, net = Times(0.1, 33, 1.6e-3, 3.1e-3, (0.0, 0.0), (19_677_440, 1_700_000), 16384, 1280), Network()
    size = 4 * (33 * 19_677_440 + 1_700_000)
    number = math.ceil(size / bucket)
    ends = 0.0
    for ready in range(1, number + 1):
        ends = max(ends, 33 * 3.1e-3 * ready / number) + net.all_reduce(size / number, ranks)
    assert ddp(times, ranks, net, bucket) == pytest.approx(ends - 33 * 3.1e-3)


def test_hsdp_is_fsdp_in_a_node_and_an_all_reduce_of_shards():
    times, net = Times(0.1, 33, 1.6e-3, 3.1e-3, (0.0, 0.0), (19_677_440, 0), 16384, 1280), Network()
    assert hsdp(times, 8, net) == fsdp(times, 8, net)
    # A GPU's eighth of a layer's fp32 gradients goes to the other node and back over its eighth of the adapters;
    # that hides behind the next layer, but for the last.
    there_and_back = 2 * (4 * 19_677_440 / 8 / 2 / (320e9 / 8) + 20e-6)
    empty = 2 * 20e-6  # of no other weights
    assert hsdp(times, 16, net) - fsdp(times, 8, net) == pytest.approx(there_and_back + empty)


def test_cp_hides_blocks_behind_attention():
    net, shape = Network(), ((19_677_440, 0), 16384, 1280)
    long, none = (Times(0.1, 33, 1.6e-3, 3.1e-3, (attention, attention), *shape) for attention in (1.0, 0.0))
    assert cp_ddp(long, 64, net) == ddp(long, 64, net)
    numbers = 2 * 16384 * 1280  # keys and values
    sent = 7 * (2 * numbers / 360e9 + 3e-6) + 8 * (6 * numbers / 360e9 + 3e-6)
    assert cp_ddp(none, 64, net) - ddp(none, 64, net) == pytest.approx(33 * sent)
