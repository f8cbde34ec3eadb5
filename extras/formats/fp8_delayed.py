"""FP8 with delayed scaling: a tensor's scale comes from its largest values in earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.world import World
from extras.formats.casts import ROLES, Element, Quantized, fp8_scale, quantize_tensor, tensor_amax
from extras.formats.recipe import ADA, Recipe
from extras.formats.te_storage import stored_whole


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    title = "FP8, delayed scaling"
    capability = ADA
    whole_tensor = True
    keeps_scales = True
    te_class = "DelayedScaling"
    stat_name = "fp8_delayed_scaling"

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"  # or most_recent
    exact_in_bf16 = True

    def new_scales(self, matmuls: int, device: torch.device | str) -> DelayedScales:
        return DelayedScales(self, [self.element(role) for _ in range(matmuls) for role in ROLES], device)

    def quantize(
        self, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
    ) -> Quantized:
        raise AssertionError("DelayedScales.quantize has the scales")

    def stored(self, tensor: Any, along: int) -> Quantized | None:
        return stored_whole(tensor)

    @classmethod
    def check_kwargs(cls, given: dict[str, Any]) -> str:
        if given.get("amax_compute_algo", "max") not in ("max", "most_recent"):
            return f"amax_compute_algo {given['amax_compute_algo']}: choose max, most_recent"
        if given.get("amax_history_len", 1) < 1:
            return f"amax_history_len {given['amax_history_len']}: must be at least 1"
        return ""


class DelayedScales:
    """The amax history and scales of as many tensors as there are `elements`, their formats.

    Scales change between optimiser steps: all micro-batches of all ranks of a step use the same scales, and their
    amaxes are combined. So they depend on neither the number of ranks nor on accumulation. (Transformer Engine updates
    after every micro-batch, which is the same without accumulation.)

    `state` is what a checkpoint holds; it is updated in place.
    """

    def __init__(self, recipe: DelayedScaling, elements: list[Element], device: torch.device | str):
        self.recipe, self.elements = recipe, elements
        count = len(elements)
        self.state = {
            "amax_history": torch.zeros(recipe.amax_history_len, count, device=device),
            "scale": torch.ones(count, device=device),
        }
        self.amax = torch.zeros(count, device=device)  # of the current step, on this rank

    def scale(self, number: int) -> Tensor:
        return self.state["scale"][number]

    def quantize(self, number: int, x: Tensor, ranks: int, counts: bool) -> Quantized:
        """x, operand `number`, by the scale from earlier steps. counts: its largest value is for later ones.

        ranks: x is that many times what the global batch's would be, in whose units histories and scales are: the same
        on any number of ranks.
        """
        if counts:
            self.record(number, tensor_amax(x) / ranks)
        return quantize_tensor(x, self.scale(number) / ranks, self.elements[number])

    def record(self, number: int, amax: Tensor) -> None:
        """Called once or, by a recomputed forward pass, twice: the maximum is the same."""
        seen = self.amax[number]
        torch.maximum(seen, amax, out=seen)

    @torch.no_grad()
    def end_step(self, world: World, skipped: bool) -> None:
        """Scales for the next step. A skipped step's amaxes may be NaN: they are dropped."""
        if skipped:
            self.amax.zero_()
            return
        history, scale = self.state["amax_history"], self.state["scale"]
        latest = world.max(self.amax)
        seen = latest != 0  # a tensor of zeros keeps its history and its scale
        history[:, seen] = torch.cat((latest[None], history[:-1]))[:, seen]
        amax = history[0] if self.recipe.amax_compute_algo == "most_recent" else history.amax(0)
        for element in set(self.elements):
            mask = seen & torch.tensor([e == element for e in self.elements], device=scale.device)
            scale[mask] = fp8_scale(amax[mask], element, scale[mask] * 2**self.recipe.margin) / 2**self.recipe.margin
        self.amax.zero_()


FORMAT = DelayedScaling
