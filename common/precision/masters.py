"""fp32 master weights of parameters that the model itself holds in another format (--fp8_params).

The model computes with the stored numbers and gets their gradients; everything that lasts is the masters': the
optimiser's update and weight decay, checkpoints, the exported model. After every optimiser step, and when a checkpoint
has been read, the stored numbers are made from the masters anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


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

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on the optimiser, which updates the masters, is given the stored parameters' gradients."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self.hand_out())

    @torch.no_grad()
    def hand_out(self) -> None:
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
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(own_name, parameter)
    return root
