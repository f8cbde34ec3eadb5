"""--fp8_scaled_mm on a CPU, which has scaled matmuls too: against the formats' definition, and in one graph."""

from __future__ import annotations

import pytest
import torch

from common.cli import UserError
from common.models.esm2.config import load_config
from common.models.esm2.model import build_model
from common.models.layers.compiling import compile_layers
from common.models.layers.config_base import override
from common.precision import PrecisionFlags
from extras.formats.build import choose_plan, set_formats
from extras.formats.emulation import GRADIENT, INPUT, WEIGHT
from extras.formats.fp8_current import CurrentScaling
from extras.formats.plan import recipes
from extras.speed.scaled_mm import ScaledMatmul
from tests.models.reference import packed, random_batch
from tests.precision.test_emulation import ALONE, by_definition, close, operands
from tests.training_fixtures import TINY_OVERRIDES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["current", "current, powers of 2"])
def test_scaled_matmuls_equal_definition(name, dtype):
    """As the emulation does (test_emulation.py); the sum over tokens is fp32, and rounded once."""
    matmul = ScaledMatmul(CurrentScaling("hybrid", use_power_2_scales="powers" in name))
    x, weight, bias, grad = operands(dtype)
    y = matmul(x, weight, bias)
    y.backward(grad)
    q = [by_definition(name, {}, part, role, 1) for part, role in ((x, INPUT), (weight, WEIGHT), (grad, GRADIENT))]
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert close(y, q[0] @ q[1].T + bias.detach().double().numpy(), tolerance)
    assert close(x.grad, q[2] @ q[1], tolerance)
    assert close(weight.grad, q[2].T @ q[0], tolerance)
    assert close(bias.grad, grad.double().sum(0).numpy(), tolerance)
    assert not close(y, (x @ weight.t() + bias).detach().double().numpy(), 1e-3), "nothing is quantised"


def gradients(compiled: list | None = None, **flags) -> torch.Tensor:
    """All of a tiny model's, of one pack. compiled: the layers are, and their graphs are added to it."""
    chosen = PrecisionFlags(**({"fp8": True, "fp8_recipe": "current"} if flags else {}), **flags)
    model = build_model(override(load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES), seed=1)
    if flags:
        plan = choose_plan(chosen, model.config, ALONE.device, "torch", "", False)
        set_formats(model, plan, chosen, 1, ALONE, None)
    if compiled is not None:
        torch.compiler.reset()
        compile_layers(model, "cpu", lambda graph, _: compiled.append(graph) or graph.forward)
    model(**packed(random_batch([30, 17, 18]))).loss_sum.backward()  # 65 tokens: 15 fillers
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_scaled_layers_are_the_emulated_ones_and_one_graph():
    exact, emulated, scaled = gradients(), gradients(emulate_precision=True), gradients(fp8_scaled_mm=True)
    quantised = (emulated - exact).norm()
    assert quantised > 0.01 * exact.norm()
    assert (scaled - emulated).norm() < 0.05 * quantised  # a sum's rounding turns a cast now and then
    graphs: list = []
    compiled = gradients(graphs, fp8_scaled_mm=True)
    assert (compiled - scaled).norm() < 0.05 * quantised
    assert len(graphs) == 1, "of all layers"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"emulate_precision": True}, "--fp8_scaled_mm does not go with --emulate_precision: drop one of the two"),
        ({"quant_stats": True}, "--fp8_scaled_mm does not go with --quant_stats"),
        ({"fp8_recipe": "delayed"}, "not with --fp8_recipe delayed: give --fp8_recipe current"),
    ],
)
def test_scaled_mm_refuses_what_it_cannot_do(flags, message):
    with pytest.raises(UserError, match=message):
        recipes(PrecisionFlags(**({"fp8": True, "fp8_recipe": "current", "fp8_scaled_mm": True} | flags)))
    assert PrecisionFlags(fp8_scaled_mm=True).torch_only() == ("--fp8_scaled_mm",)
