"""What becomes of a layer's activations between forward and backward: kept, recomputed, or kept in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.cli import Flags, flag
from common.layers.offload import Offloading
from common.layers.stream import total

MODES = ("none", "selective", "full")

# Results of products and of fused attention are kept by `selective`; norms, GELU, rotary and the like are recomputed.
_KEPT = (
    *("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "esm2::product", "esm2::attention"),
    "esm2::context_attention",
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    "torch_attn::_varlen_attn",
)


def mode_of(text: str) -> str:
    """One of the MODES, by its name or as the FSDP guides have it: a boolean."""
    return {"1": "full", "true": "full", "0": "none", "false": "none"}.get(text.lower(), text)


@dataclass
class RecomputeFlags(Flags):
    group = "memory and exchange"

    activation_checkpointing: str = flag("none", "Activations: none recomputed, selective (cheap ones), full.")

    @property
    def only_by_torch(self) -> tuple[str, ...]:
        """What of it only the torch backend can honour."""
        return ("--activation_checkpointing selective",) * (self.activation_checkpointing == "selective")

    def ways(self) -> dict[str, dict[str, object]]:
        """{name: {flag: value}} of what may become of activations, for a dry run to compare."""
        return {mode: {"activation_checkpointing": mode} for mode in MODES}

    def check(self) -> None:
        self.activation_checkpointing = mode_of(self.activation_checkpointing)
        self.require_choice("activation_checkpointing", MODES)


@dataclass
class CheckpointingFlags(Flags):
    """Of scripts without the other modes."""

    group = "memory and exchange"

    gradient_checkpointing: bool = flag(
        False, "Keep of each layer what went in, and compute the rest anew in the backward pass."
    )

    @property
    def recomputed(self) -> str:
        """One of the MODES."""
        return "full" if self.gradient_checkpointing else "none"

    def ways(self) -> dict[str, dict[str, object]]:
        """As of `RecomputeFlags`."""
        return {"none": {"gradient_checkpointing": False}, "full": {"gradient_checkpointing": True}}


def save_activations(layers: list[nn.Module], mode: str, offload: bool) -> None:
    """Set the MODES of these layers, in place: names and parameters stay as they are."""
    offloading = Offloading()
    for layer in layers:
        if mode != "none" and hasattr(layer, "recompute"):
            layer.recompute()  # Transformer Engine's own way: `full` only (see common.layers.backend)
        elif mode != "none":
            layer.forward = _recomputed(layer.forward, selective=mode == "selective")
        if offload:
            layer.forward = offloading.forward(layer)


def _recomputed(forward: Callable, selective: bool) -> Callable:
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}

    def call(stream, *args):  # torch.compile looks into a function, and not into a partial of `checkpoint`
        # What goes in is kept: one tensor of it. There is nothing random in a layer.
        return checkpoint(forward, total(stream), *args, use_reentrant=False, preserve_rng_state=False, **contexts)

    return call


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    name = operator.name().split(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
