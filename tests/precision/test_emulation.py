"""Emulated precision: each matmul against the formats' definitions, and runs of it on every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.distributed.world import World
from common.models.esm2.config import load_config
from common.models.esm2.model import build_model
from common.models.layers.config_base import override
from common.models.layers.linear import linear
from common.precision import PrecisionFlags
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.model import DecoderForCausalLM
from extras.formats import emulation as fake_quant
from extras.formats.emulation import Emulation
from extras.formats.fp8_delayed import DelayedScaling
from extras.formats.nvfp4 import hadamard_matrix
from extras.formats.plan import resolve
from tests.models.reference import packed, random_batch
from tests.precision import format_reference as reference
from tests.training_fixtures import TINY_OVERRIDES, losses, train

ALONE = World(0, 0, 1, torch.device("cpu"))
FP8 = {"fp8": True, "emulate_precision": True}
RECIPES = {
    "delayed": FP8,
    "current": FP8 | {"fp8_recipe": "current"},
    "current, powers of 2": FP8 | {"fp8_recipe": "current", "fp8_recipe_kwargs": '{"use_power_2_scales": true}'},
    "block": FP8 | {"fp8_recipe": "block"},
    "block, fp32 scales": FP8 | {"fp8_recipe": "block", "fp8_recipe_kwargs": '{"use_f32_scales": true}'},
    "mxfp8": FP8 | {"fp8_recipe": "mxfp8"},
    "mxfp8, hybrid": FP8 | {"fp8_recipe": "mxfp8", "fp8_format": "hybrid"},
    "mxfp8, squares": FP8 | {"fp8_recipe": "mxfp8", "fp8_recipe_kwargs": '{"enable_2d_quantization": true}'},
    "nvfp4": {"fp4": True, "emulate_precision": True},
}
PLAIN_NVFP4 = '{"disable_rht": true, "disable_stochastic_rounding": true, "disable_2d_quantization": true}'
TOKENS, INPUTS, OUTPUTS = 64, 96, 160


def tiny_model(**flags):
    config = override(load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES)
    model = build_model(config, seed=1)
    plan = resolve(PrecisionFlags(**flags), config.num_hidden_layers)
    return model, Emulation(model, plan, seed=1)


def matmul_of(**flags) -> fake_quant.EmulatedMatmul:
    return tiny_model(**flags)[0].encoder.layers[1].layernorm_mlp.fc1_matmul


def operands(dtype=torch.float32) -> list[torch.Tensor]:
    """x, weight, bias, gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((TOKENS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (TOKENS, OUTPUTS))
    spread = (1.0, 0.02, 0.1, 1e-4)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator).mul_(s).to(dtype) for shape, s in zip(shapes, spread, strict=True)
    )
    x[3, 5] *= 50
    return [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad]


def by_definition(name: str, flags: dict, x: torch.Tensor, role: int, along: int) -> np.ndarray:
    """The operand as float64, quantised by format_reference.py; along: 1 or 0, the dimension summed over."""
    x = x.detach().float().numpy()
    hybrid = role == fake_quant.GRADIENT and (name in ("delayed",) or "hybrid" in name or name.startswith("current"))
    numbers = reference.E5M2 if hybrid else reference.E4M3
    line = (lambda n: (1, n)) if along == 1 else (lambda n: (n, 1))
    if name.startswith("block"):
        square = role == fake_quant.WEIGHT
        return reference.fp8_blocks(x, (128, 128) if square else line(128), numbers, name == "block")
    if name.startswith("mxfp8"):
        square = "squares" in name and role == fake_quant.WEIGHT
        return reference.mx(x, (32, 32) if square else line(32), numbers)
    if name == "nvfp4":
        if along == 0 and role != fake_quant.WEIGHT and "disable_rht" not in flags.get("fp4_recipe_kwargs", ""):
            matrix = hadamard_matrix().t()
            x = np.concatenate([(matrix @ part).numpy() for part in torch.from_numpy(x).split(16)])
        plain = "disable_2d" in flags.get("fp4_recipe_kwargs", "")
        values, scale = reference.nvfp4(x, (16, 16) if role == fake_quant.WEIGHT and not plain else line(16))
        return values * float(scale)
    scale = np.float32(1)
    if name != "delayed":  # whose first scale is 1
        scale = reference.fp8_scale(float(np.abs(x).max()), numbers[-1], "powers" in name)
    return reference.fp8_tensor(x, scale, numbers) * float(np.float32(1) / scale)


def close(ours: torch.Tensor, expected: np.ndarray, tolerance: float) -> bool:
    difference = np.linalg.norm(ours.detach().double().numpy() - expected)
    return difference <= tolerance * np.linalg.norm(expected)


def check_product(name: str, flags: dict, dtype: torch.dtype) -> None:
    matmul = matmul_of(**flags)
    x, weight, bias, grad = operands(dtype)
    if name == "delayed":
        grad *= 1e4  # with a scale of 1 nothing of it would be left
    y = matmul(x, weight, bias)
    y.backward(grad)
    q = {
        (role, along): by_definition(name, flags, tensor, role, along)
        for role, tensor in ((fake_quant.INPUT, x), (fake_quant.WEIGHT, weight), (fake_quant.GRADIENT, grad))
        for along in (0, 1)
    }
    # fp32: rounding of sums. bf16: the matmul is rounded, then again where a tensor's scale or the bias is applied,
    # each by up to 2^-9.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype
    exact_bias = bias.detach().double().numpy()
    assert close(y, q[fake_quant.INPUT, 1] @ q[fake_quant.WEIGHT, 1].T + exact_bias, tolerance)
    assert close(x.grad, q[fake_quant.GRADIENT, 1] @ q[fake_quant.WEIGHT, 0], tolerance)
    assert close(weight.grad, q[fake_quant.GRADIENT, 0].T @ q[fake_quant.INPUT, 0], tolerance)
    assert close(bias.grad, grad.double().sum(0).numpy(), tolerance)
    assert not close(y, (x @ weight.t() + bias).detach().double().numpy(), 1e-3), "nothing is quantised"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_emulated_fp8_matmuls_equal_definition(name, dtype):
    check_product(name, RECIPES[name], dtype)


@pytest.mark.parametrize("kwargs", [PLAIN_NVFP4, '{"disable_stochastic_rounding": true}'])
def test_emulated_nvfp4_matmuls_equal_definition(kwargs):
    for dtype in (torch.float32, torch.bfloat16) if kwargs is PLAIN_NVFP4 else (torch.float32,):
        check_product("nvfp4", RECIPES["nvfp4"] | {"fp4_recipe_kwargs": kwargs}, dtype)


def test_emulated_stochastic_gradients_are_keyed_and_unbiased():
    matmul = matmul_of(**RECIPES["nvfp4"])
    emulation = matmul.emulation

    def gradients(step: int, pack: int) -> torch.Tensor:
        x, weight, bias, grad = operands()
        emulation.begin_pack(step, pack)
        matmul(x, weight, bias).backward(grad)
        return torch.cat((x.grad.flatten(), weight.grad.flatten()))

    first = gradients(0, 0)
    assert torch.equal(first, gradients(0, 0))
    assert not torch.equal(first, gradients(0, 1))
    assert not torch.equal(first, gradients(1, 0))
    # The gradient of x: on average what the unquantised gradient gives, but for the largest values, which clip.
    _, weight, _, grad = operands()
    inputs = slice(0, TOKENS * INPUTS)
    exact = (grad.double().numpy() @ by_definition("nvfp4", {}, weight, fake_quant.WEIGHT, 0)).ravel()
    mean = sum(gradients(0, pack)[inputs].double() for pack in range(64)).numpy() / 64
    off, of_one = (np.linalg.norm(g - exact) for g in (mean, first[inputs].double().numpy()))
    assert off < of_one / 4  # by chance 1/8


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
def test_emulated_linear_under_autocast_casts_activations_only(recipe):
    """From fp32, as Transformer Engine does; rounded to bf16 first, some become other numbers."""
    x, weight, bias, grad = operands()

    def run(weight: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
        matmul = matmul_of(**RECIPES[recipe])
        mine = [t.detach().requires_grad_() for t in (x if autocast else x.bfloat16(), weight, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = matmul(*mine)
        assert y.dtype == torch.bfloat16
        y.backward(grad.bfloat16())
        assert [t.grad.dtype for t in mine] == [t.dtype for t in mine]
        return [y.detach(), mine[0].grad.bfloat16(), mine[1].grad]

    under, gathered, wide = run(weight, True), run(weight.bfloat16(), True), run(weight, False)
    assert all(torch.equal(a, b) for a, b in zip(under, wide, strict=True))
    assert not torch.equal(under[0], gathered[0])
    held = weight.bfloat16().float()  # what bf16 holds is the same, gathered or not
    for a, b in zip(run(held, True), gathered, strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("rows", [TOKENS, TOKENS - 3], ids=["whole", "filled up"])
def test_emulated_matmul_is_no_view(rows):
    """FSDP2 warns of layers that return views: what is changed in place afterwards would get wrong gradients."""
    x, weight, bias, grad = operands()
    found = []
    for number in (rows, TOKENS):
        mine = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        matmul, keep = matmul_of(**RECIPES["current"]), (torch.arange(TOKENS) < rows)[:, None]
        y = matmul((mine[0] * keep)[:number], *mine[1:])
        assert not y._is_view()
        (y * (grad * keep)[:number]).sum().backward()
        found.append([y.detach()[:rows], *(tensor.grad for tensor in mine)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- which layers ------------------------------------------------------------------------------------------------


def test_emulation_changes_only_layers_of_plan():
    flags = {"fp4": True, "fp4_layers": "2", "emulate_precision": True}
    first, second = tiny_model(**flags)[0].encoder.layers
    assert first.self_attention.layernorm_qkv.matmul is first.self_attention.proj.matmul is linear
    assert first.layernorm_mlp.fc1_matmul is first.layernorm_mlp.fc2_matmul is linear
    matmuls = (
        second.self_attention.layernorm_qkv.matmul,
        second.self_attention.proj.matmul,
        second.layernorm_mlp.fc1_matmul,
        second.layernorm_mlp.fc2_matmul,
    )
    assert [p.matmul for p in matmuls] == [0, 1, 2, 3]
    assert {p.layer for p in matmuls} == {1}


# ---- delayed scaling ---------------------------------------------------------------------------------------------


PLACES = ("fc1_weight", "fc2_weight", "fc1_bias", "qkv.weight", "qkv.bias", "proj.bias", "gradient")


@pytest.mark.parametrize("place", [*PLACES, None])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_emulated_step_sees_infinity(name, place):
    """Casts make a number of it. A bias makes an activation infinite, which norms and GELU's derivative turn to NaN;
    an infinite weight would go unseen."""
    model, emulation = tiny_model(**RECIPES[name])
    layer = model.encoder.layers[1]
    if place == "gradient":  # of fc2's output
        spoil = lambda grad: grad.masked_fill(grad == grad.max(), torch.inf)  # noqa: E731
        layer.layernorm_mlp.register_forward_hook(lambda _module, _inputs, y: y.register_hook(spoil) and None)
    elif place:
        (parameter,) = (each for name, each in layer.named_parameters() if name.endswith(place))
        with torch.no_grad():
            parameter.view(-1)[0] = torch.inf
    loss = model(**packed(random_batch([30, 50, 20]))).loss_sum
    loss.backward()
    weights = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
    assert emulation.nonfinite(loss.detach() + norm, weights).isfinite() == (place is None)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scales_follow_amax_history(algorithm):
    kwargs = f'{{"amax_history_len": 2, "margin": 1, "amax_compute_algo": "{algorithm}"}}'
    matmul = matmul_of(**FP8 | {"fp8_recipe_kwargs": kwargs})
    emulation, columns = matmul.emulation, slice((4 + 2) * 3, (4 + 2) * 3 + 3)
    seen = []
    for step, size in enumerate((1.0, 8.0, 2.0, 0.5, 0.0)):
        emulation.begin_pack(step, 0)
        for part in (0.5, 1.0):  # two micro-batches
            x, weight, bias, grad = (t.detach() * size * part for t in operands())
            y = matmul(x.requires_grad_(), weight.requires_grad_(), bias)
            y.backward(grad)
        if size:  # zeros age nothing: the history and the scales stay, as in Transformer Engine
            seen.append(torch.stack([t.detach().abs().max() for t in (x, weight, grad)]))
        emulation.end_step(ALONE, skipped=False)
        window = torch.stack(seen[-2:] if algorithm == "max" else seen[-1:]).amax(0)
        expected = torch.tensor([448.0, 448.0, 57344.0]) / window / 2
        assert torch.equal(emulation.state["scale"][columns], expected)
    untouched = torch.ones(len(emulation.state["scale"]), dtype=torch.bool)
    untouched[columns] = False
    assert (emulation.state["scale"][untouched] == 1).all()


def test_emulated_experts_have_scales_of_their_own():
    """As in Transformer Engine, an expert without tokens too: its weight's counts, and its input's stays."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DecoderConfig("mixtral", 32, **sizes, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=1)
    model = DecoderForCausalLM(config)
    emulation = Emulation(model, (DelayedScaling(),) * 2, seed=1)
    assert emulation.state["scale"].shape == (2 * (2 + 2 * 3) * 3,)
    weight = torch.randn(3 * 64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = (torch.arange(1, 10.0)[:, None] * torch.ones(16)).requires_grad_()
    emulation.begin_pack(0, 0)
    y = model.layers[1].layernorm_mlp.fc1_matmul(x, weight, torch.tensor([4, 0, 5]))
    assert y.shape == (9, 64)
    y.backward(torch.ones_like(y) * x.detach()[:, :1])
    emulation.end_step(ALONE, skipped=False)
    fc1_of_layer = emulation.state["amax_history"][0].view(2, 8, 3)[1, 2:5]
    largest = [part.abs().max().item() for part in weight.chunk(3)]
    assert fc1_of_layer.tolist() == [[4.0, largest[0], 4.0], [0.0, largest[1], 0.0], [9.0, largest[2], 9.0]]
    assert not weight.grad.chunk(3)[1].any()


def test_delayed_scales_are_unchanged_by_evaluation():
    model, emulation = tiny_model(**FP8)
    batch = {"input_ids": torch.randint(4, 24, (64,)), "cu_seqlens": torch.tensor([0, 64], dtype=torch.int32)}
    with torch.no_grad():
        model(**batch, max_seqlen=64)
    assert (emulation.scales.amax == 0).all()
    emulation.begin_pack(0, 0)
    model(**batch, max_seqlen=64)
    assert (emulation.scales.amax.view(2, 4, 3)[..., :2] > 0).all()


# ---- runs --------------------------------------------------------------------------------------------------------

STEPS = {"max_steps": 6, "packs_per_step": 2, "save_final_model": False}
# A sum in another order moves a number by 1e-7 and, now and then, over the edge between two numbers of a format: by
# 1/16 (E4M3) or 1/4 (E2M1) of itself. Such flips stay rare and average out; a rank with scales or random bits of its
# own is off by more than 1e-3 in a few steps.
LAYOUT = 1e-3


@pytest.fixture(scope="module")
def full_precision(dataset, tmp_path_factory) -> list[float]:
    out = tmp_path_factory.mktemp("fp32")
    train(dataset, out, **STEPS)
    return losses(out)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("delayed", marks=pytest.mark.slow),
        pytest.param("block", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.slow),
        "nvfp4",
    ],
)
def test_emulated_run_of_every_layout_equals_one_process(dataset, tmp_path, full_precision, name):
    flags = STEPS | RECIPES[name]
    said = train(dataset, tmp_path / "alone", **flags)
    assert "Emulated precision:\n  layers  format\n  1-2     " in said
    alone = losses(tmp_path / "alone")
    fsdp = {"script": "train_fsdp2.py", "activation_checkpointing": "selective" if name == "nvfp4" else "full"}
    layouts = {"ddp": {}, "fsdp": fsdp}
    if name in ("block", "mxfp8"):  # that keep no state of their own from step to step: one of the two
        del layouts["ddp" if name == "mxfp8" else "fsdp"]
    for layout, more in layouts.items():
        train(dataset, tmp_path / layout, 2, **flags, **more)
        assert losses(tmp_path / layout) == pytest.approx(alone, rel=LAYOUT)
    assert alone != full_precision
    assert alone == pytest.approx(full_precision, rel=0.05 if name == "nvfp4" else 0.02)
    assert alone[-1] < alone[0] - 0.1


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("delayed", {}, marks=pytest.mark.slow),
        ("nvfp4", {"script": "train_fsdp2.py", "activation_checkpointing": "selective", "bf16": True}),
    ],
)
def test_emulated_compiled_layers_take_the_same_steps(dataset, tmp_path, name, more):
    """Matmuls stay outside the graphs."""
    flags = STEPS | RECIPES[name] | more | {"stop_at_step": 3}
    for compiled in (False, True):
        train(dataset, tmp_path / str(compiled), compiler="aot_eager", **flags, torch_compile=compiled)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_emulated_resume_is_bit_identical(dataset, tmp_path, name):
    flags = STEPS | RECIPES[name] | {"bf16": True, "script": "train_fsdp2.py" if name == "nvfp4" else "train_ddp.py"}
    train(dataset, tmp_path / "whole", **flags)
    for stop in (3, 6):
        train(dataset, tmp_path / "parts", **flags, stop_at_step=stop)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_emulated_resume_with_other_scales(dataset, tmp_path):
    train(dataset, tmp_path, **STEPS, stop_at_step=2)
    said = train(dataset, tmp_path, **STEPS, **FP8, stop_at_step=3)
    assert "The checkpoint has no FP8 scales: they start at 1" in said
    kwargs = {"fp8_recipe_kwargs": '{"amax_history_len": 16}'}
    said = train(dataset, tmp_path, expect=2, **STEPS, **FP8, **kwargs)
    assert (
        "the checkpoint's amax_history has the shape [1024, 24], not [16, 24]: give the same amax_history_len" in said
    )
    train(dataset, tmp_path, **STEPS, stop_at_step=4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"fp8": True},
            "error: --fp8: FP8, delayed scaling needs a GPU of compute capability 8.9 (Ada) or later; ",
        ),
        (FP8 | {"fp8_layers": "1-3"}, "error: --fp8_layers 1-3: there is no layer 3: the model has layers 1-2"),
        (
            FP8 | {"config_overrides": TINY_OVERRIDES.replace("hidden_size=32", "hidden_size=40")},
            "multiples of 16, and hidden_size is 40: --config_overrides hidden_size=48",
        ),
    ],
)
def test_emulated_run_refuses_bad_input(dataset, tmp_path, flags, message):
    said = train(
        dataset,
        tmp_path / "out",
        expect=2,
        use_cpu=True,
        config_name="facebook/esm2_t6_8M_UR50D",
        **({"config_overrides": TINY_OVERRIDES} | flags),
    )
    assert message in said
    assert len([line for line in said.splitlines() if line.startswith("error:")]) == 1
    assert not (tmp_path / "out").exists()
