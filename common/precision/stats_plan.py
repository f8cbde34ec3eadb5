"""Which statistics of which quantised tensors are wanted, and when: from --quant_stats* and a file.

The file (--quant_stats_file) has the structure of Transformer Engine's debug configuration: named sections, each with
the layers it is about and, under `transformer_engine`, LogFp8TensorStats (or LogNvfp4TensorStats) and LogTensorStats.
It means the same whichever backend quantises. Unlike there, what cannot be honoured is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from common.cli import Missing, UserError, flag
from common.precision.plan import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Plan,
    PrecisionFlags,
)

FILE = "quant_stats.jsonl"
MODULES = {
    "qkv": "self_attention.layernorm_qkv",
    "proj": "self_attention.proj",
    "fc1": "layernorm_mlp.fc1",
    "fc2": "layernorm_mlp.fc2",
}
OPERANDS = ("activation", "weight", "gradient")
RESULTS = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}  # tensor: the product it is the result of
QUANTISED = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
PLAIN = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
# Before a statistic of `QUANTISED`: what that recipe makes, or would make of the tensor.
RECIPES = {
    "fp8_delayed_scaling": DelayedScaling,
    "fp8_current_scaling": CurrentScaling,
    "fp8_block_scaling": BlockScaling,
    "mxfp8": MXFP8BlockScaling,
}

_DELAYED = "fp8_delayed_scaling"  # of its own layers only: elsewhere there are no histories
_ALIASES = {"fprop": "output"}  # as the guides' file has it
_FP8, _FP4, _TENSOR = "LogFp8TensorStats", "LogNvfp4TensorStats", "LogTensorStats"
_KNOWN_STATS = {_FP8: QUANTISED, _FP4: QUANTISED, _TENSOR: PLAIN}
_KNOWN_TENSORS = {_FP8: OPERANDS, _FP4: OPERANDS, _TENSOR: (*OPERANDS, *RESULTS, *_ALIASES)}
_MODULES_AROUND = ("model.", "model.esm.", "model.model.")
_TIMES = ("freq", "start_step", "end_step")


@dataclass
class StatsFlags(PrecisionFlags):
    quant_stats: bool = flag(False, "Log statistics of the quantised tensors: underflow, scales, error, norms.")
    quant_stats_freq: int | None = flag(None, "Every so many steps. Default: as the file says, 10 without one.")
    quant_stats_dir: str | None = flag(None, "Where quant_stats.jsonl goes. Default: --output_dir.")
    quant_stats_file: str | None = flag(
        None, "Which layers, tensors and statistics: YAML as Transformer Engine's debug configuration."
    )

    def missing(self) -> Iterator[Missing]:
        for detail in ("freq", "dir", "file"):
            if getattr(self, f"quant_stats_{detail}") is not None and not self.quant_stats:
                yield Missing("--quant_stats", f"--quant_stats_{detail} goes with --quant_stats")
        if self.quant_stats and not (self.fp8 or self.fp4):
            yield Missing("--fp8", "or --fp4: nothing is quantised for --quant_stats")

    def check(self) -> None:
        self.require_at_least(1, "quant_stats_freq")
        if self.quant_stats_file is not None:
            read_file(self.quant_stats_file)

    def log_directory(self, output_dir: str) -> Path:
        """Where quant_stats.jsonl goes."""
        return Path(self.quant_stats_dir or output_dir)

    def check_log_directory(self) -> None:
        """UserError unless --quant_stats_dir can be made and written to. (The output directory's owner tries that.)"""
        if self.quant_stats_dir:
            probe = Path(self.quant_stats_dir) / f"{FILE}.probe"
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(
                    f"--quant_stats_dir {self.quant_stats_dir}: not writable ({error.strerror}): choose another "
                    "directory"
                ) from error


@dataclass(frozen=True)
class Wanted:
    """Statistics, at steps that are multiples of `freq`, from step `start` to step `end`; steps count from 1."""

    stats: tuple[str, ...]
    freq: int
    start: int = 0
    end: int | None = None

    def of_recipes(self) -> Wanted:
        """Those that name a recipe."""
        return replace(self, stats=tuple(stat for stat in self.stats if split_stat(stat)[0]))

    def due(self, step: int) -> bool:
        return step % self.freq == 0 and self.start <= step and (self.end is None or step <= self.end)


DEFAULT_FREQ = 10
DEFAULT_STATS = (*QUANTISED, "cur_amax", "l2_norm", "mean", "std")
Key = tuple[int, str, str]  # layer from 1, of MODULES, of OPERANDS or RESULTS
Selection = dict[Key, tuple[Wanted, ...]]


@dataclass(frozen=True)
class Section:
    """Of the file: what its features want of each tensor, in the layers whose name it accepts."""

    name: str
    accepts: Callable[[str], bool]
    features: dict[str, dict[str, Wanted]]  # feature -> tensor -> what


def split_stat(stat: str) -> tuple[str, str]:
    """("mxfp8", "underflows%") of mxfp8_underflows%; ("", "mse") of mse: of the layer's own recipe."""
    name = next((name for name in RECIPES if stat.startswith(f"{name}_")), "")
    return name, stat[len(name) + 1 :] if name else stat


def layer_name(layer: int, module: str) -> str:
    """What the file's patterns are matched against. Layers count from 1, as in --fp8_layers."""
    return f"encoder.layers.{layer}.{MODULES[module]}"


def select(flags: StatsFlags, plan: Plan) -> Selection:
    """What is wanted of the tensors of the plan's quantised layers. UserError if the file selects none of them."""
    if flags.quant_stats_file is None:
        everything = dict.fromkeys(OPERANDS, Wanted(DEFAULT_STATS, DEFAULT_FREQ))
        sections = [Section("default", lambda name: True, {_FP8: everything})]
    else:
        sections = read_file(flags.quant_stats_file)
    selection: Selection = {}
    for layer, recipe in enumerate(plan, 1):
        for module in MODULES if recipe else ():
            name = layer_name(layer, module)
            # Either feature means the format that the layer has; of two sections, that with the layer's own counts.
            order = (_FP4, _FP8) if isinstance(recipe, NVFP4BlockScaling) else (_FP8, _FP4)
            mine = [section for section in sections if section.accepts(name)]
            if len(mine) > 1:
                mine = [section for section in mine if order[0] in section.features] or mine
            if len(mine) > 1:
                names = " and ".join(section.name for section in mine)
                raise UserError(f"--quant_stats_file {flags.quant_stats_file}: {names} both select {name}: let one do")
            for section in mine:
                quantised, *others = [section.features[f] for f in order if f in section.features] or [{}]
                what_ifs = [{tensor: what.of_recipes() for tensor, what in other.items()} for other in others]
                for wanted in (quantised, *what_ifs, section.features.get(_TENSOR, {})):
                    for tensor, what in wanted.items():
                        delayed = any(split_stat(stat)[0] == _DELAYED for stat in what.stats)
                        if delayed and not isinstance(recipe, DelayedScaling):
                            raise UserError(
                                f"--quant_stats_file {flags.quant_stats_file}: {section.name}: {name} is in "
                                f"{recipe.title}: there is no history for {_DELAYED}: drop it there"
                            )
                        if what.stats:
                            selection[layer, module, tensor] = (*selection.get((layer, module, tensor), ()), what)
    if not selection:
        raise UserError(
            f"--quant_stats_file {flags.quant_stats_file}: selects no quantised layer: names are like "
            f"{layer_name(next(n for n, recipe in enumerate(plan, 1) if recipe), 'fc1')}"
        )
    if flags.quant_stats_freq is not None:
        every = flags.quant_stats_freq
        return {k: tuple(Wanted(w.stats, every, w.start, w.end) for w in ws) for k, ws in selection.items()}
    return selection


# ---- the file ----------------------------------------------------------------------------------------------------


def read_file(path: str) -> list[Section]:
    """The enabled sections. UserError naming what is wrong and where."""
    flag = f"--quant_stats_file {path}"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{flag}: no YAML: {' '.join(str(error).split())[:160]}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"{flag}: expected named sections, each with enabled, layers and transformer_engine")
    try:
        return [_section(name, body) for name, body in content.items() if _enabled(name, body)]
    except _Wrong as error:
        raise UserError(f"{flag}: {error}") from error


class _Wrong(Exception):
    pass


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
    """As Transformer Engine: a pattern alone, or numbers and parts of names, both of which must fit."""
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
        if tensor not in _KNOWN_TENSORS[feature]:
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
    before = "" if feature == _TENSOR else f", any of them after {', '.join(f'{name}_' for name in RECIPES)}"
    # Operands along both dimensions have rows of their own, so that both are always there.
    stats = tuple(dict.fromkeys(str(stat).removesuffix("_columnwise") for stat in stats))
    for stat in stats:
        recipe, plain = split_stat(stat)
        if plain not in _KNOWN_STATS[feature] or (recipe and feature == _TENSOR):
            raise _Wrong(f"{where}: unknown statistic {stat}: known are {', '.join(_KNOWN_STATS[feature])}{before}")
    times = {key: item.get(key) for key in _TIMES if item.get(key) is not None}
    for key, value in times.items():
        if type(value) is not int or value < (key == "freq"):
            raise _Wrong(f"{where}: {key} {value}: expected a number of steps" + ", at least 1" * (key == "freq"))
    return Wanted(stats, times.get("freq", 1), times.get("start_step", 0), times.get("end_step"))
