"""The matrix of a protein's single mutants: its table, the best and worst of them, and what scores follow from."""

from __future__ import annotations

import csv
import math
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from extras.after.inference.mutation_scores import RESIDUES

SHOWN = 10  # best and worst mutants of a protein
# From here on a table of 380 numbers, one a pair of residues, correlates with the matrix by more than 0.97, and the
# rest has less than a quarter of its standard deviation: too little to be seen in a picture.
NEARLY_ALL = 0.95
WARNING = "the two residues explain nearly all of it: this heat map says nothing of positions"


class Shares(NamedTuple):
    """The shares of the variance of `scores` substitutions that follow from wild type and mutant, and from the
    position (with its wild type); None where that is not defined."""

    scores: int
    residues: float | None
    position: float | None

    @property
    def of_residues_alone(self) -> bool:
        return self.residues is not None and self.residues >= NEARLY_ALL

    def __str__(self) -> str:
        residues = f"{_percent(self.residues)} follows from the two residues alone"
        if self.residues is None:
            residues = "too few to say what follows from the two residues alone"
        position = "" if self.position is None else f", {_percent(self.position)} from the position alone"
        return f"variance of the {self.scores:,} scores: {residues}{position}"


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:.1f} %" if share < 0.9995 else "over 99.9 %"


def explained(values: np.ndarray, groups: np.ndarray) -> float | None:
    """The share of a variance that follows from the group alone, one mean a group, corrected for their number:

        1 - (SS_within / (N - G)) / (SS_total / (N - 1)),    0 if that is negative,

    the epsilon squared of Kelley 1935 ("An unbiased correlation ratio measure", PNAS 21:554), which is the adjusted
    R^2 of a regression on the groups. Uncorrected, G groups of random numbers explain (G - 1) / (N - 1).
    values: float [N]; groups: [N], labels of any type. None where N <= G, or where all values are alike.
    """
    _, group = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group)
    total = float(((values - values.mean()) ** 2).sum()) if len(values) else 0.0
    if len(values) <= len(sizes) or not total > 0:
        return None
    means = np.bincount(group, weights=values) / sizes
    within = float(((values - means[group]) ** 2).sum())
    return max(0.0, 1 - within / (len(values) - len(sizes)) * (len(values) - 1) / total)


def shares(text: bytes, matrix: np.ndarray) -> Shares:
    """What the variance of a protein's scores of single mutants follows from.

    matrix: float64 [L, 20] in the order of `RESIDUES`; scores of the wild type itself and NaN are left out.
    """
    wild = np.array(list(text.decode("latin-1").upper()))[:, None]
    mutant = np.array(list(RESIDUES))[None]
    place, column = np.nonzero(np.isfinite(matrix) & (wild != mutant))
    values = matrix[place, column]
    pair = np.char.add(wild[place, 0], mutant[0, column])
    return Shares(len(values), explained(values, pair), explained(values, place))


def write_matrix(path: Path, text: bytes, matrix: np.ndarray, first_residue: int) -> None:
    """A row a position; empty where the wild type is no amino acid."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["position", "wild_type", *RESIDUES])
        for n, row in enumerate(matrix):
            cells = ["" if math.isnan(value) else f"{value:.6f}" for value in row]
            writer.writerow([n + first_residue, chr(text[n]).upper(), *cells])


class Mutant(NamedTuple):
    """A single mutant, A24G, and its score."""

    name: str
    score: float


def extremes(text: bytes, matrix: np.ndarray, first_residue: int) -> tuple[list[Mutant], list[Mutant]]:
    """The `SHOWN` mutants with the highest scores, best first, and those with the lowest, worst first; of equal scores
    the first along the protein. None is in both: of few mutants the best are fewer.

    matrix: as of `shares`; scores of the wild type itself and NaN are left out.
    """
    letters = text.decode("latin-1").upper()
    wild, mutant = np.array(list(letters))[:, None], np.array(list(RESIDUES))[None]
    place, column = np.nonzero(np.isfinite(matrix) & (wild != mutant))
    values = matrix[place, column]
    found = [
        Mutant(f"{letters[n]}{n + first_residue}{RESIDUES[c]}", float(value))
        for n, c, value in zip(place, column, values, strict=True)
    ]
    worst = [found[n] for n in np.argsort(values, kind="stable")[:SHOWN]]
    best = [found[n] for n in np.argsort(-values, kind="stable")[: min(SHOWN, len(found) - len(worst))]]
    return best, worst


def extremes_table(best: list[Mutant], worst: list[Mutant]) -> list[str]:
    """Lines for a terminal: the best on the left, the worst on the right."""
    rows = zip_longest([("best", ""), *best], [("worst", ""), *worst], fillvalue=("", ""))
    cells = [[name, score if isinstance(score, str) else f"{score:+.2f}"] for pair in rows for name, score in pair]
    width = max(len(name) for name, _ in cells)
    sides = [f"{name:<{width}} {score:>7}" for name, score in cells]
    return [f"  {left}    {right}".rstrip() for left, right in zip(sides[::2], sides[1::2], strict=True)]
