"""Transformer Engine's decoder layers beside the torch backend's, on a GPU that has it (docs/hardware.md: which).
Tolerances follow from the formats' precision."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common.models.layers.initialise import initialise
from common.models.layers.recompute import save_activations
from extras.families.decoders.config import PRESETS
from extras.families.decoders.model import DecoderForCausalLM
from extras.formats.emulation import Emulation
from extras.formats.fp8_block import BlockScaling
from extras.formats.fp8_current import CurrentScaling
from extras.formats.fp8_delayed import DelayedScaling
from extras.formats.mxfp8 import MXFP8BlockScaling
from extras.formats.nvfp4 import NVFP4BlockScaling
from tests.gpu.test_te import HOPPER, SMALL, forget, loss_and_gradients, process_group  # noqa: F401 - a fixture
from tests.gpu.test_training import relative

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]
SIZES = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
MODELS = ["llama3_1_8b", "mistral_8x7b"]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=16),
    "current": CurrentScaling(),
    "block": BlockScaling("e4m3"),
    "mxfp8": MXFP8BlockScaling("e4m3"),
    # Without random bits, which are the GPU's own, and the transform, which takes no fp32.
    "nvfp4": NVFP4BlockScaling("e4m3", disable_stochastic_rounding=True, disable_rht=True),
}
LENGTHS = (17, 64, 1, 46)  # 128 tokens: no fillers


def model_of(name: str, backend: str) -> DecoderForCausalLM:
    config = replace(PRESETS[name].config, **SIZES, **HEADS, initializer_range=0.05)
    config = replace(config, num_local_experts=min(config.num_local_experts, 4))
    with torch.device("meta"):
        model = DecoderForCausalLM(config, backend)
    model.to_empty(device="cuda")
    initialise(model, 0, config.initializer_range)
    return model


def pack(lengths=LENGTHS, seed: int = 0) -> dict:
    ids = torch.randint(0, SIZES["vocab_size"], (2, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor((0, *lengths)).cumsum(0).int()
    return {"input_ids": ids[0], "labels": ids[1], "cu_seqlens": bounds, "max_seqlen": max(lengths)}


def skip_unless_here(recipe) -> None:
    if torch.cuda.get_device_capability() < recipe.capability:
        pytest.skip(f"{recipe.title} needs a later GPU")


@pytest.mark.parametrize("name", ["llama3_1_8b", "llama3_2_1b", "mathstral_7b", "mistral_8x7b"])
def test_fp32_equals_the_torch_backend(name):
    """Values of weights, loss and gradients. Matmuls are TF32 (10 bits) unless NVIDIA_TF32_OVERRIDE=0."""
    model, theirs = model_of(name, "torch"), model_of(name, "te")
    weights = dict(theirs.named_parameters())
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.named_parameters())
    loss, gradients = loss_and_gradients(model, pack(), bf16=False)
    other, found = loss_and_gradients(theirs, pack(), bf16=False)
    assert abs(other / loss - 1) < 1e-4
    for name, gradient in gradients.items():
        assert relative(found[name], gradient) < 5e-3, name


def test_bf16_equals_fp32():
    loss, gradients = loss_and_gradients(model_of("llama3_1_8b", "torch"), pack(), bf16=False)
    other, found = loss_and_gradients(model_of("llama3_1_8b", "te"), pack(), bf16=True)
    assert abs(other / loss - 1) < 5e-3
    for name, gradient in gradients.items():
        assert found[name].dtype == torch.float32
        assert relative(found[name], gradient) < 0.05, name


@HOPPER
@pytest.mark.parametrize("preset", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_matmuls_equal_the_emulation(name, preset, forget):  # noqa: F811
    """In fp32, where both quantise the same tensors: forward, and every gradient. A GPU's units keep fewer bits
    between partial sums, which moves a number over the edge between two neighbours now and then. Of Mixtral's four
    experts one gets no token, and the others get numbers that are no multiples of anything."""
    from extras.formats.te import Quantised

    skip_unless_here(RECIPES[name])
    start, quantised = model_of(preset, "torch"), model_of(preset, "te")
    if start.config.num_local_experts:
        for model in (start, quantised):
            with torch.no_grad():
                model.layers[1].layernorm_mlp.gate_weight[3, 0] = -9
    plan = (RECIPES[name],) * 3
    Quantised(quantised, plan)
    emulated = copy.deepcopy(start)
    Emulation(emulated, plan, seed=0, device="cuda").begin_pack(0, 0)
    random = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(128, width, generator=random).cuda() for width in (128, 192))
    x[:, 0] = 4

    def of_modules(model) -> dict[str, torch.Tensor]:
        layer, found = model.layers[1], {}
        for name in ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"):
            module, inputs = layer.get_submodule(name), x.clone().requires_grad_()
            with model.layers.quantised.all() if model is quantised else nullcontext():
                y = module(inputs)
            y = y[0] if isinstance(y, tuple) else y
            y.backward(grad[:, : y.shape[1]])
            found |= {name: y.detach(), f"{name} dx": inputs.grad}
        return found | {name: p.grad for name, p in layer.named_parameters()}

    plain, ours, theirs = map(of_modules, (start, emulated, quantised))
    if start.config.num_local_experts:
        for found in (ours, theirs):
            assert not found["layernorm_mlp.fc1_weight"].chunk(4)[3].any(), "it has no tokens"
    for name, tensor in ours.items():
        assert relative(tensor, plain[name]) > 0.005, name
        assert relative(theirs[name], tensor) < relative(tensor, plain[name]) / 4, name


@HOPPER
def test_nans_hidden_by_nvfp4_matmuls_are_detected(forget):  # noqa: F811
    """A NaN among the gradients that attention hands back, and one in a weight. Over the stand-in, whose casts hide
    them, loss and gradients are finite; whether those of a GPU do is for one to say."""
    from extras.formats.te import Quantised

    skip_unless_here(RECIPES["nvfp4"])
    model = model_of("llama3_1_8b", "te")
    guard = Quantised(model, (RECIPES["nvfp4"],) * 3)

    def found() -> float:
        loss, gradients = loss_and_gradients(model, pack(), bf16=True)
        assert not SMALL or math.isfinite(loss) and all(gradient.isfinite().all() for gradient in gradients.values())
        return guard.nonfinite(torch.zeros((), device="cuda"), model.parameters()).item()

    def spoil(module, inputs, output) -> None:
        output.register_hook(lambda gradient: torch.cat((gradient[:1] * math.nan, gradient[1:])))

    layer = model.layers[1]
    assert found() == 0
    spoiling = layer.self_attention.layernorm_qkv.register_forward_hook(spoil, prepend=True)
    assert math.isnan(found())
    spoiling.remove()
    assert found() == 0
    with torch.no_grad():
        layer.layernorm_mlp.fc1_weight[0, 0] = math.nan
    assert math.isnan(found())


@HOPPER
@pytest.mark.parametrize("preset", MODELS)
def test_pack_of_any_length_is_padded(preset, forget):  # noqa: F811
    """Fillers change neither loss nor gradients, but for the rounding of the other tokens; a router counts none. With
    experts the first is in fp32: another rounding sends a token to other experts now and then."""
    from extras.formats.te import Quantised

    (ours, model), found = (model_of(preset, backend) for backend in ("torch", "te")), []
    experts = bool(model.config.num_local_experts)
    plain = loss_and_gradients(ours, pack((17, 3)), bf16=not experts)
    if experts:
        with torch.no_grad():
            inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in pack((17, 3)).items()}
            routers = [m(**inputs).router.item() for m in (ours, model)]
        assert abs(routers[1] / routers[0] - 1) < 1e-3
    for quantise in (False, True):
        if quantise:
            Quantised(model, (RECIPES["current"],) * 3)
        found.append(loss_and_gradients(model, pack((17, 3)), bf16=quantise or not experts))
    for (loss, gradients), close in zip(found, (0.05, 0.3), strict=True):
        assert abs(loss / plain[0] - 1) < close / 10
        if experts and close == 0.3:
            break
        for name, gradient in plain[1].items():
            assert relative(gradients[name], gradient) < close, name
    with torch.no_grad():
        ids = torch.zeros(3, 7, dtype=torch.long).cuda()
        assert model(ids).logits.shape == (3, 7, SIZES["vocab_size"])


@HOPPER
@pytest.mark.parametrize(("preset", "fp8"), [(MODELS[0], False), (MODELS[0], True), (MODELS[1], True)])
def test_fsdp2_and_recomputation_change_nothing(preset, fp8, forget):  # noqa: F811
    from extras.formats.te import Quantised

    start = model_of(preset, "te")
    with torch.no_grad():  # what bf16 holds: FSDP2 gathers weights in it, and FP8 numbers are made from those
        weights = {name: tensor.bfloat16().float() for name, tensor in start.named_parameters()}

    def two_steps(change, fp8: bool = fp8) -> list[tuple[float, dict]]:
        forget()
        model = model_of(preset, "te")
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(weights[name])
        change(model)
        scales = Quantised(model, (RECIPES["delayed"],) * 3) if fp8 else None
        found = [loss_and_gradients(model, pack(), bf16=True) for _ in range(2)]
        if fp8:
            modules = 4 if model.config.num_local_experts else 3
            assert len(scales.state) == 3 * modules * 4  # layers x modules x (scale and history, each way)
            for name, history in scales.state.items():  # one row a step, the newest last
                if name.endswith("qkv.scaling_fwd.amax_history"):
                    assert (history[:, 0] != 0).nonzero().flatten().tolist() == [14, 15], name
        return found

    def shard(model) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)

    def recompute(model) -> None:
        save_activations(list(model.layers), "full")

    with process_group():
        expected, in_bf16 = two_steps(lambda model: None), two_steps(lambda model: None, fp8=False)
        for change in (shard, recompute):
            for (loss, gradients), (ours, found), (_, plain) in zip(expected, two_steps(change), in_bf16, strict=True):
                assert abs(ours / loss - 1) < 2e-3
                for name, gradient in found.items():
                    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                    # As of ESM-2: what moves over an edge of FP8's grid is of the size of FP8's own rounding.
                    by_fp8 = 1.5 * relative(gradients[name], plain[name]) if fp8 and change is shard else 0.0
                    assert relative(whole, gradients[name]) < max(0.03, by_fp8), name
