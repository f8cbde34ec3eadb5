"""Which encoder layer computes in which number format: from the flags to one recipe a layer, checked and printed."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import groupby
from typing import Any

from common.cli import UserError
from common.hooks import extra
from common.precision import PrecisionFlags
from extras.formats.recipe import NAMES, Plan, Recipe, format_of, fp8_formats

TE_MODULE = "transformer_engine.common.recipe."
# Fields of Transformer Engine's recipes that can have one value only, and why.
FIXED = {
    "fp8_dpa": (False, "attention is computed in BF16"),
    "fp8_mha": (False, "attention is computed in BF16"),
    "reduce_amax": (True, "all ranks scale alike, so that replicas stay equal"),
    "backward_override": (None, "forward and backward pass have one format"),
}


def recipes(flags: PrecisionFlags) -> dict[str, Recipe]:
    """{"fp8": ..., "fp4": ...}, those that are enabled. UserError for flags that contradict each other."""
    if flags.emulate_precision and flags.fp8_params:
        raise UserError("--fp8_params keeps weights in a GPU's memory in FP8: drop it with --emulate_precision")
    if flags.fp8_scaled_mm:
        for name in ("emulate_precision", "fp8_params", "fp4", "quant_stats"):
            if getattr(flags, name):
                raise UserError(f"--fp8_scaled_mm does not go with --{name}: drop one of the two")
        able = [name for name, kind in fp8_formats().items() if kind.scaled_mm]
        if flags.fp8_recipe not in able:
            raise UserError(
                f"--fp8_scaled_mm: not with --fp8_recipe {flags.fp8_recipe}: give --fp8_recipe {' or '.join(able)}"
            )
    enabled: dict[str, Recipe] = {}
    if flags.fp8:
        kind = format_of(extra().fp8_formats()[flags.fp8_recipe])
        element = flags.fp8_format or kind.default_format
        enabled["fp8"] = kind(element, **_kwargs("--fp8_recipe_kwargs", flags.fp8_recipe_kwargs, kind))
    if flags.fp4:
        kind = format_of(extra().fp4_formats()[flags.fp4_format])
        enabled["fp4"] = kind(kind.default_format, **_kwargs("--fp4_recipe_kwargs", flags.fp4_recipe_kwargs, kind))
    return enabled


def our_name(recipe: str) -> str:
    """A value of --fp8_recipe for Transformer Engine's class (path); any other name as it is."""
    name = recipe.removeprefix(TE_MODULE)
    return next((ours for ours, kind in fp8_formats().items() if name and kind.te_class == name), recipe)


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
        if not recipe.te_class:
            raise UserError(f"{recipe.flag}: {recipe.title} is emulated only: add --emulate_precision")
        if capability is not None and capability >= recipe.capability:
            continue
        major, minor = recipe.capability
        needs = (
            f"{recipe.title} needs a GPU of compute capability {major}.{minor} ({NAMES[recipe.capability]}) or later"
        )
        remedy = "add --emulate_precision to try it here"
        if capability is None:
            raise UserError(f"{recipe.flag}: {needs}; this is {device}: {remedy}")
        works = [name for name, kind in fp8_formats().items() if kind.te_class and capability >= kind.capability]
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
    by_layers, first = {}, 1
    for recipe, group in groupby(plan):
        last = first + len(list(group)) - 1
        by_layers[_ranges(range(first, last + 1))] = rest if recipe is None else _detailed(recipe)
        first = last + 1
    return by_layers


def describe(plan: Plan, rest: str) -> str:
    """A small table of the plan."""
    rows = [("layers", "format"), *formats(plan, rest).items()]
    rows.append(("rest", f"{rest} (embeddings, final norm, LM head)"))
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)


def _detailed(recipe: Recipe) -> str:
    changed = [f.name for f in fields(recipe) if f.name != "fp8_format" and getattr(recipe, f.name) != f.default]
    return recipe.full_title + "".join(f", {name}={getattr(recipe, name)}" for name in changed)


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
        kwargs = json.loads(text or "{}")
    except RecursionError:
        raise UserError(f"{flag}: no JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{flag} {text}: no JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise UserError(f'{flag} {text}: expected an object such as {{"margin": 0}}')
    for name in FIXED.keys() & kwargs.keys():
        only, why = FIXED[name]
        if (value := kwargs.pop(name)) != only:
            raise UserError(f"{flag}: {name} {json.dumps(value)}: {why}: drop it")
    known: dict[str, Any] = {f.name: type(f.default) for f in fields(kind) if f.name != "fp8_format"}
    for name, value in kwargs.items():
        if name not in known:
            raise UserError(f"{flag}: {kind.__name__} has no {name}: it has {', '.join(known) or 'nothing to set'}")
        if type(value) is not known[name]:
            raise UserError(f"{flag}: {name} {json.dumps(value)}: expected a value like {json.dumps(known[name]())}")
    if wrong := kind.check_kwargs(kwargs):
        raise UserError(f"{flag}: {wrong}")
    return kwargs
