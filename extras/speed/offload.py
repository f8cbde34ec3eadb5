"""--offload_activations: activations wait in host memory between forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.compat import storage_key
from common.models.layers.cpu import device_type


def offload_activations(layers: Iterable[Any]) -> None:
    """Offload what these layers save, in place; after `save_activations`, whose recomputation saves less."""
    offloading = Offloading()
    for layer in layers:
        layer.forward = offloading.forward(layer)


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
