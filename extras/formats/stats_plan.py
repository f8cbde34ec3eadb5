"""Which statistics of which quantised tensors are wanted, and when: from --quant_stats* and a file.

They mean the same whichever backend quantises. The file has the structure of Transformer Engine's debug configuration:
named sections, each with the layers it is about and, under `transformer_engine`, LogFp8TensorStats (or
LogNvfp4TensorStats) and LogTensorStats. Unlike there, an option that cannot be honoured is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from common.cli import UserError
from common.precision import PrecisionFlags
from extras.formats.recipe import Plan, Recipe, fp8_formats

OPERANDS = ("activation", "weight", "gradient")
RESULTS = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}  # tensor: the matmul it is the result of
QUANTISED = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
PLAIN = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
# Before a statistic of `QUANTISED`: what that recipe makes, or would make of the tensor.
RECIPES = {kind.stat_name: kind for kind in fp8_formats().values() if kind.stat_name}
FP8, FP4, TENSOR = "LogFp8TensorStats", "LogNvfp4TensorStats", "LogTensorStats"

_ALIASES = {"fprop": "output"}  # as the guides' file has it
_KNOWN_STATS = {FP8: QUANTISED, FP4: QUANTISED, TENSOR: PLAIN}
_KNOWN_TENSORS = {FP8: OPERANDS, FP4: OPERANDS, TENSOR: (*OPERANDS, *RESULTS, *_ALIASES)}
_MODULES_AROUND = ("model.", "model.esm.", "model.model.")
_TIMES = ("freq", "start_step", "end_step")


@dataclass(frozen=True)
class Wanted:
    """Statistics, at steps that are multiples of `freq`, from step `start` to step `end`; steps count from 1."""

    stats: tuple[str, ...]
    freq: int
    start: int = 0
    end: int | None = None

    def of_recipes(self) -> Wanted:
        """Only the statistics that name a recipe."""
        return replace(self, stats=tuple(stat for stat in self.stats if split_stat(stat)[0]))

    def due(self, step: int) -> bool:
        return self.next_due(step) == step

    def next_due(self, step: int) -> int | None:
        """The first step from `step` on; None: never again."""
        due = -(-max(step, self.start, 1) // self.freq) * self.freq
        return due if self.end is None or due <= self.end else None


@dataclass(frozen=True)
class Section:
    """A section of the file: what its features want of each tensor, in the layers whose name it accepts."""

    name: str
    accepts: Callable[[str], bool]
    features: dict[str, dict[str, Wanted]]  # feature -> tensor -> what


def split_stat(stat: str) -> tuple[str, str]:
    """("mxfp8", "underflows%") of mxfp8_underflows%; ("", "mse") of mse: of the layer's own recipe."""
    name = next((name for name in RECIPES if stat.startswith(f"{name}_")), "")
    return name, stat[len(name) + 1 :] if name else stat


FILE = "quant_stats.jsonl"
MODULES = {
    "qkv": "self_attention.layernorm_qkv",
    "proj": "self_attention.proj",
    "fc1": "layernorm_mlp.fc1",
    "fc2": "layernorm_mlp.fc2",
}

# Of its own layers only: elsewhere there are no histories.
_DELAYED = next(name for name, kind in RECIPES.items() if kind.keeps_scales)
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
    given = f"--quant_stats_file {flags.quant_stats_file}"
    selection: Selection = {}
    quantised = [(layer, recipe) for layer, recipe in enumerate(plan, 1) if recipe is not None]
    for layer, recipe in quantised:
        for module in MODULES:
            for tensor, wanted in _of_matmul(layer_name(layer, module), recipe, sections, given):
                if flags.quant_stats_freq is not None:
                    wanted = replace(wanted, freq=flags.quant_stats_freq)
                selection[layer, module, tensor] = (*selection.get((layer, module, tensor), ()), wanted)
    if not selection:
        raise UserError(f"{given}: selects no quantised layer: names are like {layer_name(quantised[0][0], 'fc1')}")
    return selection


def _of_matmul(name: str, recipe: Recipe, sections: list[Section], given: str) -> Iterator[tuple[str, Wanted]]:
    """(tensor, what) of a matmul in the format of `recipe`. UserError, after `given`, where that cannot be."""
    # Either feature means the format that the layer has; of two sections, that with the layer's own counts.
    own, other = (FP4, FP8) if recipe.stat_feature == FP4 else (FP8, FP4)
    accepting = [section for section in sections if section.accepts(name)]
    if len(accepting) > 1:
        accepting = [section for section in accepting if own in section.features] or accepting
    if len(accepting) > 1:
        raise UserError(
            f"{given}: {' and '.join(section.name for section in accepting)} both select {name}: let one do"
        )
    for section in accepting:
        features = section.features
        found = [*features.get(own, features.get(other, {})).items(), *features.get(TENSOR, {}).items()]
        if own in features:  # what the layer would be in other recipes
            found += [(tensor, wanted.of_recipes()) for tensor, wanted in features.get(other, {}).items()]
        for tensor, wanted in found:
            if not recipe.keeps_scales and any(split_stat(s)[0] == _DELAYED for s in wanted.stats):
                raise UserError(
                    f"{given}: {section.name}: {name} is in {recipe.title}: there is no history for {_DELAYED}: drop "
                    "it there"
                )
            if wanted.stats:
                yield tensor, wanted


# ---- the file ----------------------------------------------------------------------------------------------------


def read_file(path: str) -> list[Section]:
    """The enabled sections. UserError naming what is wrong and where."""
    flag = f"--quant_stats_file {path}"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError:
        raise UserError(f"{flag}: cannot be read: nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"{flag}: no YAML: {' '.join(str(error).split())[:160]}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"{flag}: expected named sections, each with enabled, layers and transformer_engine")
    try:
        return [_section(name, body) for name, body in content.items() if _enabled(name, body)]
    except _Wrong as error:
        raise UserError(f"{flag}: {error}") from error


class _Wrong(Exception):
    """What is wrong in the file."""


def _enabled(where: str, body) -> bool:
    if not isinstance(body, dict) or not isinstance(body.get("enabled"), bool):
        raise _Wrong(f"{where}: expected enabled: True or False")
    return body["enabled"]


def _known(where: str, body, known) -> dict:
    if not isinstance(body, dict):
        raise _Wrong(f"{where}: expected {', '.join(known)}")
    for key in body:
        if key not in known:
            raise _Wrong(f"{where}: unknown {key}: known are {', '.join(known)}")
    return body


def _section(name: str, body: dict) -> Section:
    _known(name, body, ("enabled", "layers", "transformer_engine"))
    features = _known(f"{name}: transformer_engine", body.get("transformer_engine"), tuple(_KNOWN_STATS))
    if not features:
        raise _Wrong(f"{name}: transformer_engine: name one of {', '.join(_KNOWN_STATS)}")
    wanted = {
        feature: _tensors(f"{name}: {feature}", feature, settings)
        for feature, settings in features.items()
        if _enabled(f"{name}: {feature}", settings)
    }
    return Section(name, _accepts(f"{name}: layers", body.get("layers")), wanted)


def _accepts(where: str, body) -> Callable[[str], bool]:
    """Which layers a section accepts, by Transformer Engine's rules: by a pattern alone, or by numbers and parts of
    names, both of which must fit."""
    keys = ("layer_numbers", "layer_types", "layer_name_regex_pattern")
    if not _known(where, body, keys):
        raise _Wrong(f"{where}: name one of {', '.join(keys)}")
    if "layer_name_regex_pattern" in body:
        try:
            pattern = re.compile(body["layer_name_regex_pattern"])
        except (re.error, TypeError) as error:
            raise _Wrong(f"{where}: layer_name_regex_pattern: {error}") from error
        # Of NVIDIA's model, too, whose layers have the same names within another module.
        return lambda name: any(pattern.search(prefix + name) for prefix in ("", *_MODULES_AROUND))
    numbers, types = body.get("layer_numbers", "all"), body.get("layer_types", ["all"])
    if not isinstance(types, list) or not all(isinstance(part, str) for part in types):
        raise _Wrong(f"{where}: layer_types: expected a list such as [layernorm_qkv, fc1]")
    numbers = None if numbers in ("all", ["all"]) else _numbers(f"{where}: layer_numbers", numbers)

    def accepts(name: str) -> bool:
        number = int(name.split(".")[2])
        return (numbers is None or number in numbers) and ("all" in types or any(part in name for part in types))

    return accepts


def _numbers(where: str, given) -> set[int]:
    numbers = set()
    for item in given if isinstance(given, list) else [given]:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(item))
        if not match:
            raise _Wrong(f"{where}: {item!r} is no layer and no range: write [1, 3-6], or all")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers


def _tensors(where: str, feature: str, body: dict) -> dict[str, Wanted]:
    if "tensors_struct" in body:
        _known(where, body, ("enabled", "tensors_struct"))
        items = body["tensors_struct"]
    else:
        _known(where, body, ("enabled", "tensors", "stats", *_TIMES))
        shared = {key: value for key, value in body.items() if key not in ("enabled", "tensors")}
        tensors = body.get("tensors")
        items = [{"tensor": tensor} | shared for tensor in tensors] if isinstance(tensors, list) else None
    if not isinstance(items, list) or not items:
        raise _Wrong(f"{where}: expected tensors: [...] and stats: [...], or tensors_struct")
    wanted = {}
    for item in items:
        _known(where, item, ("tensor", "stats", *_TIMES))
        tensor = item.get("tensor")
        if not isinstance(tensor, str) or tensor not in _KNOWN_TENSORS[feature]:
            raise _Wrong(f"{where}: unknown tensor {tensor}: known are {', '.join(_KNOWN_TENSORS[feature])}")
        tensor = _ALIASES.get(tensor, tensor)
        if tensor in wanted:
            raise _Wrong(f"{where}: {tensor} comes twice")
        wanted[tensor] = _wanted(f"{where}: {tensor}", feature, item)
    return wanted


def _wanted(where: str, feature: str, item: dict) -> Wanted:
    stats = item.get("stats")
    if not isinstance(stats, list) or not stats:
        raise _Wrong(f"{where}: expected stats: a list of {', '.join(_KNOWN_STATS[feature])}")
    before = "" if feature == TENSOR else f", any of them after {', '.join(f'{name}_' for name in RECIPES)}"
    # Operands along both dimensions have rows of their own, so that both are always there.
    stats = tuple(dict.fromkeys(str(stat).removesuffix("_columnwise") for stat in stats))
    for stat in stats:
        recipe, plain = split_stat(stat)
        if plain not in _KNOWN_STATS[feature] or (recipe and feature == TENSOR):
            raise _Wrong(f"{where}: unknown statistic {stat}: known are {', '.join(_KNOWN_STATS[feature])}{before}")
    times = {key: item[key] for key in _TIMES if item.get(key) is not None}
    for key, value in times.items():
        if type(value) is not int or value < (key == "freq"):
            raise _Wrong(f"{where}: {key} {value}: expected a number of steps" + ", at least 1" * (key == "freq"))
    return Wanted(stats, times.get("freq", 1), times.get("start_step", 0), times.get("end_step"))
