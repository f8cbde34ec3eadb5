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
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, check_recipe_support
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from common.cli import UserError
from common.compat import te_field
from common.data.counter_rng import derive_key
from common.distributed.world import World
from common.models.layers.residual import Model
from common.precision import plan as plans
from common.precision.plan import Plan, Recipe
from extras.formats.casts import (
    COLUMNS,
    E2M1,
    E4M3,
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    Block,
    Quantized,
    exponent_value,
)
from extras.formats.masters import Masters, NanGuard

# Transformer Engine's stored operands as the formats' `Quantized`.
#
# Its storages hold one copy for each dimension that matmuls sum over; scales
# are padded, and a copy for columns may lie transposed (`get_scale_shape` and `dequantize` of its tensors say how).

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


def stored(tensor, along: int) -> Quantized | None:
    """[R, C], stored for matmuls that sum over its columns or its rows; None where there is no such copy."""
    if isinstance(tensor, Float8TensorStorage):  # one scale: both copies hold the same numbers
        if te_field(tensor, "data") is None:
            return None
        numbers = _numbers(te_field(tensor, "data"), te_field(tensor, "fp8_dtype"))
        return Quantized(numbers, te_field(tensor, "scale_inv").float().squeeze())
    side = "rowwise" if along == COLUMNS else "columnwise"
    data, scales = te_field(tensor, f"{side}_data"), te_field(tensor, f"{side}_scale_inv")
    if data is None:
        return None
    one = torch.ones((), device=data.device)
    if isinstance(tensor, MXFP8TensorStorage):
        exponents = scales.int()
        decode = exponent_value(exponents.clamp(max=254)).masked_fill(exponents == 255, torch.nan)
        return _scaled(_numbers(data, te_field(tensor, "fp8_dtype")), decode, _line(MX_BLOCK, along), one)
    if isinstance(tensor, Float8BlockwiseQTensorStorage):
        numbers = _numbers(data, te_field(tensor, "fp8_dtype"), transposed=along != COLUMNS)
        # Scales of lines lie line after line of blocks; those of squares as the numbers do.
        decode = scales if te_field(tensor, "is_2D_scaled") == (along == COLUMNS) else scales.t()
        block = (FP8_BLOCK, FP8_BLOCK) if te_field(tensor, "is_2D_scaled") else _line(FP8_BLOCK, along)
        return _scaled(numbers, decode, block, one)
    assert isinstance(tensor, NVFP4TensorStorage), type(tensor)
    # Two numbers a byte, the first in its lower half; columns lie as rows. A square's scale stands in all its rows.
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    table = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=data.device)
    numbers, decode = _matrix(table[codes], along != COLUMNS), scales.view(torch.float8_e4m3fn).float()
    decode = decode if along == COLUMNS else decode.t()
    amax = te_field(tensor, f"amax_{side}").float().squeeze()
    return _scaled(numbers, decode, _line(NVFP4_BLOCK, along), amax / (E4M3.largest * E2M1.largest))


def _numbers(data: Tensor, dtype, transposed: bool = False) -> Tensor:
    return _matrix(data.view(TE_DType_To_Torch[dtype]).float(), transposed)


def _matrix(x: Tensor, transposed: bool) -> Tensor:
    """[R, C] of [..., C], or of [C, ...]."""
    return x.flatten(1).t() if transposed else x.flatten(0, -2)


def _line(size: int, along: int) -> Block:
    return (1, size) if along == COLUMNS else (size, 1)


def _scaled(numbers: Tensor, decode: Tensor, block: Block, scale: Tensor) -> Quantized:
    """decode [R / r, C / c] or padded beyond that."""
    (rows, columns), (r, c) = numbers.shape, block
    decode = decode[: -(-rows // r), : -(-columns // c)]
    values = numbers * decode.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
    return Quantized(values, scale, decode[:, None, :, None].expand(-1, r, -1, c))


_FORMATS = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}
_KINDS: dict[type[Recipe], Any] = {
    plans.DelayedScaling: te_recipes.DelayedScaling,
    plans.CurrentScaling: te_recipes.Float8CurrentScaling,
    plans.BlockScaling: te_recipes.Float8BlockScaling,
    plans.MXFP8BlockScaling: te_recipes.MXFP8BlockScaling,
    plans.NVFP4BlockScaling: te_recipes.NVFP4BlockScaling,
}
# What Transformer Engine would take from its own variables, unseen by flags, log and checkpoint: each would change a
# field that a flag sets, or one that has a single value here.
_VARIABLES = {
    "NVTE_BACKWARD_OVERRIDE": "forward and backward pass have one format",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "say --fp8_recipe_kwargs '{\"use_power_2_scales\": true}'",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "say --fp8_recipe_kwargs '{\"use_f32_scales\": true}'",
    "NVTE_NVFP4_DISABLE_RHT": "say --fp4_recipe_kwargs '{\"disable_rht\": true}'",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "say --fp4_recipe_kwargs '{\"disable_stochastic_rounding\": true}'",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "say --fp4_recipe_kwargs '{\"disable_2d_quantization\": true}'",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "activations have one scale a tensor",
    "NVTE_NVFP4_4OVER6": "blocks are scaled to 6",
}
# Matmuls whose operands are quantised, by kind of module: each has scales of its own.
_MATMULS = {te.LayerNormLinear: 1, te.Linear: 1, te.LayerNormMLP: 2}


def _count_matmuls(module: Any) -> int:
    return module.num_gemms if isinstance(module, te.GroupedLinear) else _MATMULS.get(type(module), 0)


def te_recipe(recipe: Recipe):
    """Transformer Engine's recipe with the same fields. UserError where it refuses (a CUDA too old, consumer GPUs), or
    one of its variables would have it otherwise."""
    for name, instead in _VARIABLES.items():
        if os.environ.get(name, "0") not in ("", "0", "none"):
            raise UserError(f"{name}={os.environ[name]} would change a recipe unseen: {instead}; unset {name}")
    settings = asdict(recipe) | {"fp8_format": _FORMATS[recipe.fp8_format]}
    made = _KINDS[type(recipe)](**settings)
    try:
        check_recipe_support(made)
    except RuntimeError as error:
        raise UserError(
            f"{recipe.flag}: {recipe.title}: Transformer Engine says: {str(error).rstrip('.')}: choose another "
            "--fp8_recipe, or add --emulate_precision"
        ) from error
    # These two fields only set class-wide defaults, when the package is imported; what counts are the QParams.
    power_2 = settings.get("use_power_2_scales")
    if "use_f32_scales" in settings:
        power_2 = not settings["use_f32_scales"]
    if power_2 is not None:
        for tensor in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(made, f"fp8_quant_{tensor}", QParams(power_2_scale=power_2, amax_epsilon=0.0))
    return made


class Quantised:
    """The contexts of a model's layers (`Layers.quantised`), and the state of delayed scaling.

    fp8_params: layers in FP8 (not NVFP4) are to keep their weights in it: `quantise_weights`, once they have values.
    key: of the random bits that NVFP4's gradients are rounded with.
    """

    def __init__(self, model: Model, plan: Plan, fp8_params: bool = False, key: int = 0):
        self.plan, self.key = plan, key
        fp4 = (recipe for recipe in plan if isinstance(recipe, plans.NVFP4BlockScaling))
        self.draws = not all(recipe.disable_stochastic_rounding for recipe in fp4)
        made = {recipe: te_recipe(recipe) for recipe in plan if recipe is not None}
        # Delayed scaling has to be the outer one: see above. The other recipes keep nothing.
        self.outer = min(made, key=lambda recipe: not isinstance(recipe, plans.DelayedScaling))
        self.recipes = made
        self.model, self.layers = model, model.layers
        self._state: dict[str, Tensor] = {}
        self.layers.quantised = self
        if fp8_params:
            for number, recipe in enumerate(plan):
                if recipe is not None and not isinstance(recipe, plans.NVFP4BlockScaling):
                    with te.quantized_model_init(recipe=made[recipe]):
                        self.layers[number] = type(self.layers[number])(model.config, number)
        of_layers = zip(self.layers, plan, strict=True)
        self._nan_guard = NanGuard([layer for layer, r in of_layers if isinstance(r, plans.NVFP4BlockScaling)])

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
        made = self.recipes[self.outer if recipe is None else recipe]
        with te.autocast(enabled=recipe is not None, recipe=made):
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
                if isinstance(self.plan[number], plans.DelayedScaling):
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
        """See `NanGuard.nonfinite`."""
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
