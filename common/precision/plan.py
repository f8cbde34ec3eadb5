"""Which encoder layer computes in which number format: from the flags to one recipe a layer, checked and printed.

Recipes have the fields, names and defaults of Transformer Engine's (`transformer_engine.common.recipe`), as far as a
run can set them: `--fp8_recipe_kwargs` and `--fp4_recipe_kwargs` are JSON objects of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from itertools import groupby

from common.cli import UserError

HOPPER, BLACKWELL = (9, 0), (10, 0)
NAMES = {HOPPER: "Hopper", BLACKWELL: "Blackwell"}


@dataclass(frozen=True)
class Recipe:
    """How a layer's products are quantised. Class attributes: what the format asks of device and shapes."""

    title = ""
    flag = "--fp8"
    capability = HOPPER
    whole_tensor = False  # one scale a tensor: quantised, it is the same along both dimensions
    multiple = 16  # of tokens and of every dimension of a product
    default_format = "hybrid"

    fp8_format: str = "hybrid"  # hybrid: E4M3 forward, E5M2 for gradients; e4m3: everywhere


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    title = "FP8, delayed scaling"
    whole_tensor = True

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"  # or most_recent


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    title = "FP8, current scaling"
    whole_tensor = True

    use_power_2_scales: bool = False


@dataclass(frozen=True)
class BlockScaling(Recipe):
    title = "FP8, blocks of 128"
    default_format = "e4m3"

    use_f32_scales: bool = False


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    title = "MXFP8"
    capability = BLACKWELL
    multiple = 32
    default_format = "e4m3"


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


FP8_RECIPES = {"delayed": DelayedScaling, "current": CurrentScaling, "block": BlockScaling, "mxfp8": MXFP8BlockScaling}
Plan = tuple[Recipe | None, ...]  # one entry a layer; None: BF16, or what the run computes in


def recipes(args) -> dict[str, Recipe]:
    """{"fp8": ..., "fp4": ...}, those that are enabled. UserError for flags that contradict each other."""
    for name in ("fp8", "fp4"):
        for detail in ("layers", "recipe_kwargs"):
            if getattr(args, f"{name}_{detail}") is not None and not getattr(args, name):
                raise UserError(f"--{name}_{detail} goes with --{name}")
    if args.fp8_params and not args.fp8:
        raise UserError("--fp8_params goes with --fp8")
    if args.emulate_precision and not (args.fp8 or args.fp4):
        raise UserError("--emulate_precision: nothing to emulate: add --fp8 or --fp4")
    if args.emulate_precision and args.fp8_params:
        raise UserError("--fp8_params keeps weights in a GPU's memory in FP8: drop it with --emulate_precision")
    _choose("--fp8_recipe", args.fp8_recipe, FP8_RECIPES)
    _choose("--fp8_format", args.fp8_format, (None, "hybrid", "e4m3"))
    _choose("--fp4_format", args.fp4_format, ("e2m1",))
    enabled = {}
    if args.fp8:
        kind = FP8_RECIPES[args.fp8_recipe]
        element = args.fp8_format or kind.default_format
        enabled["fp8"] = kind(element, **_kwargs("--fp8_recipe_kwargs", args.fp8_recipe_kwargs, kind))
    if args.fp4:
        kind = NVFP4BlockScaling
        enabled["fp4"] = kind(kind.default_format, **_kwargs("--fp4_recipe_kwargs", args.fp4_recipe_kwargs, kind))
    return enabled


def resolve(args, num_layers: int) -> Plan | None:
    """The recipe of each layer; None if no format is enabled.

    Layers are counted from 1. A format without a list takes the layers that are left.
    """
    enabled = recipes(args)
    if not enabled:
        return None
    lists = {
        name: parse_layers(f"--{name}_layers", getattr(args, f"{name}_layers"), num_layers)
        for name in enabled
        if getattr(args, f"{name}_layers") is not None
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
        if capability >= HOPPER:
            remedy = f"--fp8 with --fp8_recipe delayed, current or block works on it; or {remedy}"
        raise UserError(f"{recipe.flag}: {needs}; {device} has {capability[0]}.{capability[1]}: {remedy}")


def check_dimensions(plan: Plan, sizes: dict[str, int]) -> None:
    """UserError unless every size (of a configuration's hidden_size, ...) is a multiple of what the formats ask."""
    for recipe in plan:
        for name, size in sizes.items():
            if recipe is not None and size % recipe.multiple:
                fitting = -(-size // recipe.multiple) * recipe.multiple
                raise UserError(
                    f"{recipe.flag}: {recipe.title} needs sizes that are multiples of {recipe.multiple}, and {name} "
                    f"is {size}: --config_overrides {name}={fitting}, or another --config_name"
                )


def describe(plan: Plan, rest: str) -> str:
    """A small table of the plan; `rest`: what the other layers compute in."""
    rows = [("layers", "format")]
    at = 1
    for recipe, group in groupby(plan):
        last = at + len(list(group)) - 1
        rows.append((_ranges(range(at, last + 1)), rest if recipe is None else _detailed(recipe)))
        at = last + 1
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


def _choose(flag: str, value, choices) -> None:
    if value not in choices:
        raise UserError(f"{flag} {value}: choose {', '.join(c for c in choices if c)}")


def _kwargs(flag: str, text: str | None, kind: type[Recipe]) -> dict:
    """The fields of a recipe from a JSON object, names and types checked."""
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{flag} {text}: no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UserError(f'{flag} {text}: expected an object such as {{"margin": 0}}')
    known = {f.name: type(f.default) for f in fields(kind) if f.name != "fp8_format"}
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
