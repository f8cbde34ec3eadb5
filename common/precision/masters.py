"""fp32 master weights of parameters that the model itself holds in another format (--fp8_params).

The model computes with the stored numbers and gets their gradients; everything that lasts is the masters': the
optimiser's update and weight decay, checkpoints, the exported model. After every optimiser step, and when a checkpoint
has been read, the stored numbers are made from the masters anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from common.precision.plan import NVFP4BlockScaling, Plan

# Numbers that are none (NaN) where Transformer Engine's NVFP4 would hide them from loss and gradient norm.
#
# E2M1 has no NaN: the cast takes one to 6, and the GPU's maximum, which scales come from, passes it over. So a product
# of NVFP4 makes a finite number of it, and its gradients are finite too. What does not go through such products alone
# is seen as ever: the residual stream and what goes back along it, norms, and every gradient of a bias, which is
# summed before the cast. That leaves weights, and, in layers without biases, what attention hands back to its three
# inputs (where it finds them no number on its way forward, these are none, too).
#
# The emulation keeps a NaN, and so do the other formats, which have one.


class Unseen:
    """Looks at gradients of a model's NVFP4 layers as they pass, and at weights once a step. Waits for no device."""

    def __init__(self, layers: nn.ModuleList, plan: Plan):
        hidden = [layer for layer, recipe in zip(layers, plan, strict=True) if isinstance(recipe, NVFP4BlockScaling)]
        self.any = bool(hidden)
        self.gradients: Tensor | float = 0.0  # or no number, in some pass since the last step
        for layer in hidden:
            qkv = layer.self_attention.layernorm_qkv
            if not qkv.use_bias:
                qkv.register_forward_hook(self._watch)

    def add_to(self, stray: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """After a step's backward passes: stray, an fp32 scalar, or NaN where this rank would hide one; weights: its
        own, or its shards of them."""
        if not self.any:
            return stray
        norm = get_total_norm([w.to_local() if isinstance(w, DTensor) else w for w in weights]).to(stray.device)
        found, self.gradients = self.gradients, 0.0
        return stray + (norm - norm) + found

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
