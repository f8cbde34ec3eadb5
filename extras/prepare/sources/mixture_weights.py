"""What --dataset_mix and its keys say: the sources of a mixture, and their weights from a step on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cli import UserError
from common.data.flags import RESULTS, ProteinFlags

ENTRY = re.compile(r"([A-Za-z]\w*)=(.+)")
STAGE = re.compile(r"([0-9]{1,16}):(.+)")
WANTED = "expected NAME=DIRECTORY:WEIGHT, such as uniref=uniref/arrow:0.7"


@dataclass(frozen=True)
class Stages:
    """firsts: the step that each stage begins with, the first one 0; weights: of each stage, those of the sources,
    which sum to 1."""

    firsts: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]

    def at(self, step: int) -> tuple[float, ...]:
        """The weights of a step, counted from 0."""
        return self.weights[sum(first <= step for first in self.firsts) - 1]

    def line(self, names: Sequence[str]) -> str:
        """For the log, and for the identity of the order."""
        texts = []
        for first, weights in zip(self.firsts, self.weights, strict=True):
            shares = [f"{name} {weight:.6g}" for name, weight in zip(names, weights, strict=True) if weight]
            texts.append((f"from step {first:,}: " if first else "") + ", ".join(shares))
        return "; ".join(texts)


def parse_sources(flags: ProteinFlags) -> tuple[dict[str, str], list[float]]:
    """{name: directory} of --dataset_mix, and the weights, [] if none is given. UserError for anything else."""
    directories: dict[str, str] = {}
    weights: list[float] = []
    for entry in flags.dataset_mix or ():
        where = f"--dataset_mix {entry}"
        if not (match := ENTRY.fullmatch(entry)):
            raise UserError(f"{where}: {WANTED}")
        name, directory = match.groups()
        if re.search(r",[A-Za-z]\w*=", directory):
            raise UserError(f"{where}: sources are separated by blanks, not by commas")
        path, colon, weight = directory.rpartition(":")
        if colon and not Path(directory).is_dir():
            directory = path
            weights.append(_weight(where, weight))
        if name == "validation" or name.split("_")[0] in RESULTS:
            raise UserError(f"{where}: {name} is the name of a result: choose another")
        if name in directories:
            raise UserError(f"{where}: a second {name}: give each source a name of its own")
        if any(Path(directory).resolve() == Path(other).resolve() for other in directories.values()):
            raise UserError(f"{where}: {directory} is a source already: give it once, with the sum of the weights")
        directories[name] = directory
    if weights and len(weights) != len(directories):
        raise UserError(f"--dataset_mix: {len(weights)} of {len(directories)} sources have a weight: all or none")
    return directories, weights


def stages_of(flags: ProteinFlags, names: Sequence[str], weights: Sequence[float], tokens: Sequence[int]) -> Stages:
    """The stages of a mixture. weights: as `parse_sources`; tokens: of an epoch of each source, for the default."""
    stages = {0: _normalised(weights or [size**flags.dataset_mix_exponent for size in tokens])}
    for text in flags.dataset_mix_stages or ():
        where = f"dataset_mix_stages: {text}"
        if not (match := STAGE.fullmatch(text)):
            raise UserError(f"{where}: expected STEP:NAME=WEIGHT,NAME=WEIGHT, such as 10000:uniref=0.5,own=0.5")
        first, given = int(match[1]), dict.fromkeys(names, 0.0)
        for part in match[2].split(","):
            name, equals, weight = part.strip().partition("=")
            if not equals or name not in given:
                raise UserError(f"{where}: {name} is no source: they are {', '.join(names)}")
            if given[name]:
                raise UserError(f"{where}: a second weight of {name}")
            given[name] = _weight(where, weight)
        if first == 0 and weights and len(stages) == 1:
            raise UserError(f"{where}: --dataset_mix has the weights from step 0 on: drop the one or the other")
        if first < max(stages) or (first == max(stages) and len(stages) > 1):
            raise UserError(f"{where}: the steps of stages must rise")
        stages[first] = _normalised(list(given.values()))
    return Stages(tuple(stages), tuple(stages.values()))


def check_exponent(flags: ProteinFlags, weights: Sequence[float]) -> None:
    """UserError for a power that cannot be, or that nothing reads."""
    power = flags.dataset_mix_exponent
    if not 0 <= power <= 1:
        raise UserError(f"dataset_mix_exponent: {power}: a power of sizes, 0 to 1")
    if weights and power != 1:
        raise UserError(f"dataset_mix_exponent: {power}: --dataset_mix has weights: drop the one or the other")


def _weight(where: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"{where}: {text!r} is no weight: give a number above 0")
    return weight


def _normalised(weights: Sequence[float]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)
