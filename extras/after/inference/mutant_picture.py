"""The heat map of a protein's single mutants, in rows of positions and pages of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from common.figures import (
    DEFAULT,
    DIVERGING,
    LARGE,
    ONE_COLUMN,
    PAGE,
    SMALL,
    TWO_COLUMNS,
    FigureFlags,
    figure_style,
    save_figure,
)
from common.files.safe_files import file_name
from extras.after.inference.mutant_matrix import WARNING, shares
from extras.after.inference.mutation_scores import RESIDUES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = "GAVLIMCFYWPSTNQHKRDE"  # small and hydrophobic, aromatic, polar, charged
# Inches: a cell, in which a letter of `LETTER` points has room; the margins; between the mean's strip and the map.
CELL, LEFT, RIGHT, GAP = 0.078, 0.42, 0.8, 0.03
LETTER = 5
LINE = 1.25 / 72  # inches a point of a line of text
ROW = CELL * (len(ORDER) + 1) + GAP + 0.38  # with its letters and numbers
POSITIONS = int((TWO_COLUMNS - LEFT - RIGHT) / CELL)  # of a row
ROWS = int((PAGE - 0.8) / ROW)  # of a page


def draw(
    path: Path,
    taken: set[str],
    title: str,
    text: bytes,
    matrix: np.ndarray,
    first_residue: int,
    flags: FigureFlags = DEFAULT,
) -> None:
    """`path`.png; of a protein that needs several pages `path`.page2.png and so on, too. taken: names of files that
    are others'. matrix: float64 [L, 20] in the order of `RESIDUES`."""
    for number, figure in enumerate(pages(title, text, matrix, first_residue), 1):
        name = path.name if number == 1 else file_name(f"{path.name}.page{number}", taken)
        save_figure(figure, path.with_name(name), flags)


def pages(title: str, text: bytes, matrix: np.ndarray, first_residue: int) -> Iterator[Figure]:
    """A row has, from above, numbers of positions, the mean over a position's substitutions, the substitutions, and
    the wild type's letters; dots mark the wild type. Below all rows: the `shares`. One scale of colours for all pages,
    which ends at the percentile 99 of the scores' sizes."""
    letters = text.decode("latin-1").upper()
    shown = matrix[:, [RESIDUES.index(letter) for letter in ORDER]].T.copy()
    known = np.abs(shown[np.isfinite(shown)])
    limit = float(np.percentile(known, 99)) if known.any() else 1.0
    means = means_of(letters, matrix)
    of_variance = shares(text, matrix)
    warning = [WARNING] if of_variance.of_residues_alone else []
    sentences = [*warning, str(of_variance), "Dot, and letter below: the wild type. Hatched: not scored."]
    a_page = POSITIONS * ROWS
    count = -(-len(text) // a_page)
    for number, begin in enumerate(range(0, len(text), a_page), 1):
        end = min(begin + a_page, len(text))
        name = title if count == 1 else f"{title}, page {number} of {count}"
        with figure_style():
            drawn = _page(
                (name, sentences),
                letters[begin:end],
                shown[:, begin:end],
                means[begin:end],
                begin + first_residue,
                limit,
            )
        yield drawn


def means_of(letters: str, matrix: np.ndarray) -> np.ndarray:
    """Over a position's substitutions, without the wild type: float64 [L], NaN where there are no scores."""
    is_other = np.array(list(letters))[:, None] != np.array(list(RESIDUES))[None]
    counted = np.isfinite(matrix) & is_other
    counts = counted.sum(1)
    return np.where(counts, np.where(counted, matrix, 0).sum(1) / np.maximum(counts, 1), np.nan)


def _page(
    texts: tuple[str, list[str]], letters: str, shown: np.ndarray, means: np.ndarray, first: int, limit: float
) -> Figure:
    """texts: the title, and the sentences below."""
    from matplotlib.figure import Figure

    starts = range(0, len(letters), POSITIONS)
    width = max(ONE_COLUMN, LEFT + CELL * min(len(letters), POSITIONS) + RIGHT)
    title = fill(texts[0], _characters(width, LARGE))
    note = "\n".join(fill(each, _characters(width, SMALL)) for each in texts[1])
    top, below = (0.1 + (text.count("\n") + 1) * LINE * size for text, size in ((title, LARGE), (note, SMALL)))
    height = top + ROW * len(starts) + below
    figure = Figure(figsize=(width, height))
    options: dict[str, Any] = {"cmap": DIVERGING, "vmin": -limit, "vmax": limit, "aspect": "auto"}
    for row, start in enumerate(starts):
        here = slice(start, start + POSITIONS)
        part = letters[here]
        bottom = height - top - ROW * (row + 1) + 0.2
        size = (CELL * len(part) / width, CELL * len(ORDER) / height)
        axes = figure.add_axes((LEFT / width, bottom / height, *size))
        extent = (start - 0.5, start + len(part) - 0.5)
        image = axes.imshow(shown[:, here], extent=(*extent, len(ORDER) - 0.5, -0.5), **options)
        wild = [(start + n, ORDER.index(letter)) for n, letter in enumerate(part) if letter in ORDER]
        axes.plot([x for x, _ in wild], [y for _, y in wild], "k.", markersize=1.8)
        axes.patch.set(hatch="//////", edgecolor="0.6")  # shows through where there are no scores
        axes.set(xlim=extent, ylim=(len(ORDER) - 0.5, -0.5), ylabel="mutant")
        axes.set_yticks(range(len(ORDER)), list(ORDER), fontsize=LETTER, ha="center")
        axes.set_xticks(range(start, start + len(part)), list(part), fontsize=LETTER)
        axes.tick_params(length=0, pad=1.5)
        axes.tick_params(axis="y", pad=4)
        above = bottom + CELL * len(ORDER) + GAP
        strip = figure.add_axes((LEFT / width, above / height, size[0], CELL / height))
        strip.imshow(means[None, here], extent=(*extent, 0.5, -0.5), **options)
        tens = [n for n in range(start, start + len(part)) if (n + first) % 10 == 0]
        numbers = tens if row or first % 10 > 6 else sorted({0, *tens})  # the first, where it has room
        strip.xaxis.tick_top()
        strip.set_xticks(numbers, [str(n + first) for n in numbers])
        strip.set_yticks([0], ["mean"])
        strip.tick_params(length=1.5, pad=1)
        strip.tick_params(axis="y", length=0, pad=2)
    beside = LEFT + CELL * min(len(letters), POSITIONS) + 0.1
    place = (beside / width, (height - top - ROW + 0.2) / height, 0.09 / width, size[1])
    figure.colorbar(image, cax=figure.add_axes(place), extend="both", extendfrac=0.03)
    figure.axes[-1].set_ylabel("log p(mutant) - log p(wild type), nats", fontsize=SMALL)
    figure.text(LEFT / width, 1 - 0.05 / height, title, fontsize=LARGE, va="top")
    figure.text(LEFT / width, 0.05 / height, note, fontsize=SMALL, va="bottom")
    return figure


def _characters(inches: float, points: float) -> int:
    """So many of a usual text in this size have room: a character is 0.6 of its size wide."""
    return int((inches - LEFT - 0.1) * 72 / (0.6 * points))
