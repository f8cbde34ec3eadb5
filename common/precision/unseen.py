"""Numbers that are none (NaN) where Transformer Engine's NVFP4 would hide them from loss and gradient norm.

E2M1 has no NaN: the cast takes one to 6, and the GPU's maximum, which scales come from, passes it over. So a product
of NVFP4 makes a finite number of it, and its gradients are finite too. What does not go through such products alone is
seen as ever: the residual stream and what goes back along it, norms, and every gradient of a bias, which is summed
before the cast. That leaves weights, and, in layers without biases, what attention hands back to its three inputs
(where it finds them no number on its way forward, these are none, too).

The emulation keeps a NaN, and so do the other formats, which have one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from common.precision.plan import NVFP4BlockScaling, Plan


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
