"""The fp32 product of CPUs against float64 arithmetic."""

import pytest
import torch
import torch.nn.functional as F

from common.model.linear import _OneDnnLinear, linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (64, 320, 960), (130, 1280, 320), (63, 33, 64)])
def test_products_and_gradients_equal_float64(rows, inputs, outputs, bias):
    generator = torch.Generator().manual_seed(rows)
    exact = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((rows, inputs), (outputs, inputs))]
    exact.append(torch.randn(outputs, generator=generator, dtype=torch.float64) if bias else None)
    ours = [x.float().requires_grad_() if x is not None else None for x in exact]
    exact = [x.detach().double().requires_grad_() if x is not None else None for x in ours]
    result, expected = linear(*ours), F.linear(*exact)
    assert result.grad_fn.name().startswith(_OneDnnLinear.__name__)  # not the library's: else nothing is tested here
    upstream = torch.randn(rows, outputs, generator=generator)
    result.backward(upstream)
    expected.backward(upstream.double())
    gradients = [(o.grad, e.grad) for o, e in zip(ours, exact, strict=True) if o is not None]
    for found, reference in [(result, expected), *gradients]:
        error = (found.double() - reference).norm() / reference.norm()
        assert error < 1e-6  # fp32 rounding, 6e-8, times the root of the longest sum


def test_other_dtypes_and_autocast_stay_with_the_library():
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    assert linear(x.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert torch.equal(linear(x[None], weight)[0], F.linear(x, weight))
    assert linear(x[:0], weight).shape == (0, 4)
