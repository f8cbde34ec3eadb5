"""Block-causal attention against float64 softmax attention under a dense mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from common.models.layers import cpu
from common.models.layers.attention import rotate
from common.models.layers.recompute import save_activations
from extras.families.sets.attention import blocks_of
from extras.speed.block_attention import attend_all, gradients_of_all
from tests.extras.families.sets.cases import DIM, HEADS, PACKS, attended, definition, inputs_of, layout_of

CPU = torch.device("cpu")


# float64 goes by halving, fp32 and bf16 sequence by sequence; bf16's bound: five units in the last place, 2^-8.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("pack", PACKS)
def test_attention_equals_dense_mask(pack, dtype, bound):
    layout, with_fillers = layout_of(PACKS[pack], fillers=5), [*PACKS[pack], [5]]
    qkv, grad, cos, sin = inputs_of(len(layout.numbers), dtype)
    tables = cos.double(), sin.double()
    out, gradient = attended(lambda x: definition(x, *tables, with_fillers), qkv.double(), grad.double())
    found, found_gradient = attended(lambda x: layout.attention(x, cos, sin), qkv, grad)
    assert found.dtype == found_gradient.dtype == dtype
    assert error(found, out) <= bound
    for which, ours, exact in zip("qkv", found_gradient.unbind(2), gradient.unbind(2), strict=True):
        assert error(ours, exact) <= bound, which


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4 * 2**-8)])
@pytest.mark.parametrize("pack", ["ragged", "32 a set"])
def test_halving_equals_sequence_by_sequence(pack, dtype, bound):
    layout = layout_of(PACKS[pack])
    qkv, grad, cos, sin = inputs_of(len(layout.numbers), dtype)
    out, gradient = attended(lambda x: layout.attention(x, cos, sin), qkv, grad)
    q, k, v = qkv.unbind(2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    blocks = blocks_of(layout.table, CPU)
    halved, lse = attend_all(q, ((k, v, block) for block in blocks))
    assert error(halved.flatten(1).float(), out.float()) <= bound
    dq, dk, dv = gradients_of_all((grad.view_as(q), q, halved, lse), k, v, blocks)
    halved_gradient = torch.stack((rotate(dq, cos, -sin), rotate(dk, cos, -sin), dv), 2)
    assert error(halved_gradient, gradient.float()) <= bound


@pytest.mark.parametrize("pack", PACKS)
def test_halving_computes_each_pair_once(pack):
    """In 1 + ceil(log2(n)) calls, n the sequences of the largest set."""
    layout = layout_of(PACKS[pack])
    tokens = len(layout.numbers)
    counted = torch.zeros(tokens, tokens, dtype=torch.int64)
    blocks = blocks_of(layout.table, CPU)
    for block in blocks:
        rows, columns = (torch.arange(tokens) if x is None else x for x in (block.rows, block.columns))
        queries, keys = (numbers_of(torch.tensor(x.host).diff()) for x in (block.queries, block.keys))
        counted[rows[:, None], columns] += queries[:, None] == keys
    starts = [sum(map(sum, PACKS[pack][:n])) for n in range(len(PACKS[pack]))]
    needed = torch.zeros_like(counted)
    for start, lengths in zip(starts, PACKS[pack], strict=True):
        number = numbers_of(torch.tensor(lengths))
        own = slice(start, start + sum(lengths))
        needed[own, own] = (number[:, None] >= number).long()
    assert torch.equal(counted, needed)
    assert len(blocks) <= 1 + math.ceil(math.log2(max(map(len, PACKS[pack]))))


def numbers_of(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sets_of_one_are_plain_packs_bit_for_bit(dtype):
    lengths = [7, 30, 1, 64]
    layout = layout_of([[n] for n in lengths])
    qkv, grad, cos, sin = inputs_of(sum(lengths), dtype)
    cu_seqlens = layout.table[0].int()
    plain = attended(lambda x: cpu.attention(x, cos, sin, cu_seqlens), qkv, grad)
    for one, other in zip(attended(lambda x: layout.attention(x, cos, sin), qkv, grad), plain, strict=True):
        assert torch.equal(one, other)


def test_nothing_leaks_from_later_sequences_and_other_sets():
    """Bit for bit; and an earlier sequence does change what a later one gets."""
    sets = [[30, 20, 40], [50, 10], [25]]
    layout, (qkv, _, cos, sin) = layout_of(sets), inputs_of(175, torch.float32)
    before = layout.attention(qkv, cos, sin)
    for begin, end, dependent in ((30, 50, [(30, 90)]), (90, 140, [(90, 150)]), (150, 175, [(150, 175)])):
        changed = qkv.clone()
        changed[begin:end] += 1
        differs = (layout.attention(changed, cos, sin) != before).any(1)
        expected = torch.zeros_like(differs)
        for a, b in dependent:
            expected[a:b] = True
        assert torch.equal(differs, expected)


def test_order_of_sets_is_irrelevant_bit_for_bit():
    sets = [[30, 20, 40], [50, 10], [25]]
    qkv, grad, cos, sin = inputs_of(175, torch.float32)
    split = [x.split([90, 60, 25]) for x in (qkv, grad, cos, sin)]
    turned = [torch.cat(x[::-1]) for x in split]
    first = attended(lambda x: layout_of(sets).attention(x, cos, sin), qkv, grad)
    second = attended(lambda x: layout_of(sets[::-1]).attention(x, *turned[2:]), *turned[:2])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, torch.cat(other.split([25, 60, 90])[::-1]))


def test_compiled_attention_is_one_graph_for_all_packs():
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list):
        graphs.append(graph)
        return graph.forward

    attend = torch.compile(
        lambda layout, x, cos, sin: layout.attention(2 * x, cos, sin) + 1, backend=count, dynamic=True, fullgraph=True
    )
    for pack in ("ragged", "32 a set", "long"):
        layout = layout_of(PACKS[pack])
        qkv, _, cos, sin = inputs_of(len(layout.numbers), torch.float32)
        assert torch.equal(attend(layout, qkv, cos, sin), layout.attention(2 * qkv, cos, sin) + 1)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_keeps_its_promises_to_the_compiler(dtype):
    """Shapes, dtypes and strides of what it returns, and its gradient."""
    layout = layout_of(PACKS["ragged"])
    qkv, _, cos, sin = inputs_of(len(layout.numbers), dtype)
    inputs = qkv.requires_grad_(), cos, sin, layout.table
    torch.library.opcheck(torch.ops.sets.attention.default, inputs, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.sets.attention.default, inputs, test_utils="test_autograd_registration")


class Layer(nn.Module):
    def forward(self, stream: Tensor, *tables: Tensor) -> Tensor:
        layout = layout_of(PACKS["ragged"])
        return layout.attention(stream.view(-1, HEADS, 3, DIM), *tables)


@pytest.mark.parametrize(("mode", "passes"), [("full", 2), ("selective", 1)])
def test_selective_recomputation_saves_attention(mode, passes):
    """The kernel runs once a sequence and pass."""
    layer = Layer()
    qkv, grad, *tables = inputs_of(71, torch.float32)
    save_activations([layer], mode)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(qkv.flatten(1).requires_grad_(), *tables).backward(grad)
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    sequences = sum(map(len, PACKS["ragged"]))
    assert sum(event.name == kernel for event in profile.events()) == passes * sequences
