"""Transformer Engine's modules beside the emulation's, on the same inputs and weights: run by a forked process."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch

from common.distributed.world import World
from common.models.esm2.config import HIDDEN_ACT, esm2_config
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from extras.formats.emulation import Emulation
from extras.formats.fp8_block import BlockScaling
from extras.formats.fp8_current import CurrentScaling
from extras.formats.fp8_delayed import DelayedScaling
from extras.formats.mxfp8 import MXFP8BlockScaling
from extras.formats.nvfp4 import NVFP4BlockScaling
from tests.te_on_cpu import boot

HOPPER, BLACKWELL = (9, 0), (10, 0)
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=16),
    "delayed, margin": DelayedScaling(amax_history_len=4, margin=1, amax_compute_algo="most_recent"),
    "current": CurrentScaling(),
    "current, powers of 2": CurrentScaling(use_power_2_scales=True),
    "block": BlockScaling("e4m3"),
    "block, fp32 scales": BlockScaling("e4m3", use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling("e4m3"),
    "mxfp8, hybrid": MXFP8BlockScaling("hybrid"),
    # Without random bits; the Hadamard transform takes bf16 alone.
    "nvfp4": NVFP4BlockScaling("e4m3", disable_stochastic_rounding=True, disable_rht=True),
    "nvfp4, transform": NVFP4BlockScaling("e4m3", disable_stochastic_rounding=True),
}
HIDDEN, FFN, TOKENS, HEADS = 128, 256, 64, 8
MODULES = {"self_attention.layernorm_qkv": 3 * HIDDEN, "self_attention.proj": HIDDEN, "layernorm_mlp": HIDDEN}


def models(layers: int = 2) -> tuple[Esm2ForMaskedLM, Esm2ForMaskedLM]:
    """The torch backend's and Transformer Engine's with the same parameters, biases and norms too: bf16 holds them."""
    config = esm2_config(layers, HIDDEN, HEADS, intermediate_size=FFN, hidden_act=HIDDEN_ACT["tanh"])
    ours, theirs = (build_model(config, 0, "cuda", backend) for backend in ("torch", "te"))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.add_((torch.randn(parameter.shape, generator=random) * 0.05).cuda())
            parameter.copy_(parameter.bfloat16())
            theirs.get_parameter(name).copy_(parameter)
    return ours, theirs


def passes(model: Esm2ForMaskedLM, contexts, bf16: bool, number: int = 1) -> dict[str, torch.Tensor]:
    """Results and gradients of the matmuls of a layer: of qkv and proj each, of fc1 and fc2 together."""
    random, found, layer = torch.Generator().manual_seed(1), {}, model.layers[number]
    model.zero_grad()
    for name, width in MODULES.items():
        x, grad = (torch.randn(TOKENS, size, generator=random).bfloat16().float().cuda() for size in (HIDDEN, width))
        x = (x.bfloat16() if bf16 else x).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16), contexts():
            y = layer.get_submodule(name)(x)
        if isinstance(y, tuple):  # Transformer Engine's proj and MLP: with the bias aside
            y = y[0] if y[1] is None else y[0] + y[1]
        y.backward((grad * 1e-2).to(y.dtype))
        found |= {f"{name} y": y.detach(), f"{name} dx": x.grad}
    used = {key: p.grad.clone() for key, p in layer.named_parameters() if p.grad is not None}
    return found | used


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def compare(capability: tuple[int, int], path: str) -> None:
    """Write {(recipe, bf16, step): {tensor: (Transformer Engine's from the emulation, that from no format)}}."""
    boot.start(capability)
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from extras.formats.te import Quantised

    found = {}
    for name, recipe in RECIPES.items():
        for bf16 in (False, True):
            if max(recipe.capability, HOPPER) != capability or ("transform" in name and not bf16):
                continue
            FP8GlobalStateManager.reset()
            start, theirs = models()
            plan = (recipe,) * 2
            quantised, emulated = Quantised(theirs, plan), copy.deepcopy(start)
            emulation = Emulation(emulated, plan, seed=0, device="cuda")
            plain = passes(start, nullcontext, bf16)
            for step in range(3 if "delayed" in name else 1):
                emulation.begin_pack(step, 0)
                expected = passes(emulated, nullcontext, bf16)
                got = passes(theirs, quantised.all, bf16)
                emulation.end_step(World(0, 0, 1, torch.device("cuda")), skipped=False)
                found[name, bf16, step] = {
                    key: (distance(got[key], value), distance(value, plain[key])) for key, value in expected.items()
                }
    torch.save(found, path)
