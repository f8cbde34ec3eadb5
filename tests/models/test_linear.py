"""The matmuls of CPUs against float64 arithmetic, each way in this process, whatever this CPU has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers import cpu
from common.models.layers.linear import Embedding, linear
from common.models.layers.recompute import save_activations
from tests.models.reference import packed, random_batch

SHAPES = [(1, 7, 5), (64, 320, 960), (130, 1280, 320), (63, 33, 64)]  # rows, inputs, outputs


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def fp32_by_onednn(request, monkeypatch):
    monkeypatch.setattr(cpu, "FP32_BY_ONEDNN", request.param)
    return request.param


@pytest.fixture
def without_bf16_instructions(monkeypatch, fp32_by_onednn):
    monkeypatch.setattr(cpu, "BF16_MATMULS", False)
    monkeypatch.setattr(cpu, "ROWS_PER_THREAD", 24)  # several blocks, the last of them shorter


def operands(rows: int, inputs: int, outputs: int, bias: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, shift = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x, weight, shift if bias else None]


def forward_and_backward(matmul, tensors, upstream) -> list[torch.Tensor]:
    tensors = [None if x is None else x.detach().requires_grad_() for x in tensors]
    result = matmul(*tensors)
    result.backward(upstream.to(result.dtype))
    return [result.detach(), *(x.grad for x in tensors if x is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_float64(shape, bias, fp32_by_onednn):
    tensors = operands(*shape, bias)
    upstream = torch.randn(shape[0], shape[2])
    found = forward_and_backward(linear, tensors, upstream)
    wide = [None if x is None else x.double() for x in tensors]
    for ours, exact in zip(found, forward_and_backward(F.linear, wide, upstream), strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < 1e-6  # fp32 rounding, 6e-8, times the root of the longest sum


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masters", [True, False], ids=["autocast", "bf16 parameters"])
def test_linear_widened_bf16_rounds_once(shape, bias, masters, without_bf16_instructions):
    """Rounded once, like the instructions' result: no element is further from the exact one than half a unit in the
    last place and what fp32 sums lose."""
    tensors = operands(*shape, bias)
    upstream = torch.randn(shape[0], shape[2]).bfloat16()
    exact = [None if x is None else x.bfloat16().double() for x in tensors]
    expected = forward_and_backward(F.linear, exact, upstream)
    if masters:
        with torch.autocast("cpu", torch.bfloat16):
            found = forward_and_backward(linear, tensors, upstream)
    else:
        found = forward_and_backward(linear, [None if x is None else x.bfloat16() for x in tensors], upstream)
    assert [x.dtype for x in found] == [torch.bfloat16] + [torch.float32 if masters else torch.bfloat16] * (2 + bias)
    for ours, reference in zip(found, expected, strict=True):
        sums = 1e-5 * reference.abs().max()  # fp32 sums of up to 1,280 terms
        assert ((ours.double() - reference).abs() <= 2**-8 * reference.abs() + sums).all()


def test_linear_widened_bf16_calls_fp32_matmuls_only(without_bf16_instructions):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "_linear_pointwise"):
                seen.append({x.dtype for x in args if isinstance(x, torch.Tensor)})
            return operator(*args, **(kwargs or {}))

    seen = []
    x, weight, bias = (x.bfloat16() for x in operands(*SHAPES[1], bias=True))
    with Watch(), torch.autocast("cpu", torch.bfloat16):
        grad = cpu._matmul(x, weight, bias)
        cpu._matmul_backward(grad, x, weight, True, True)
    assert len(seen) == 3 * 3  # blocks, matmuls
    assert all(dtypes == {torch.float32} for dtypes in seen)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_linear_widened_bf16_recomputes(mode, without_bf16_instructions):
    """What selective recomputation keeps is not memory that the next block of rows is written to."""
    gradients = []
    for how in ("none", mode):
        model = build_model(esm2_config(layers=2, hidden_size=64, heads=4), seed=1)
        save_activations(list(model.layers), how)
        with torch.autocast("cpu", torch.bfloat16):
            model(**packed(random_batch([100, 28]))).loss_sum.backward()
        gradients.append([p.grad for p in model.parameters()])
    for recomputed, kept in zip(*gradients, strict=True):
        assert (recomputed - kept).norm() <= 1e-6 * kept.norm()  # the same operators on the same numbers


def test_linear_leaves_other_dtypes_to_torch(without_bf16_instructions):
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    assert linear(x.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
        assert linear(x.double(), weight.double()).dtype == torch.float64
    assert torch.equal(linear(x[None], weight), F.linear(x[None], weight))
    assert linear(x[:0], weight).shape == (0, 4)


def test_embedding_of_a_bf16_table_has_the_gradient_of_float64():
    """Beside float64 arithmetic on the same bf16 numbers only the sums are rounded: half a unit of 2^-8."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (4096,), generator=generator)
    upstream = (torch.randn(4096, 64, generator=generator) + 1).bfloat16()
    table = Embedding.from_pretrained(torch.randn(33, 64, generator=generator).bfloat16(), freeze=False)
    looked_up = table(ids)
    assert torch.equal(looked_up, table.weight[ids])
    looked_up.backward(upstream)
    expected = torch.zeros(33, 64, dtype=torch.float64).index_add_(0, ids, upstream.double())
    torch.testing.assert_close(table.weight.grad.double(), expected, rtol=2**-8, atol=1e-3)
