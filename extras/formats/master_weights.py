"""fp32 master weights of parameters that the model holds in FP8 (--fp8_params), and a guard against hidden NaNs.

The model computes with the FP8 weights and gets their gradients. The optimiser's update and weight decay, checkpoints
and the exported model use the master weights. After every optimiser step, and after a checkpoint is read, the FP8
weights are cast from the master weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def with_weights(value: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """value, an fp32 scalar, or NaN if a weight is not finite. weights: this rank's, or its shards.

    Casts to FP8 and FP4 saturate: of an infinite weight they make the format's largest number, and loss and gradients
    are finite. Infinite activations and gradients show in norms, biases and the derivative of GELU.
    """
    norm = get_total_norm([w.to_local() if isinstance(w, DTensor) else w for w in weights]).to(value.device)
    return value + (norm - norm)


class NanGuard:
    """Detect NaNs that Transformer Engine's NVFP4 hides from loss and gradient norm, and infinite weights.

    E2M1 has no NaN: the cast turns one into 6, and the amax that scales come from ignores it. So an NVFP4 matmul of a
    NaN is finite, and so are its gradients. Whatever does not pass through such matmuls alone still shows a NaN: the
    residual stream and its gradient, norms, and bias gradients, which are summed before the cast. That leaves weights,
    and in layers without biases the gradients that attention returns to its inputs.

    Looks at those gradients as they pass, and at weights once a step, without waiting for the device. Emulated
    precision and the other formats keep a NaN; in all an infinite weight may hide (`with_weights`).

    layers: those in NVFP4.
    """

    def __init__(self, layers: Sequence[Any]):
        self.gradients: Tensor | float = 0.0  # NaN after one in any pass since the last step
        for layer in layers:
            qkv = layer.self_attention.layernorm_qkv
            if not qkv.use_bias:
                qkv.register_forward_hook(self._watch)

    def nonfinite(self, value: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """value, an fp32 scalar, or NaN if a NaN is hidden here. weights: this rank's, or its shards.

        Call it after a step's backward passes.
        """
        gradients, self.gradients = self.gradients, 0.0
        return with_weights(value, weights) + gradients

    def _watch(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        total = gradient.sum(dtype=torch.float32)
        self.gradients = self.gradients + (total - total)


class Masters:
    """Turns parameters of a model into masters and gives the model converted ones in their place.

    convert: by name of the parameter, what makes its stored form. Both then follow by `copy_`, that is rounded.
    weights: all parameters under the model's names, the masters where there are some; for whoever keeps weights.
    """

    def __init__(self, model: nn.Module, convert: Mapping[str, Callable[[Tensor], Tensor]]):
        named = dict(model.named_parameters())
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (stored, master)
        for name, to_stored in convert.items():
            with torch.no_grad():
                stored = nn.Parameter(to_stored(named[name].detach()))
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, stored)
            self.pairs.append((stored, named[name]))
        self.weights = _tree(named)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on the optimiser, which updates the masters, is given the stored parameters' gradients."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self.copy_to_model())

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Masters -> model."""
        for stored, master in self.pairs:
            stored.copy_(master)
            master.grad = None

    def _take_gradients(self) -> None:
        for stored, master in self.pairs:
            if stored.grad is not None:  # torch makes an optimiser's state by a step of its own, with other gradients
                master.grad = stored.grad.to(master.dtype)


def _tree(parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A module that has nothing but these parameters, under these names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, own_name = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(own_name, parameter)
    return root
