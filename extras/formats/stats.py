"""--quant_stats: quantisation error, underflows and norms of each tensor, over the global batch of a step.

Every rank sums over its own packs; an all-reduce at the end of the step makes the sums those of the global batch on
any number of ranks. Weights, equal everywhere, count once. Gradients are in units of the global batch's loss (a rank's
own are world-size times larger). Steps without statistics cost nothing.

Statistics of another recipe (mxfp8_underflows%, ...) come from the emulation's formats, in blocks of the rank's own
tokens, whatever format the layer has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.distributed.world import World
from extras.formats.casts import COLUMNS, ROWS, Element, Quantized, blocked
from extras.formats.emulation import Emulation
from extras.formats.recipe import Plan, Recipe
from extras.formats.stats_plan import MODULES, OPERANDS, RECIPES, RESULTS, Key, Selection, split_stat

# The matmuls that an operand enters, quantised along its columns and along its rows.
GEMMS = {"activation": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "gradient": ("dgrad", "wgrad")}
# Summed over packs and ranks; and those whose maximum is taken.
SUMS = ("numel", "underflows", "overflows", "square_error", "sum", "absolute", "square")
TOPS = ("amax", "max", "-min", "-smallest", "scale_inv_max", "-scale_inv_min")
# Dividing a tensor by a number divides its statistics by this power of it; all others stay.
_DEGREE = {"mse": 2} | dict.fromkeys(
    ("scale_inv_min", "scale_inv_max", "min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax"), 1
)
# An fp32 scale that maps the largest value to the format's largest may miss it by rounding: not an overflow.
_SLACK = 1 + 2.0**-20

Row = tuple[Key, tuple[str, ...]]  # a tensor, and the matmuls it is an operand or the result of
Measured = tuple[Key, tuple[str, ...], str]  # the same, and the recipe of a what-if ("": the layer's own)


class Statistics:
    """Accumulates a step's statistics of the operands and results in a `Selection`."""

    def __init__(self, plan: Plan, selection: Selection, world: World):
        self.plan, self.selection, self.world = plan, selection, world
        self.step, self.empty = 0, False
        # Due in this step, in the order of the sums: the statistics of each.
        self._rows: dict[Measured, tuple[str, ...]] = {}

    def begin_step(self, step: int) -> None:
        """Before the first pack of step `step`, counted from 1."""
        self.step = step
        self._rows = {}
        for key, wanted in self.selection.items():
            due: dict[str, list[str]] = {}
            for stat in dict.fromkeys(stat for w in wanted if w.due(step) for stat in w.stats):
                recipe, plain = split_stat(stat)
                due.setdefault(self._own(key, recipe), []).append(plain)
            for recipe, stats in due.items():
                self._rows |= {(key, gemms, recipe): tuple(stats) for gemms in self._gemms(key, recipe)}
        if self._rows:
            device, count = self.world.device, len(self._rows)
            self._numbers = {row: number for number, row in enumerate(self._rows)}
            self._sums = torch.zeros(count, len(SUMS), dtype=torch.float64, device=device)
            self._tops = torch.full((count, len(TOPS)), -math.inf, dtype=torch.float64, device=device)
            self._seen_weights: set[int] = set()
            self.begin_pack()

    def begin_pack(self, empty: bool = False) -> None:
        """empty: the pack holds fillers only and does not count."""
        self._seen: set[int] = set()
        self.empty = empty

    def operand(self, layer: int, matmul: int, role: int, along: int, x: Tensor, cast: Tensor, quantized: Quantized):
        """x [R, C] of layer `layer`, from 0; `cast`, which is x or its transform, became `quantized` along `along`.

        Called again by a recomputed forward pass, it counts once.
        """
        tensor, recipe = OPERANDS[role], self.recipe_of(layer + 1)
        if (number := self._new(layer, matmul, tensor, along, "")) is not None:
            self._add(number, *measure(cast, quantized, recipe.element(role)))
        for name, kind in RECIPES.items():
            for direction in (COLUMNS, ROWS):
                if (number := self._new(layer, matmul, tensor, direction, name)) is not None:
                    other = kind(recipe.fp8_format)
                    would = other.quantize(x, role, direction)
                    self._add(number, *measure(x, would, other.element(role)))

    def result(self, layer: int, matmul: int, tensor: str, x: Tensor) -> None:
        """x: the result (`output`, `dgrad` or `wgrad`) of a matmul."""
        if (number := self._new(layer, matmul, tensor, COLUMNS, "")) is not None:
            self._add(number, *measure(x))

    def end_step(self) -> list[dict]:
        """The rows of quant_stats.jsonl; all ranks together."""
        if not self._rows:
            return []
        sums, tops = self.world.sum(self._sums).tolist(), self.world.max(self._tops).tolist()
        rows: dict[Row, dict[str, float]] = {}
        for ((key, gemms, recipe), stats), summed, top in zip(self._rows.items(), sums, tops, strict=True):
            found = statistics(dict(zip(SUMS, summed, strict=True)) | dict(zip(TOPS, top, strict=True)))
            prefix = recipe and f"{recipe}_"
            rows.setdefault((key, gemms), {}).update({prefix + stat: found[stat] for stat in stats})
        return [
            make_row(self.step, key, gemms, stats, self.recipe_of(key[0]), self.world)
            for (key, gemms), stats in rows.items()
        ]

    def recipe_of(self, layer: int) -> Recipe:
        """The recipe of a quantised layer, from 1; a `Selection` has no others."""
        recipe = self.plan[layer - 1]
        assert recipe is not None, f"layer {layer} is not quantised"
        return recipe

    def _recipe(self, key: Key, name: str) -> Recipe | type[Recipe]:
        return RECIPES[name] if name else self.recipe_of(key[0])

    def _own(self, key: Key, name: str) -> str:
        return "" if name and isinstance(self.recipe_of(key[0]), RECIPES[name]) else name

    def _gemms(self, key: Key, name: str) -> list[tuple[str, ...]]:
        tensor = key[2]
        if tensor in RESULTS:
            return [(RESULTS[tensor],)]
        return [GEMMS[tensor]] if self._recipe(key, name).whole_tensor else [(gemm,) for gemm in GEMMS[tensor]]

    def _new(self, layer: int, matmul: int, tensor: str, along: int, name: str) -> int | None:
        """The row to add to; None if it is not due in this step, or was counted already."""
        if self.empty or not self._rows:
            return None
        key = (layer + 1, tuple(MODULES)[matmul], tensor)
        gemms = self._gemms(key, name)
        number = self._numbers.get((key, gemms[0] if len(gemms) == 1 or along == COLUMNS else gemms[1], name))
        weight = tensor == "weight"
        seen = self._seen_weights if weight else self._seen
        if number is None or number in seen or (weight and not self.world.is_main):
            return None
        seen.add(number)
        return number

    def _add(self, number: int, sums: Tensor, tops: Tensor) -> None:
        self._sums[number] += sums
        self._tops[number] = torch.maximum(self._tops[number], tops)


class QuantStats(Statistics):
    """Statistics of an `Emulation`, whose watcher it is in the steps of a `Selection`."""

    def __init__(self, emulation: Emulation, selection: Selection, world: World):
        super().__init__(emulation.plan, selection, world)
        self.emulation = emulation

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.emulation.watcher = self if self._rows else None

    def end_step(self) -> list[dict]:
        self.emulation.watcher = None
        return super().end_step()


@torch.no_grad()
def measure(x: Tensor, quantized: Quantized | None = None, element: Element | None = None) -> tuple[Tensor, Tensor]:
    """(SUMS, TOPS) of x [R, C] as fp64, and of what it became in a format of `element`s.

    underflows: numbers that became zero; overflows: those beyond the largest of their block. Scales are the numbers
    that stored ones are multiplied with, in blocks that are not all zeros.
    """
    x = x.float()
    sizes = x.abs()
    low, high = x.aminmax()
    smallest = torch.where(sizes > 0, sizes, math.inf).amin()
    none, worst = x.new_zeros(()), x.new_full((), -math.inf)
    underflows = overflows = error = none
    scales = [worst, worst]
    if quantized is not None:
        assert element is not None, "a quantised tensor comes with its element"
        became = quantized.values.float() * quantized.scale
        underflows = ((became == 0) & (sizes > 0)).sum()
        error = _square(became - x)
        blocks, decode = sizes, quantized.scale
        if quantized.block_scale is not None:
            _, rows, _, columns = quantized.block_scale.shape
            blocks, decode = blocked(sizes, (rows, columns)), quantized.block_scale[:, :1, :, :1] * quantized.scale
        limit = decode * (element.largest * _SLACK)
        overflows = ((blocks > limit) & (limit > 0)).sum()
        used = blocks.amax((1, 3), keepdim=True) > 0 if blocks is not sizes else high.ne(0) | low.ne(0)
        scales = [torch.where(used, sign * decode, -math.inf).amax() for sign in (1, -1)]
    numel = x.new_full((), x.numel(), dtype=torch.float64)
    total, absolute = x.sum(dtype=torch.float64), sizes.sum(dtype=torch.float64)
    sums = [numel, underflows, overflows, error, total, absolute, _square(x)]
    tops = [sizes.amax(), high, -low, -smallest, *scales]
    return _stack(sums), _stack(tops)


def _stack(scalars: list[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in scalars])


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()  # in fp32, squares of small gradients vanish


def statistics(of: dict[str, float]) -> dict[str, float]:
    """Every statistic by its name in the file, from SUMS and TOPS."""
    numel = of["numel"] or math.nan
    mean, smallest = of["sum"] / numel, -of["-smallest"]
    return {
        "underflows%": 100 * of["underflows"] / numel,
        "overflows%": 100 * of["overflows"] / numel,
        "scale_inv_min": -of["-scale_inv_min"],
        "scale_inv_max": of["scale_inv_max"],
        "mse": of["square_error"] / numel,
        "min": -of["-min"],
        "max": of["max"],
        "mean": mean,
        "std": math.sqrt(max(of["square"] / numel - mean**2, 0.0)),
        "l1_norm": of["absolute"],
        "l2_norm": math.sqrt(of["square"]),
        "cur_amax": of["amax"],
        "dynamic_range": math.log2(of["amax"]) - math.log2(smallest) if 0 < of["amax"] < math.inf else math.nan,
    }


def make_row(
    step: int, key: Key, gemms: tuple[str, ...], stats: dict[str, float], recipe: Recipe, world: World
) -> dict:
    """An object of quant_stats.jsonl. NaN and infinity (the scale of a tensor of zeros) are null."""
    layer, module, tensor = key
    ranks = world.size if tensor in ("gradient", "dgrad", "wgrad") else 1
    found = {stat: value / ranks ** _DEGREE.get(split_stat(stat)[1], 0) for stat, value in stats.items()}
    where = {"step": step, "layer": layer, "module": module, "tensor": tensor, "gemms": list(gemms)}
    return where | {"format": recipe.title} | {k: v if math.isfinite(v) else None for k, v in found.items()}


def scalars(rows: list[dict]) -> dict:
    """The rows of a step as one row for a tracker: quant_stats/<layer>.<module>.<tensor>.<matmuls>/<statistic>."""
    flat = {"step": rows[0]["step"]}
    for row in rows:
        where = f"{row['layer']}.{row['module']}.{row['tensor']}.{'+'.join(row['gemms'])}"
        flat |= {f"quant_stats/{where}/{k}": v for k, v in row.items() if isinstance(v, float)}
    return flat
