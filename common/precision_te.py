"""The precision plan on the GPU's own units: each encoder layer inside Transformer Engine's autocast of its recipe.

Written against Transformer Engine 2.20. All layers share one outer autocast: delayed scaling updates its scales when
the outermost one is left, so one for each layer would update all of them as often as there are layers. Only layers
whose format differs from the outer one's enter another. Amaxes are reduced over all ranks (the default group).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as te_recipes
from transformer_engine.common.recipe import Format, QParams

from common import precision_plan as plans
from common.precision_plan import Plan, Recipe

_FORMATS = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}
_KINDS = {
    plans.DelayedScaling: te_recipes.DelayedScaling,
    plans.CurrentScaling: te_recipes.Float8CurrentScaling,
    plans.BlockScaling: te_recipes.Float8BlockScaling,
    plans.MXFP8BlockScaling: te_recipes.MXFP8BlockScaling,
    plans.NVFP4BlockScaling: te_recipes.NVFP4BlockScaling,
}
# Products whose operands are quantised, by kind of module: each has scales of its own.
_PRODUCTS = {te.LayerNormLinear: 1, te.Linear: 1, te.LayerNormMLP: 2}


def te_recipe(recipe: Recipe):
    """Transformer Engine's recipe with the same fields."""
    settings = asdict(recipe) | {"fp8_format": _FORMATS[recipe.fp8_format]}
    made = _KINDS[type(recipe)](**settings)
    # These two fields only set class-wide defaults, when the package is imported; what counts are the QParams.
    power_2 = settings.get("use_power_2_scales")
    if "use_f32_scales" in settings:
        power_2 = not settings["use_f32_scales"]
    if power_2 is not None:
        for tensor in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(made, f"fp8_quant_{tensor}", QParams(power_2_scale=power_2, amax_epsilon=0.0))
    return made


class Quantised:
    """The contexts of an encoder's layers (`Encoder.quantised`), and the state of delayed scaling."""

    def __init__(self, model: nn.Module, plan: Plan):
        self.plan = plan
        made = {recipe: te_recipe(recipe) for recipe in plan if recipe is not None}
        # Delayed scaling has to be the outer one: see above. The other recipes keep nothing.
        self.outer = min(made, key=lambda recipe: not isinstance(recipe, plans.DelayedScaling))
        self.recipes = made
        self.layers = model.encoder.layers
        self._state: dict[str, Tensor] | None = None
        model.encoder.quantised = self

    def all(self):
        return te.autocast(enabled=True, recipe=self.recipes[self.outer])

    def layer(self, number: int):
        recipe = self.plan[number]
        if recipe == self.outer:
            return nullcontext()
        return te.autocast(enabled=recipe is not None, recipe=self.recipes.get(recipe))

    @property
    def state(self) -> dict[str, Tensor]:
        """Delayed scaling's scales and amax histories, the same on every rank, to be restored in place.

        Transformer Engine's own `_extra_state` holds them pickled, and refuses to load that unless told to trust it.
        """
        if self._state is None:
            self._state = {}
            for number, layer in enumerate(self.layers):
                if isinstance(self.plan[number], plans.DelayedScaling):
                    for name, module in layer.named_modules():
                        if products := _PRODUCTS.get(type(module)):
                            self._add(f"layers.{number}.{name}", module, products)
        return self._state

    def _add(self, name: str, module: nn.Module, products: int) -> None:
        module.fp8_meta["num_gemms"] = products  # as the first forward pass would
        module.init_fp8_meta_tensors(self.recipes[self.outer])
        for direction in ("scaling_fwd", "scaling_bwd"):
            for tensor in ("scale", "amax_history"):
                self._state[f"{name}.{direction}.{tensor}"] = getattr(module.fp8_meta[direction], tensor)
