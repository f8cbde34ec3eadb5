"""FP8 with current scaling: one scale a tensor, from its own largest value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from extras.formats.casts import WEIGHT, Quantized, fp8_scale, quantize_tensor, tensor_amax
from extras.formats.recipe import ADA, Recipe
from extras.formats.te_storage import stored_whole


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    title = "FP8, current scaling"
    capability = ADA
    whole_tensor = True
    scaled_mm = True
    te_class = "Float8CurrentScaling"
    te_variables = {
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "say --fp8_recipe_kwargs '{\"use_power_2_scales\": true}'"
    }
    stat_name = "fp8_current_scaling"

    use_power_2_scales: bool = False
    exact_in_bf16 = True

    def quantize(
        self, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
    ) -> Quantized:
        amax, element = tensor_amax(x), self.element(role)
        if group is not None and role != WEIGHT:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        return quantize_tensor(x, fp8_scale(amax, element, 1.0, self.use_power_2_scales), element)

    def stored(self, tensor: Any, along: int) -> Quantized | None:
        return stored_whole(tensor)

    @property
    def te_power_of_2(self) -> bool:
        return self.use_power_2_scales


FORMAT = CurrentScaling
