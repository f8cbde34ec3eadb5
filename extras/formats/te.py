"""The precision plan on the GPU's own units: each layer inside Transformer Engine's autocast of its recipe.

Written against Transformer Engine 2.20. All layers share one outer autocast: delayed scaling reduces the amaxes over
the ranks (all of them) when the outermost one is left, so one for each layer would do so as often as
there are layers. Only layers whose format differs from the outer one's enter another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as te_recipes
from transformer_engine.common.recipe import Format, QParams
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, check_recipe_support

from common.cli import UserError
from common.data.counter_rng import derive_key
from common.distributed.world import World
from common.models.layers.residual import Model
from extras.formats.master_weights import Masters, NanGuard
from extras.formats.recipe import Plan, Recipe

_FORMATS = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}
# What Transformer Engine would take from its own variables, unseen by flags, log and checkpoint, for any recipe; each
# recipe has others (`te_variables`).
_VARIABLES = {"NVTE_BACKWARD_OVERRIDE": "forward and backward pass have one format"}
# Matmuls whose operands are quantised, by kind of module: each has scales of its own.
_MATMULS = {te.LayerNormLinear: 1, te.Linear: 1, te.LayerNormMLP: 2}


def _count_matmuls(module: Any) -> int:
    return module.num_gemms if isinstance(module, te.GroupedLinear) else _MATMULS.get(type(module), 0)


def te_recipe(recipe: Recipe):
    """Transformer Engine's recipe with the same fields. UserError where it refuses (a CUDA too old, consumer GPUs), or
    one of its variables would have it otherwise."""
    if not recipe.te_class:
        raise UserError(f"{recipe.flag}: Transformer Engine has no {recipe.title}: add --emulate_precision")
    for name, instead in (_VARIABLES | recipe.te_variables).items():
        if os.environ.get(name, "0") not in ("", "0", "none"):
            raise UserError(f"{name}={os.environ[name]} would change a recipe unseen: {instead}; unset {name}")
    settings = asdict(recipe) | {"fp8_format": _FORMATS[recipe.fp8_format]}
    built = getattr(te_recipes, recipe.te_class)(**settings)
    try:
        check_recipe_support(built)
    except RuntimeError as error:
        raise UserError(
            f"{recipe.flag}: {recipe.title}: Transformer Engine says: {str(error).rstrip('.')}: choose another "
            "--fp8_recipe, or add --emulate_precision"
        ) from error
    # These two fields only set class-wide defaults, when the package is imported; what counts are the QParams.
    if recipe.te_power_of_2 is not None:
        for tensor in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(built, f"fp8_quant_{tensor}", QParams(power_2_scale=recipe.te_power_of_2, amax_epsilon=0.0))
    return built


class Quantised:
    """The contexts of a model's layers (`Layers.quantised`), and the state of delayed scaling.

    fp8_params: layers in FP8 (not NVFP4) are to keep their weights in it: `quantise_weights`, once they have values.
    key: of the random bits that NVFP4's gradients are rounded with.
    """

    def __init__(self, model: Model, plan: Plan, fp8_params: bool = False, key: int = 0):
        self.plan, self.key = plan, key
        self.draws = any(recipe.draws for recipe in plan if recipe is not None)
        recipes = {recipe: te_recipe(recipe) for recipe in plan if recipe is not None}
        # Delayed scaling has to be the outer one: see above. The other recipes keep nothing.
        self.outer = min(recipes, key=lambda recipe: not recipe.keeps_scales)
        self.recipes = recipes
        self.model, self.layers = model, model.layers
        self._state: dict[str, Tensor] = {}
        self.layers.quantised = self
        if fp8_params:
            for number, recipe in enumerate(plan):
                if recipe is not None and recipe.fp8_params:
                    with te.quantized_model_init(recipe=recipes[recipe]):
                        self.layers[number] = type(self.layers[number])(model.config, number)
        of_layers = zip(self.layers, plan, strict=True)
        self._nan_guard = NanGuard([layer for layer, recipe in of_layers if recipe is not None and recipe.hides_nan])

    def quantise_weights(self) -> Masters:
        """Put the weights of layers that keep them in FP8 into it; what they were become their masters.

        Layers are built without storage, so Transformer Engine has not done it yet, and as it would afterwards
        (`reset_parameters`, preserve_high_precision_init_val) all values would be its own, and the masters on the CPU.
        """
        convert = {}
        modules: Iterable[tuple[str, Any]] = self.model.named_modules()
        for path, module in modules:
            if type(module) in _MATMULS and module.primary_weights_in_fp8:
                for name, _ in module.named_parameters(recurse=False):
                    if (index := module.param_init_meta[name].fp8_meta_index) is not None:
                        quantizer = module.quantizers["scaling_fwd"][index]
                        quantizer.set_usage(rowwise=True, columnwise=True)
                        quantizer.internal = False  # a torch.Tensor, not the bare storage
                        convert[f"{path}.{name}"] = quantizer
        return Masters(self.model, convert)

    def begin_pack(self, step: int, pack: int, empty: bool = False) -> None:
        """Before the pass over a pack. Its random bits follow from the run's seed and the pack's place: Transformer
        Engine draws them from the device's generator, which a restart would begin anew."""
        if self.draws:
            torch.cuda.manual_seed(derive_key(self.key, step, pack) >> 1)

    @contextmanager
    def all(self):
        """Around all layers. What an evaluation sees leaves no trace in the amaxes: the run is the same without it."""
        histories = [] if torch.is_grad_enabled() else self._histories("scaling_fwd")
        latest = [history[0].clone() for history in histories]
        with te.autocast(enabled=True, recipe=self.recipes[self.outer]):
            yield
        for history, before in zip(histories, latest, strict=True):
            history[0].copy_(before)

    def layer(self, number: int):
        recipe = self.plan[number]
        return nullcontext() if recipe == self.outer else self._inner(recipe)

    @contextmanager
    def _inner(self, recipe: Recipe | None):
        # Also where nothing is quantised it notes the recipe under a name that leaves out amax_compute_algo: a default
        # one, noted last, would have the histories' maximum taken where the latest amax was asked for.
        inner = self.recipes[self.outer if recipe is None else recipe]
        with te.autocast(enabled=recipe is not None, recipe=inner):
            # The first module of a pass ends it when the backward pass gets there: then gradients' histories move on.
            # Each autocast hands the mark back as it found it, so that each layer in one of its own would have a first
            # module, and move them on once more. It is to be one of the outer recipe's.
            FP8GlobalStateManager.quantization_state.is_first_fp8_module = False
            yield

    @property
    def state(self) -> dict[str, Tensor]:
        """Delayed scaling's scales and amax histories, the same on every rank, to be restored in place.

        Transformer Engine's own `_extra_state` holds them pickled, and refuses to load that unless it trusts the file.
        """
        if not self._state:
            for number, layer in enumerate(self.layers):
                recipe = self.plan[number]
                if recipe is not None and recipe.keeps_scales:
                    for name, module in layer.named_modules():
                        if matmuls := _count_matmuls(module):
                            self._add(f"layers.{number}.{name}", module, matmuls)
        return self._state

    def rescale_gradients(self, factor: float) -> None:
        """Gradients are so many times as large as those that the histories and scales are of: other ranks."""
        for name, tensor in self.state.items():
            if name.endswith("scaling_bwd.amax_history"):
                tensor.mul_(factor)
            elif name.endswith("scaling_bwd.scale"):
                tensor.div_(factor)

    def nonfinite(self, value: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """value, an fp32 scalar, or NaN if FP8 hides a NaN. weights: this rank's, or its shards."""
        return self._nan_guard.nonfinite(value, weights)

    def end_step(self, world: World, skipped: bool) -> None:
        """After a skipped step: an infinite amax would keep a scale as it is for as long as it is in the history."""
        for history in self._histories("") if skipped else ():
            history.masked_fill_(~history.isfinite(), 0.0)

    def _histories(self, direction: str) -> list[Tensor]:
        return [tensor for name, tensor in self.state.items() if name.endswith(f"{direction}.amax_history")]

    def _add(self, name: str, module: Any, matmuls: int) -> None:
        module.fp8_meta["num_gemms"] = matmuls  # as the first forward pass would
        recipe = self.recipes[self.outer]
        with te.quantized_model_init(enabled=False, recipe=recipe):  # it looks there for the recipe, too
            module.init_fp8_meta_tensors(recipe)
        for direction in ("scaling_fwd", "scaling_bwd"):
            for tensor in ("scale", "amax_history"):
                self._state[f"{name}.{direction}.{tensor}"] = getattr(module.fp8_meta[direction], tensor)
