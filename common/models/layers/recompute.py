"""Activation checkpointing: a layer's activations are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.distributed.strategy import StrategyFlags
from common.flags import flag
from common.models.layers.residual import total

MODES = ("none", "selective", "full")

# `selective` saves the results of matmuls and fused attention; norms, GELU, rotary and the like are recomputed.
_SAVED = (
    *("aten::mm", "aten::addmm", "aten::_scaled_mm_v2", "mkldnn::_linear_pointwise", "cpu::matmul", "cpu::attention"),
    *("esm2::context_attention", "sets::attention", "esm2::matmul_gelu", "decoders::grouped_linear"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    "torch_attn::_varlen_attn",
)


def mode_of(text: str) -> str:
    """One of the MODES, by name or by the boolean of the FSDP guides."""
    return {"1": "full", "true": "full", "0": "none", "false": "none"}.get(text.lower(), text)


@dataclass(frozen=True)
class RecomputeFlags(StrategyFlags):
    """Flags of strategies that shard."""

    activation_checkpointing: str = flag(
        "none", "If memory runs out: recompute activations; selective: the cheap ones.", choices=MODES
    )

    @property
    def only_by_torch(self) -> tuple[str, ...]:
        return ("--activation_checkpointing selective",) * (self.activation_checkpointing == "selective")

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        return {mode: {"activation_checkpointing": mode} for mode in MODES}

    def resolve(self) -> RecomputeFlags:
        return replace(self, activation_checkpointing=mode_of(self.activation_checkpointing))


def save_activations(layers: Iterable[Any], mode: str) -> None:
    """Set the activation checkpointing of these layers, in place; names and parameters stay."""
    for layer in layers:
        if mode != "none" and hasattr(layer, "recompute"):
            layer.recompute()  # Transformer Engine's own, `full` only
        elif mode != "none":
            layer.forward = _recomputed(layer.forward, selective=mode == "selective")


def _recomputed(forward: Callable, selective: bool) -> Callable:
    contexts: dict[str, Any] = {}
    if selective:
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}

    def call(stream, *args):  # torch.compile traces a function, but not a partial of `checkpoint`
        # The input is saved, as one tensor. Layers draw no random numbers.
        return checkpoint(forward, total(stream), *args, use_reentrant=False, preserve_rng_state=False, **contexts)

    return call


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    name = operator.name().split(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_by_te(layer: Any) -> None:
    """`full` activation checkpointing of Transformer Engine's layers, as their method: keeps FP8's scales right.

    te.checkpoint takes each layer's second forward pass for the end of a step: the amax history would move on once a
    layer. Inside another autocast it is not the outermost that ends.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def contexts():
        # For the first and second pass; with the current recipe, since te would record a default one otherwise.
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        return nullcontext(), te.autocast(enabled=False, recipe=recipe)

    layer.forward = partial(te.checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
