"""--quant_stats under --emulate_precision: what quantisation did to each tensor, over the global batch of a step.

Every rank counts and sums what its own packs show; at the end of the step all are added up, so that they are those
of the global batch whatever the number of ranks. Weights, the same everywhere, count once. Gradients are in units of
the global batch's loss (a rank's own are as many times larger as there are ranks). Steps without statistics cost
nothing: nobody watches then.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.precision.emulation import WEIGHT, Emulation, Product, element_of
from common.precision.formats import E2M1, Element, Quantized, blocked
from common.precision.plan import NVFP4BlockScaling
from common.precision.stats_plan import MODULES, OPERANDS, RESULTS, Key, Selection
from common.ranks.world import World

# The products that an operand enters, quantised along its columns and along its rows.
GEMMS = {"activation": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "gradient": ("dgrad", "wgrad")}
# What is added up over packs and ranks, and what the maximum is taken of.
SUMS = ("numel", "underflows", "overflows", "square_error", "sum", "absolute", "square")
TOPS = ("amax", "max", "-min", "-smallest", "scale_inv_max", "-scale_inv_min")
# Dividing a tensor by a number divides its statistics by this power of it; those not named stay.
_DEGREE = {"mse": 2} | dict.fromkeys(
    ("scale_inv_min", "scale_inv_max", "min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax"), 1
)
# A scale of fp32 that maps the largest value to the format's largest may miss it by rounding: that is no overflow.
_SLACK = 1 + 2.0**-20

Row = tuple[Key, tuple[str, ...]]  # a tensor, and the products it is an operand or the result of


class QuantStats:
    """Watches the operands of an `Emulation` at the steps that a `Selection` names."""

    def __init__(self, emulation: Emulation, selection: Selection, world: World):
        self.emulation, self.selection, self.world = emulation, selection, world
        self.step = 0
        self._rows: dict[Row, tuple[str, ...]] = {}  # due in this step, in the order of the sums; what is wanted

    def begin_step(self, step: int) -> None:
        """Before the first pack of step `step`, counted from 1."""
        self.step = step
        self._rows = {}
        for key, wanted in self.selection.items():
            if stats := tuple(dict.fromkeys(stat for w in wanted if w.due(step) for stat in w.stats)):
                self._rows |= {(key, gemms): stats for gemms in self._gemms(key)}
        if self._rows:
            device, count = self.world.device, len(self._rows)
            self._numbers = {row: number for number, row in enumerate(self._rows)}
            self._sums = torch.zeros(count, len(SUMS), dtype=torch.float64, device=device)
            self._tops = torch.full((count, len(TOPS)), -math.inf, dtype=torch.float64, device=device)
            self._seen: set[int] = set()
            self._seen_weights: set[int] = set()
            self.emulation.watcher = self

    def begin_pack(self) -> None:
        self._seen = set()

    def operand(self, product: Product, role: int, along: int, x: Tensor, quantized: Quantized) -> None:
        """x, and what became of it; called again by a recomputed forward pass."""
        tensor = OPERANDS[role]
        gemms = GEMMS[tensor] if product.whole_tensor else (GEMMS[tensor][0 if along else 1],)
        if (number := self._new(product, tensor, gemms, role == WEIGHT)) is not None:
            nvfp4 = isinstance(product.recipe, NVFP4BlockScaling)
            self._add(number, *measure(x, quantized, E2M1 if nvfp4 else element_of(product.recipe, role)))

    def result(self, product: Product, gemm: str, x: Tensor) -> None:
        tensor = next(name for name, of in RESULTS.items() if of == gemm)
        if (number := self._new(product, tensor, (gemm,))) is not None:
            self._add(number, *measure(x))

    def end_step(self) -> list[dict]:
        """The rows of quant_stats.jsonl; all ranks together."""
        self.emulation.watcher = None
        if not self._rows:
            return []
        sums, tops = self.world.sum(self._sums).tolist(), self.world.max(self._tops).tolist()
        rows = []
        for (key, gemms), stats, summed, top in zip(self._rows, self._rows.values(), sums, tops, strict=True):
            found = statistics(dict(zip(SUMS, summed, strict=True)) | dict(zip(TOPS, top, strict=True)))
            rows.append(make_row(self.step, key, gemms, {s: found[s] for s in stats}, self._recipe(key), self.world))
        return rows

    def _recipe(self, key: Key):
        return self.emulation.plan[key[0] - 1]

    def _gemms(self, key: Key) -> list[tuple[str, ...]]:
        layer, _, tensor = key
        if tensor in RESULTS:
            return [(RESULTS[tensor],)]
        return [GEMMS[tensor]] if self._recipe(key).whole_tensor else [(gemm,) for gemm in GEMMS[tensor]]

    def _new(self, product: Product, tensor: str, gemms: tuple[str, ...], weight: bool = False) -> int | None:
        """Where to add it, unless it is not wanted in this step or was seen before."""
        module = tuple(MODULES)[product.product]
        number = self._numbers.get(((product.layer + 1, module, tensor), gemms))
        seen = self._seen_weights if weight else self._seen
        if number is None or number in seen or (weight and not self.world.is_main):
            return None
        seen.add(number)
        return number

    def _add(self, number: int, sums: Tensor, tops: Tensor) -> None:
        self._sums[number] += sums
        self._tops[number] = torch.maximum(self._tops[number], tops)


@torch.no_grad()
def measure(x: Tensor, quantized: Quantized | None = None, element: Element | None = None) -> tuple[Tensor, Tensor]:
    """(SUMS, TOPS) of x [R, C] as fp64, and of what it became in a format of `element`s.

    underflows: numbers that became zero; overflows: those beyond the largest of their block. Scales are the numbers
    that stored ones are multiplied with, in blocks that hold anything but zeros.
    """
    x = x.float()
    sizes = x.abs()
    low, high = x.aminmax()
    smallest = torch.where(sizes > 0, sizes, math.inf).amin()
    none, worst = x.new_zeros(()), x.new_full((), -math.inf)
    underflows = overflows = error = none
    scales = [worst, worst]
    if quantized is not None:
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
    return (torch.stack([value.double() for value in values]) for values in (sums, tops))


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


def make_row(step: int, key: Key, gemms: tuple[str, ...], stats: dict[str, float], recipe, world: World) -> dict:
    """An object of quant_stats.jsonl. What is not a number (a scale where all is zero, say) is null."""
    layer, module, tensor = key
    ranks = world.size if tensor in ("gradient", "dgrad", "wgrad") else 1
    found = {stat: value / ranks ** _DEGREE.get(stat, 0) for stat, value in stats.items()}
    where = {"step": step, "layer": layer, "module": module, "tensor": tensor, "gemms": list(gemms)}
    return where | {"format": recipe.title} | {k: v if math.isfinite(v) else None for k, v in found.items()}


def scalars(rows: list[dict]) -> dict:
    """The rows of a step as one row for a tracker: quant_stats/<layer>.<module>.<tensor>.<products>/<statistic>."""
    flat = {"step": rows[0]["step"]}
    for row in rows:
        where = f"{row['layer']}.{row['module']}.{row['tensor']}.{'+'.join(row['gemms'])}"
        flat |= {f"quant_stats/{where}/{k}": v for k, v in row.items() if isinstance(v, float)}
    return flat
