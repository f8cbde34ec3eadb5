"""The matrix of a protein's single mutants: its table, its heat map, and what its scores follow from."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from extras.after.inference.mutation_scores import RESIDUES

ORDER = "GAVLIMCFYWPSTNQHKRDE"  # of a heat map: small and hydrophobic, aromatic, polar, charged
POSITIONS_IN_ROW = 100
INCHES_PER_POSITION, NARROWEST_INCHES, CHARACTERS_PER_INCH = 0.13, 7.0, 11
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


def draw(path: Path, title: str, text: bytes, matrix: np.ndarray, first_residue: int) -> None:
    """A heat map, in rows of `POSITIONS_IN_ROW` positions; dots mark the wild type; below it the `shares`."""
    from matplotlib.figure import Figure

    starts = range(0, len(text), POSITIONS_IN_ROW)
    inches = max(NARROWEST_INCHES, 1 + INCHES_PER_POSITION * min(len(text), POSITIONS_IN_ROW))
    figure = Figure(figsize=(inches, 1.2 + 3.2 * len(starts)), layout="constrained")
    rows = figure.subplots(len(starts), squeeze=False)[:, 0]
    shown = matrix[:, [RESIDUES.index(letter) for letter in ORDER]].T
    known = np.abs(shown[np.isfinite(shown)])
    limit = float(np.percentile(known, 99)) if known.any() else 1.0
    letters = text.decode("latin-1").upper()
    for axes, start in zip(rows, starts, strict=True):
        part = shown[:, start : start + POSITIONS_IN_ROW]
        width, first = part.shape[1], start + first_residue
        extent = (first - 0.5, first + width - 0.5, len(ORDER) - 0.5, -0.5)
        options: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit, "aspect": "auto", "extent": extent}
        image = axes.imshow(part, **options)
        axes.set_facecolor("0.8")
        wild = [(first + n, ORDER.index(x)) for n, x in enumerate(letters[start : start + width]) if x in ORDER]
        axes.plot([x for x, _ in wild], [y for _, y in wild], "k.", markersize=3)
        axes.set_yticks(range(len(ORDER)), list(ORDER), fontsize=7)
        axes.set_ylabel("mutant")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(first - 0.5, first + POSITIONS_IN_ROW - 0.5 if len(starts) > 1 else first + width - 0.5)
    rows[0].set_title(title)
    rows[-1].set_xlabel("residue (dot: the wild type)")
    of_variance = shares(text, matrix)
    sentences = [str(of_variance), WARNING] if of_variance.of_residues_alone else [str(of_variance)]
    note = "\n".join(fill(sentence, int(CHARACTERS_PER_INCH * inches)) for sentence in sentences)
    figure.supxlabel(note, fontsize=10, weight="bold" if of_variance.of_residues_alone else "normal")
    figure.colorbar(image, ax=list(rows), label="log p(mutant) - log p(wild type), nats")
    figure.savefig(path, dpi=80)
