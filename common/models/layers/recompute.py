"""Activation checkpointing (recomputation) and offloading: what happens to a layer's activations until backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.compat import storage_key
from common.distributed.strategy import StrategyFlags
from common.flags import flag
from common.models.layers.cpu import device_type
from common.models.layers.residual import total


class Offloading:
    """Keeps activations in host memory between forward and backward pass, copying them while layers compute.

    A second CUDA stream copies what a layer saved to the host while the next layer computes, and in the backward pass
    prefetches the previous layer's. So the device holds the activations of two layers. (torch's `save_on_cpu` copies
    on the computing stream, and every layer waits for its copies.) Weights are not offloaded: the strategy shards
    them. On a CPU nothing is copied.

    One for the layers of a model, in the order in which they are called.
    """

    def __init__(self):
        self._stream: torch.cuda.Stream | None = None  # none in a dry run
        self._leaving: list[_Call] = []  # the last two, which may still be on the device
        self._last: Callable[[], _Call | None] = lambda: None

    def forward(self, layer: nn.Module) -> Callable:
        """The layer's current forward pass, with its saved tensors offloaded."""
        compute = layer.forward

        # torch.compile starts inside the layer: streams and hooks do not belong in its graphs.
        @torch.compiler.disable(recursive=False)
        def forward(*args):
            if not torch.is_grad_enabled():
                return compute(*args)
            while len(self._leaving) > 1:
                self._free(self._leaving.pop(0))
            call = _Call(self, self._last, {storage_key(p) for p in layer.parameters()})
            with saved_tensors_hooks(call.pack, call.unpack):
                result = compute(*args)
            if call.on_host:
                call.copied = self._record()
                self._leaving.append(call)
                self._last = weakref.ref(call)
            return result

        return forward

    def to_host(self, tensor: Tensor) -> Tensor:
        """Its copy in pinned host memory, complete once the copy stream gets there."""
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._on_copy_stream():
            host.copy_(tensor, non_blocking=True)
        return host

    def fetch(self, call: _Call) -> list[Tensor]:
        """A call's saved tensors, on the device; starts to prefetch those of the call before."""
        self._leaving.clear()  # the backward pass has begun: what is still on the device stays
        self._copy_back(call)
        self._wait_for(call)
        if (before := call.before()) is not None:
            self._copy_back(before)
        return call.on_device

    def _copy_back(self, call: _Call) -> None:
        if call.on_device:
            return
        # Memory of the computing stream, which frees it after use: the copy stream only has to wait for it now.
        call.on_device = [torch.empty_like(tensor, device=call.device) for tensor in call.on_host]
        with self._on_copy_stream():
            for tensor, host in zip(call.on_device, call.on_host, strict=True):
                tensor.copy_(host, non_blocking=True)
        call.copied = self._record()

    def _free(self, call: _Call) -> None:
        self._wait_for(call)
        call.on_device = []

    def _on_copy_stream(self) -> AbstractContextManager:
        """The copy stream, after everything queued on the computing one."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _record(self) -> torch.Event | None:
        return self._stream.record_event() if self._stream else None

    def _wait_for(self, call: _Call) -> None:
        if call.copied is not None:
            torch.cuda.current_stream().wait_event(call.copied)
            call.copied = None


class _Call:
    """The tensors that one call of a layer saved: `on_host`, and `on_device` while they are there.

    before: returns the previous call, until that has had its backward pass; weights: storages of the layer's weights.
    """

    def __init__(self, offloading: Offloading, before: Callable[[], _Call | None], weights: set[int]):
        self.offloading, self.before, self.weights = offloading, before, weights
        self.on_device: list[Tensor] = []
        self.on_host: list[Tensor] = []
        self.device: torch.device | None = None
        self.copied: torch.Event | None = None  # after the last copies, either way, until waited for

    def pack(self, tensor: Tensor) -> Tensor | tuple[_Call, int]:
        if device_type(tensor) == "cpu" or storage_key(tensor) in self.weights:
            return tensor
        self.device = tensor.device
        self.on_host.append(self.offloading.to_host(tensor))
        self.on_device.append(tensor)
        return self, len(self.on_device) - 1

    @staticmethod
    def unpack(saved: Tensor | tuple[_Call, int]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        call, number = saved
        return call.offloading.fetch(call)[number]


MODES = ("none", "selective", "full")

# `selective` saves the results of matmuls and fused attention; norms, GELU, rotary and the like are recomputed.
_SAVED = (
    *("aten::mm", "aten::addmm", "aten::_scaled_mm_v2", "mkldnn::_linear_pointwise", "cpu::matmul", "cpu::attention"),
    *("esm2::context_attention", "esm2::matmul_gelu", "decoders::grouped_linear"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    "torch_attn::_varlen_attn",
)


def mode_of(text: str) -> str:
    """One of the MODES, by name or by the boolean of the FSDP guides."""
    return {"1": "full", "true": "full", "0": "none", "false": "none"}.get(text.lower(), text)


@dataclass(frozen=True)
class RecomputeFlags(StrategyFlags):
    """Of strategies that shard."""

    activation_checkpointing: str = flag("none", "Recompute activations; selective: the cheap ones.", choices=MODES)

    @property
    def only_by_torch(self) -> tuple[str, ...]:
        return ("--activation_checkpointing selective",) * (self.activation_checkpointing == "selective")

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        return {mode: {"activation_checkpointing": mode} for mode in MODES}

    def resolve(self) -> RecomputeFlags:
        return replace(self, activation_checkpointing=mode_of(self.activation_checkpointing))


def save_activations(layers: Iterable[Any], mode: str, offload: bool) -> None:
    """Set the activation checkpointing of these layers, in place; names and parameters stay."""
    offloading = Offloading()
    for layer in layers:
        if mode != "none" and hasattr(layer, "recompute"):
            layer.recompute()  # Transformer Engine's own, `full` only
        elif mode != "none":
            layer.forward = _recomputed(layer.forward, selective=mode == "selective")
        if offload:
            layer.forward = offloading.forward(layer)


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
