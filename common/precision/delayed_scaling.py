"""FP8's delayed scaling: each tensor is scaled by what its largest values were in the steps before.

Here scales change between optimiser steps: all micro-batches of all ranks of a step use the same, and what they see
counts together. So they depend on neither the number of ranks nor on accumulation. (Transformer Engine moves on after
every micro-batch, which is the same without accumulation.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.precision.formats import Element, fp8_scale
from common.precision.plan import DelayedScaling
from common.ranks.world import World


class DelayedScales:
    """The amax history and the scales of as many tensors as there are `elements`, the formats they are stored in.

    `state` is what a checkpoint holds; it is updated in place.
    """

    def __init__(self, recipe: DelayedScaling, elements: list[Element], device: torch.device | str):
        self.recipe, self.elements = recipe, elements
        count = len(elements)
        self.state = {
            "amax_history": torch.zeros(recipe.amax_history_len, count, device=device),
            "scale": torch.ones(count, device=device),
        }
        self.amax = torch.zeros(count, device=device)  # of the step under way, as far as this rank has seen

    def scale(self, number: int) -> Tensor:
        return self.state["scale"][number]

    def record(self, number: int, amax: Tensor) -> None:
        """Seen once or, by a recomputed forward pass, twice: the maximum is the same."""
        seen = self.amax[number]
        torch.maximum(seen, amax, out=seen)

    @torch.no_grad()
    def end_step(self, world: World, skipped: bool) -> None:
        """Scales for the next step. What a skipped one has seen is no number perhaps: it is forgotten."""
        if skipped:
            self.amax.zero_()
            return
        history, scale = self.state["amax_history"], self.state["scale"]
        history.copy_(history.roll(1, 0))
        history[0] = world.max(self.amax)
        amax = history[0] if self.recipe.amax_compute_algo == "most_recent" else history.amax(0)
        for element in set(self.elements):
            mine = torch.tensor([e == element for e in self.elements], device=scale.device)
            scale[mine] = fp8_scale(amax[mine], element, scale[mine] * 2**self.recipe.margin) / 2**self.recipe.margin
        self.amax.zero_()
