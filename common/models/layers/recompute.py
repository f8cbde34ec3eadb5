"""Recomputation of a layer of Transformer Engine's modules, which minds FP8's scales."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.distributed.strategy import StrategyFlags
from common.flags import flag
from common.models.layers.cpu import is_as_on_a_gpu
from common.models.layers.residual import total

# Activations in host memory between forward and backward pass, copied there and back while layers compute.
#
# A stream of its own takes along what a layer saves while the next layer computes, and fetches what the layer before
# saved while this one goes backwards. So the device has what two layers saved, and what is computed with. (torch's
# `save_on_cpu` copies in the stream that computes, and every layer waits for its copies.)
#
# Weights stay: the strategy says when they are there. Where the device is the host nothing is copied.


class Offloading:
    """Of the layers of one model, in the order in which they are called."""

    def __init__(self):
        self._stream: torch.cuda.Stream | None = None  # none where a run is rehearsed
        self._leaving: list[_Call] = []  # the last two, of which the device may still have everything
        self._last: Callable[[], _Call | None] = lambda: None

    def forward(self, layer: nn.Module) -> Callable:
        """The layer's forward pass as it is now, with what it saves in host memory."""
        compute = layer.forward

        # torch.compile begins anew in the layer: streams and hooks are not for its graphs.
        @torch.compiler.disable(recursive=False)
        def forward(*args):
            if not torch.is_grad_enabled():
                return compute(*args)
            while len(self._leaving) > 1:
                self._let_go(self._leaving.pop(0))
            call = _Call(self, self._last, {p.untyped_storage()._cdata for p in layer.parameters()})
            with saved_tensors_hooks(call.save, call.give):
                result = compute(*args)
            if call.there:
                call.copied = self._record()
                self._leaving.append(call)
                self._last = weakref.ref(call)
            return result

        return forward

    def away(self, tensor: Tensor) -> Tensor:
        """Its copy in host memory, once the stream is through with it."""
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._beside():
            host.copy_(tensor, non_blocking=True)
        return host

    def fetched(self, call: _Call) -> list[Tensor]:
        """What a call saved, on the device; what the call before it saved is on its way from now on."""
        self._leaving.clear()  # the backward pass has begun: what has not left stays
        self._fetch(call)
        self._wait_for(call)
        if (before := call.before()) is not None:
            self._fetch(before)
        return call.here

    def _fetch(self, call: _Call) -> None:
        if call.here:
            return
        # Memory of the stream that computes, which lets go of it after use: the other only has to wait for it now.
        call.here = [torch.empty_like(tensor, device=call.device) for tensor in call.there]
        with self._beside():
            for tensor, host in zip(call.here, call.there, strict=True):
                tensor.copy_(host, non_blocking=True)
        call.copied = self._record()

    def _let_go(self, call: _Call) -> None:
        self._wait_for(call)
        call.here = []

    def _beside(self) -> AbstractContextManager:
        """The other stream, after what has been asked of the one that computes."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _record(self) -> torch.cuda.Event | None:
        return self._stream and self._stream.record_event()

    def _wait_for(self, call: _Call) -> None:
        if call.copied is not None:
            torch.cuda.current_stream().wait_event(call.copied)
            call.copied = None


class _Call:
    """What one call of a layer saved: `there`, in host memory, and `here`, while the device has it.

    before: gives the call before it, if that has not gone backwards yet; weights: storages of the layer's weights.
    """

    def __init__(self, offloading: Offloading, before: Callable[[], _Call | None], weights: set[int]):
        self.offloading, self.before, self.weights = offloading, before, weights
        self.here: list[Tensor] = []
        self.there: list[Tensor] = []
        self.device: torch.device | None = None
        self.copied: torch.cuda.Event | None = None  # of the last copies, either way, until they were waited for

    def save(self, tensor: Tensor) -> Tensor | tuple[_Call, int]:
        on_host = tensor.device.type == "cpu" and not is_as_on_a_gpu()
        if on_host or tensor.untyped_storage()._cdata in self.weights:
            return tensor
        self.device = tensor.device
        self.there.append(self.offloading.away(tensor))
        self.here.append(tensor)
        return self, len(self.here) - 1

    @staticmethod
    def give(saved: Tensor | tuple[_Call, int]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        call, number = saved
        return call.offloading.fetched(call)[number]


# What becomes of a layer's activations between forward and backward: kept, recomputed, or kept in host memory.

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


@dataclass(frozen=True)
class RecomputeFlags(StrategyFlags):
    """Of strategies that shard."""

    activation_checkpointing: str = flag("none", "Recompute activations: none, selective (cheap ones), full.")

    @property
    def only_by_torch(self) -> tuple[str, ...]:
        return ("--activation_checkpointing selective",) * (self.activation_checkpointing == "selective")

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        return {mode: {"activation_checkpointing": mode} for mode in MODES}

    def resolve(self) -> RecomputeFlags:
        return replace(self, activation_checkpointing=mode_of(self.activation_checkpointing))

    def check(self) -> None:
        self.require_choice("activation_checkpointing", MODES)


def save_activations(layers: list[nn.Module], mode: str, offload: bool) -> None:
    """Set the MODES of these layers, in place: names and parameters stay as they are."""
    offloading = Offloading()
    for layer in layers:
        if mode != "none" and hasattr(layer, "recompute"):
            layer.recompute()  # Transformer Engine's own way: `full` only (see common.models.layers.backend)
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


class RecomputedByTe:
    """Of a layer (beside nn.Module): what common.models.layers.recompute calls for `full`."""

    def recompute(self) -> None:
        """Keep no activations: run the forward pass again when the backward pass comes.

        te.checkpoint minds FP8's scales, but takes each layer's second forward pass for the end of a step: the amax
        history would age as many times as there are layers. Inside another autocast it is no outermost one that ends.
        """

        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        def contexts():
            # Of the first pass, of the second; with the recipe there is, for it would note a default one beside it.
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            return nullcontext(), te.autocast(enabled=False, recipe=recipe)

        self.forward = partial(te.checkpoint, self.forward, use_reentrant=False, context_fn=contexts)
