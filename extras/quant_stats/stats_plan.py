"""Which statistics of which quantised tensors are wanted, and when: from --quant_stats* and a file.

They mean the same whichever backend quantises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from common.cli import UserError
from common.precision.plan import DelayedScaling, NVFP4BlockScaling, Plan, PrecisionFlags, Recipe
from extras.quant_stats.stats_file import (
    FP4,
    FP8,
    OPERANDS,
    QUANTISED,
    TENSOR,
    Section,
    Wanted,
    read_file,
    split_stat,
)

FILE = "quant_stats.jsonl"
MODULES = {
    "qkv": "self_attention.layernorm_qkv",
    "proj": "self_attention.proj",
    "fc1": "layernorm_mlp.fc1",
    "fc2": "layernorm_mlp.fc2",
}

_DELAYED = "fp8_delayed_scaling"  # of its own layers only: elsewhere there are no histories


DEFAULT_FREQ = 10
DEFAULT_STATS = (*QUANTISED, "cur_amax", "l2_norm", "mean", "std")
Key = tuple[int, str, str]  # layer from 1, of MODULES, of OPERANDS or RESULTS
Selection = dict[Key, tuple[Wanted, ...]]


def layer_name(layer: int, module: str) -> str:
    """What the file's patterns are matched against. Layers count from 1, as in --fp8_layers."""
    return f"encoder.layers.{layer}.{MODULES[module]}"


def select(flags: PrecisionFlags, plan: Plan) -> Selection:
    """What is wanted of the tensors of the plan's quantised layers. UserError if the file selects none of them."""
    if flags.quant_stats_file is None:
        everything = dict.fromkeys(OPERANDS, Wanted(DEFAULT_STATS, DEFAULT_FREQ))
        sections = [Section("default", lambda name: True, {FP8: everything})]
    else:
        sections = read_file(flags.quant_stats_file)
    said = f"--quant_stats_file {flags.quant_stats_file}"
    selection: Selection = {}
    for layer, recipe in enumerate(plan, 1):
        for module in MODULES if recipe else ():
            for tensor, wanted in _wanted(layer_name(layer, module), recipe, sections, said):
                if flags.quant_stats_freq is not None:
                    wanted = replace(wanted, freq=flags.quant_stats_freq)
                selection[layer, module, tensor] = (*selection.get((layer, module, tensor), ()), wanted)
    if not selection:
        raise UserError(
            f"{said}: selects no quantised layer: names are like "
            f"{layer_name(next(n for n, recipe in enumerate(plan, 1) if recipe), 'fc1')}"
        )
    return selection


def _wanted(name: str, recipe: Recipe, sections: list[Section], said: str) -> Iterator[tuple[str, Wanted]]:
    """(tensor, what) of a matmul in the format of `recipe`. UserError, after `said`, where that cannot be."""
    # Either feature means the format that the layer has; of two sections, that with the layer's own counts.
    own, other = (FP4, FP8) if isinstance(recipe, NVFP4BlockScaling) else (FP8, FP4)
    mine = [section for section in sections if section.accepts(name)]
    if len(mine) > 1:
        mine = [section for section in mine if own in section.features] or mine
    if len(mine) > 1:
        raise UserError(f"{said}: {' and '.join(section.name for section in mine)} both select {name}: let one do")
    for section in mine:
        features = section.features
        found = [*features.get(own, features.get(other, {})).items(), *features.get(TENSOR, {}).items()]
        if own in features:  # what the layer would be in other recipes
            found += [(tensor, wanted.of_recipes()) for tensor, wanted in features.get(other, {}).items()]
        for tensor, wanted in found:
            if not isinstance(recipe, DelayedScaling) and any(split_stat(s)[0] == _DELAYED for s in wanted.stats):
                raise UserError(
                    f"{said}: {section.name}: {name} is in {recipe.title}: there is no history for {_DELAYED}: drop "
                    "it there"
                )
            if wanted.stats:
                yield tensor, wanted
