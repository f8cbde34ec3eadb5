"""Which encoder layer computes in which number format: from the flags to one recipe a layer, checked and printed.

Recipes have the fields, names and defaults of Transformer Engine's (`transformer_engine.common.recipe`), as far as a
run can set them: `--fp8_recipe_kwargs` and `--fp4_recipe_kwargs` are JSON objects of them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UserError
from common.flags import Flags, Missing, flag
from common.hooks import extra

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
NAMES = {ADA: "Ada", HOPPER: "Hopper", BLACKWELL: "Blackwell"}


@dataclass(frozen=True)
class Recipe(ABC):
    """How a layer's matmuls are quantised. Class attributes: what the format asks of device and shapes."""

    title: ClassVar[str] = ""
    flag: ClassVar[str] = "--fp8"
    capability: ClassVar[tuple[int, int]] = HOPPER
    whole_tensor: ClassVar[bool] = False  # one scale a tensor: quantised, it is the same along both dimensions
    multiple: ClassVar[int] = 16  # of tokens and of every dimension of a matmul
    default_format: ClassVar[str] = "hybrid"

    fp8_format: str = "hybrid"  # hybrid: E4M3 forward, E5M2 for gradients; e4m3: everywhere

    @property
    @abstractmethod
    def exact_in_bf16(self) -> bool:
        """Whether bf16 holds every quantised value, its block's scale included: then emulation multiplies in bf16.

        Abstract: a format that does not say cannot be made, and is not rounded in silence.
        """


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    title = "FP8, delayed scaling"
    capability = ADA
    whole_tensor = True

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"  # or most_recent
    exact_in_bf16 = True


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    title = "FP8, current scaling"
    capability = ADA
    whole_tensor = True

    use_power_2_scales: bool = False
    exact_in_bf16 = True


@dataclass(frozen=True)
class BlockScaling(Recipe):
    title = "FP8, blocks of 128"
    default_format = "e4m3"

    use_f32_scales: bool = False

    @property
    def exact_in_bf16(self) -> bool:
        return not self.use_f32_scales


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    title = "MXFP8"
    capability = BLACKWELL
    multiple = 32
    default_format = "e4m3"

    enable_2d_quantization: bool = False  # of weights, in squares of 32 x 32
    exact_in_bf16 = True


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    title = "NVFP4"
    flag = "--fp4"
    capability = BLACKWELL
    multiple = 32
    default_format = "e4m3"  # of the scales

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    exact_in_bf16 = True


FP8_RECIPES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "current": CurrentScaling,
    "block": BlockScaling,
    "mxfp8": MXFP8BlockScaling,
}
TE_MODULE = "transformer_engine.common.recipe."
TE_RECIPES = {  # the class there: our name
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mxfp8",
}
# Fields of Transformer Engine's recipes that can have one value only, and why.
FIXED = {
    "fp8_dpa": (False, "attention is computed in BF16"),
    "fp8_mha": (False, "attention is computed in BF16"),
    "reduce_amax": (True, "all ranks scale alike, so that replicas stay equal"),
    "backward_override": (None, "forward and backward pass have one format"),
}
Plan = tuple[Recipe | None, ...]  # one entry a layer; None: BF16, or what the run computes in


@dataclass(frozen=True)
class PrecisionFlags(Flags):
    """Number formats of the layers, and statistics of what is quantised."""

    group = "precision"
    advanced = (
        *("fp8_format", "fp8_layers", "fp8_params", "fp4_layers"),
        *("quant_stats_freq", "quant_stats_file"),
    )
    unlisted = ("fp4_format", "quant_stats_dir", "fp8_recipe_kwargs", "fp4_recipe_kwargs", "fp8_scaled_mm")

    bf16: bool = flag(False, "Compute in bfloat16; weights, gradients and optimiser stay fp32.")
    fp8: bool = flag(False, "Compute encoder layers in FP8 (docs/precision.md).")
    fp8_recipe: str = flag("delayed", "Scaling in FP8 (docs/precision.md).", choices=FP8_RECIPES)
    fp8_format: str | None = flag(
        None,
        "hybrid: E4M3, gradients E5M2. Default: hybrid; e4m3 for block and mxfp8.",
        choices=("hybrid", "e4m3"),
    )
    fp8_layers: str | None = flag(None, "Layers in FP8, counted from 1: 1-3,6. Default: all but --fp4_layers.")
    fp8_recipe_kwargs: str | None = flag(None, 'Arguments of the recipe as JSON: {"amax_history_len": 16}.')
    fp8_params: bool = flag(False, "Keep the weights of those layers in FP8 on the GPU, with fp32 master weights.")
    fp8_scaled_mm: bool = flag(
        False, "FP8 by torch's own matmuls in torch's layers, compiled too; --fp8_recipe current alone."
    )
    fp4: bool = flag(False, "Compute encoder layers in NVFP4.")
    fp4_format: str = flag("e2m1", "The format of NVFP4.", choices=("e2m1",))
    fp4_layers: str | None = flag(None, "Layers in NVFP4, counted from 1. Default: all but --fp8_layers.")
    fp4_recipe_kwargs: str | None = flag(None, 'Arguments of the recipe as JSON: {"disable_rht": true}.')
    emulate_precision: bool = flag(False, "Round as those formats do, in plain PyTorch, on any device.")
    quant_stats: bool = flag(False, "Log statistics of the quantised tensors: underflow, scales, error, norms.")
    quant_stats_freq: int | None = flag(None, "Steps between them. Default: as the file says, 10 without one.")
    quant_stats_dir: str | None = flag(None, "Where quant_stats.jsonl goes. Default: --output_dir.")
    quant_stats_file: str | None = flag(
        None, "Which layers, tensors and statistics: YAML as Transformer Engine's debug configuration."
    )

    def resolve(self) -> PrecisionFlags:
        """Transformer Engine's names as ours: the class (path) of a recipe, formats in upper case."""
        recipe = TE_RECIPES.get(self.fp8_recipe.removeprefix(TE_MODULE), self.fp8_recipe.lower())
        return replace(
            self,
            fp8_recipe=recipe if recipe in FP8_RECIPES else self.fp8_recipe,
            fp8_format=self.fp8_format and self.fp8_format.lower(),
            fp4_format=self.fp4_format.lower(),
        )

    def missing(self) -> Iterator[Missing]:
        for name in ("fp8", "fp4"):
            for detail in ("layers", "recipe_kwargs"):
                if getattr(self, f"{name}_{detail}") is not None and not getattr(self, name):
                    yield Missing(f"--{name}", f"--{name}_{detail} goes with --{name}")
        why = ": Transformer Engine 2.20's NVFP4 weights have no partial slice or strided view" if self.fp4 else ""
        for name, reason in {"fp8_params": why, "fp8_scaled_mm": ""}.items():
            if getattr(self, name) and not self.fp8:
                yield Missing("--fp8", f"--{name} goes with --fp8{reason}")
        if self.emulate_precision and not (self.fp8 or self.fp4):
            yield Missing("--fp8", "or --fp4: there is nothing to emulate")

        for detail in ("freq", "dir", "file"):
            if getattr(self, f"quant_stats_{detail}") is not None and not self.quant_stats:
                yield Missing("--quant_stats", f"--quant_stats_{detail} goes with --quant_stats")
        if self.quant_stats and not (self.fp8 or self.fp4):
            yield Missing("--fp8", "or --fp4: --quant_stats needs quantised layers")

    def check(self) -> None:
        recipes(self)
        self.require_at_least(1, "quant_stats_freq")
        if self.quant_stats_file is not None:
            extra().check_statistics(self.quant_stats_file)

    def torch_only(self) -> tuple[str, ...]:
        """Those that are given and only the torch backend can honour."""
        return tuple(f"--{name}" for name in ("emulate_precision", "fp8_scaled_mm") if getattr(self, name))

    def stats_directory(self, output_dir: str) -> Path | None:
        """Where quant_stats.jsonl goes; None without --quant_stats."""
        return Path(self.quant_stats_dir or output_dir) if self.quant_stats else None

    def check_stats_directory(self) -> None:
        """UserError unless --quant_stats_dir can be made and written to; the output directory is checked elsewhere."""
        if self.quant_stats and self.quant_stats_dir:
            probe = Path(self.quant_stats_dir) / "quant_stats.jsonl.probe"
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(
                    f"--quant_stats_dir {self.quant_stats_dir}: not writable ({error.strerror}): choose another "
                    "directory"
                ) from error


def recipes(flags: PrecisionFlags) -> dict[str, Recipe]:
    """{"fp8": ..., "fp4": ...}, those that are enabled. UserError for flags that contradict each other."""
    if flags.emulate_precision and flags.fp8_params:
        raise UserError("--fp8_params keeps weights in a GPU's memory in FP8: drop it with --emulate_precision")
    if flags.fp8_scaled_mm:
        for name in ("emulate_precision", "fp8_params", "fp4", "quant_stats"):
            if getattr(flags, name):
                raise UserError(f"--fp8_scaled_mm does not go with --{name}: drop one of the two")
        if flags.fp8_recipe != "current":
            raise UserError(f"--fp8_scaled_mm: not with --fp8_recipe {flags.fp8_recipe}: give --fp8_recipe current")
    enabled: dict[str, Recipe] = {}
    if flags.fp8:
        kind = FP8_RECIPES[flags.fp8_recipe]
        element = flags.fp8_format or kind.default_format
        enabled["fp8"] = kind(element, **_kwargs("--fp8_recipe_kwargs", flags.fp8_recipe_kwargs, kind))
    if flags.fp4:
        kind = NVFP4BlockScaling
        enabled["fp4"] = kind(kind.default_format, **_kwargs("--fp4_recipe_kwargs", flags.fp4_recipe_kwargs, kind))
    return enabled


def resolve(flags: PrecisionFlags, num_layers: int) -> Plan | None:
    """The recipe of each layer; None if no format is enabled.

    Layers are counted from 1. A format without a list takes the layers that are left.
    """
    enabled = recipes(flags)
    if not enabled:
        return None
    lists = {
        name: parse_layers(f"--{name}_layers", getattr(flags, f"{name}_layers"), num_layers)
        for name in enabled
        if getattr(flags, f"{name}_layers") is not None
    }
    if len(enabled) == 2 and not lists:
        raise UserError("--fp8 and --fp4 without lists of layers: give --fp8_layers, --fp4_layers, or both")
    if len(lists) == 2 and (both := lists["fp8"] & lists["fp4"]):
        raise UserError(f"--fp8_layers and --fp4_layers both name {_ranges(both)}: a layer has one format")
    left = set(range(1, num_layers + 1)).difference(*lists.values())
    plan: list[Recipe | None] = [None] * num_layers
    for name, recipe in enabled.items():
        layers = lists.get(name, left)
        if not layers:
            other = "fp4" if name == "fp8" else "fp8"
            raise UserError(f"--{name}: --{other}_layers leaves it no layer of the {num_layers}: shorten that list")
        for layer in layers:
            plan[layer - 1] = recipe
    return tuple(plan)


def parse_layers(flag: str, text: str, num_layers: int) -> set[int]:
    """Layers of a list such as 1-3,6 (brackets and blanks are ignored)."""
    items = [item for item in re.split(r"[,\s]+", text.strip().strip("[]()").strip()) if item]
    if not items:
        raise UserError(f"{flag}: the list is empty: name layers of 1-{num_layers}, or drop the format's flag")
    layers = set()
    for item in items:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if not match:
            raise UserError(f"{flag} {text}: {item!r} is no layer and no range: write 1-3,6")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UserError(f"{flag} {text}: the range {item} runs backwards: write {last}-{first}")
        for layer in (first, last):
            if not 1 <= layer <= num_layers:
                raise UserError(f"{flag} {text}: there is no layer {layer}: the model has layers 1-{num_layers}")
        layers.update(range(first, last + 1))
    return layers


def check_device(plan: Plan, device: str, capability: tuple[int, int] | None) -> None:
    """UserError unless the device computes in every format of the plan. capability: None where it is no NVIDIA GPU."""
    for recipe in sorted({r for r in plan if r is not None}, key=repr):
        if capability is not None and capability >= recipe.capability:
            continue
        major, minor = recipe.capability
        needs = (
            f"{recipe.title} needs a GPU of compute capability {major}.{minor} ({NAMES[recipe.capability]}) or later"
        )
        remedy = "add --emulate_precision to try it here"
        if capability is None:
            raise UserError(f"{recipe.flag}: {needs}; this is {device}: {remedy}")
        works = [name for name, kind in FP8_RECIPES.items() if capability >= kind.capability]
        if works:
            remedy = f"--fp8 with --fp8_recipe {', '.join(works[:-1])} or {works[-1]} works on it; or {remedy}"
        raise UserError(f"{recipe.flag}: {needs}; {device} has {capability[0]}.{capability[1]}: {remedy}")


def check_dimensions(plan: Plan, sizes: dict[str, int], remedy: str) -> None:
    """UserError unless every size (of a configuration's hidden_size, ...) is a multiple of what the formats ask.

    remedy: which flag sets one, with {name} and {size} in it.
    """
    for recipe in plan:
        for name, size in sizes.items():
            if recipe is not None and size % recipe.multiple:
                fitting = -(-size // recipe.multiple) * recipe.multiple
                raise UserError(
                    f"{recipe.flag}: {recipe.title} needs sizes that are multiples of {recipe.multiple}, and {name} "
                    f"is {size}: {remedy.format(name=name, size=fitting)}"
                )


def formats(plan: Plan, rest: str) -> dict[str, str]:
    """{"1-3": "MXFP8, e4m3", ...} of runs of layers alike; `rest`: what the other layers compute in."""
    found, at = {}, 1
    for recipe, group in groupby(plan):
        last = at + len(list(group)) - 1
        found[_ranges(range(at, last + 1))] = rest if recipe is None else _detailed(recipe)
        at = last + 1
    return found


def describe(plan: Plan, rest: str) -> str:
    """A small table of the plan."""
    rows = [("layers", "format"), *formats(plan, rest).items()]
    rows.append(("rest", f"{rest} (embeddings, final norm, LM head)"))
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)


def _detailed(recipe: Recipe) -> str:
    changed = [f.name for f in fields(recipe) if f.name != "fp8_format" and getattr(recipe, f.name) != f.default]
    element = "" if isinstance(recipe, NVFP4BlockScaling) else f", {recipe.fp8_format}"
    return recipe.title + element + "".join(f", {name}={getattr(recipe, name)}" for name in changed)


def _ranges(layers) -> str:
    """1-3,6 of {1, 2, 3, 6}."""
    parts = []
    for _, group in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


def _kwargs(flag: str, text: str | None, kind: type[Recipe]) -> dict:
    """The fields of a recipe from a JSON object, names and types checked."""
    try:
        given = json.loads(text or "{}")
    except RecursionError:
        raise UserError(f"{flag}: no JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{flag} {text}: no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UserError(f'{flag} {text}: expected an object such as {{"margin": 0}}')
    for name in FIXED.keys() & given.keys():
        only, why = FIXED[name]
        if (value := given.pop(name)) != only:
            raise UserError(f"{flag}: {name} {json.dumps(value)}: {why}: drop it")
    known: dict[str, Any] = {f.name: type(f.default) for f in fields(kind) if f.name != "fp8_format"}
    for name, value in given.items():
        if name not in known:
            raise UserError(f"{flag}: {kind.__name__} has no {name}: it has {', '.join(known) or 'nothing to set'}")
        if type(value) is not known[name]:
            raise UserError(f"{flag}: {name} {json.dumps(value)}: expected a value like {json.dumps(known[name]())}")
    if given.get("amax_compute_algo", "max") not in ("max", "most_recent"):
        raise UserError(f"{flag}: amax_compute_algo {given['amax_compute_algo']}: choose max, most_recent")
    if given.get("amax_history_len", 1) < 1:
        raise UserError(f"{flag}: amax_history_len {given['amax_history_len']}: must be at least 1")
    return given
