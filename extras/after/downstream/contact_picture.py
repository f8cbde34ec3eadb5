"""The picture of a protein's predicted contacts: probabilities, the likeliest pairs, and the true contacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.figures import COLOURS, DEFAULT, NORMAL, ONE_COLUMN, FigureFlags, figure_style, save_figure
from extras.after.downstream.complexes import Complex, likeliest_pairs
from extras.after.downstream.contacts import RANGES, SEPARATION, Top, top_pairs
from extras.after.downstream.structures import CONTACT_ANGSTROM, Chain
from extras.after.inference.chains import letters_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRUE, FALSE = COLOURS[0], COLOURS[3]
SIDE_INCHES = 2.4  # of the map
LARGEST, SMALLEST, ALONE = 12.0, 5.0, 1.5  # markers, points^2: circles beside crosses at least SMALLEST
ROOM = 0.06  # of an axis, for a number
ANY = "any"  # the range of a complex's pairs


def title_of(chain: Chain, top: Top | None) -> str:
    """Chain, range, and how many of the marked pairs are true beside chance."""
    lines = [f"{chain.name[:45]}, {len(chain.sequence):,} residues"]
    if top is None:
        return "\n".join([*lines, f"no pairs {SEPARATION} or more residues apart"])
    if top.range == ANY:
        lines.append(f"marked: the {len(top.i):,} likeliest pairs")
        return "\n".join([*lines, f"({SEPARATION} or more apart, or of two chains)"])
    nearest, beyond = RANGES[top.range]
    apart = f"{nearest} or more" if top.range == "long" else f"{nearest} to {beyond - 1}"
    count = f"{len(top.i):,} likeliest {top.range}-range pairs"
    if top.contact is None:
        return "\n".join([*lines, f"marked: the {count}", f"({apart} residues apart); no structure to compare with"])
    share = f"{top.contact.mean():.1%}, chance {top.chance:.1%}".replace("%", " %")
    lines.append(f"of the {count} ({apart} residues apart)")
    if not top.chance:
        return "\n".join([*lines, "none is a contact: the structure has none of that range"])
    return "\n".join([*lines, f"{int(top.contact.sum()):,} are contacts: P@L {share}"])


def draw(chain: Chain, probabilities: np.ndarray, path: Path, flags: FigureFlags = DEFAULT) -> list[Path]:
    """Write `figure_of` as the flags say. path: without a suffix."""
    with figure_style():
        figure = figure_of(chain, probabilities)
    return save_figure(figure, path, flags)


def figure_of(chain: Chain, probabilities: np.ndarray) -> Figure:
    """Above the diagonal predicted probabilities [L, L] with the likeliest pairs marked, true and false ones; below it
    the true contacts, or without a structure the probabilities again. The colours end at the highest probability
    shown. Of a complex the pairs are `likeliest_pairs`, of a chain `top_pairs`; lines are the chains' borders."""
    from matplotlib.figure import Figure

    numbers = chain.numbers if isinstance(chain, Complex) else np.zeros(len(chain.sequence), np.int64)
    contacts, known = chain.contacts()
    length, has_structure = len(chain.sequence), bool(known.any())
    image = np.array(probabilities, dtype=np.float64)
    place = np.arange(length)
    image[(np.abs(place[:, None] - place) < SEPARATION) & (numbers[:, None] == numbers)] = np.nan
    upper = np.triu(np.isfinite(image))
    highest = float(image[upper].max(initial=0)) or 1.0
    if has_structure:
        image[upper.T] = np.where(known, contacts * highest, np.nan)[upper.T]
    figure = Figure(figsize=(ONE_COLUMN, SIDE_INCHES + 1.4), layout="constrained")
    axes = figure.subplots()
    axes.patch.set(hatch="////////", edgecolor="0.7", linewidth=0)  # shows through where nothing is known
    extent = (0.5, length + 0.5, length + 0.5, 0.5)
    shown = axes.imshow(image, cmap="Greys", vmin=0, vmax=highest, extent=extent, interpolation="nearest")
    figure.colorbar(shown, label="predicted probability of a contact", shrink=0.8)
    top = top_pairs(chain, probabilities)
    if numbers.any():
        top = Top(ANY, *likeliest_pairs(numbers, probabilities), None, 0.0)
    figure.suptitle(title_of(chain, top), fontsize=NORMAL)
    label_residues(axes, numbers)
    if top is not None:
        mark(axes, top, length)
        below = f"true contacts (C-beta closer than {CONTACT_ANGSTROM:g} Å)" if has_structure else "the same, unmarked"
        missing = ", or without coordinates" if has_structure and not known.all() else ""
        note = f"below the diagonal: {below}\nhatched: less than {SEPARATION} residues apart{missing}"
        figure.legend(loc="outside lower center", title=note, handletextpad=0.2)
    return figure


def label_residues(axes: Any, numbers: np.ndarray) -> None:
    """Numbers in the chain; of several chains their borders and letters. numbers: of each residue's chain."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.set_label_text("residue")
    if not numbers.any():
        return
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    sizes = np.diff(starts, append=len(numbers))
    step = next(n for n in (10, 20, 50, 100, 200, 500) if len(numbers) <= 8 * n or n == 500)
    ticks = []
    for start, size in zip(starts, sizes, strict=True):
        shown = [n for n in range(step, size + 1, step) if size - n > ROOM * len(numbers)]
        ticks += [(start + n, n) for n in (1, *shown)]
    centres, letters = starts + (sizes + 1) / 2, [letters_of(n) for n in range(len(starts))]
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks([place for place, _ in ticks], [str(n) for _, n in ticks])
    for axis in (axes.secondary_xaxis("top").xaxis, axes.secondary_yaxis("right").yaxis):
        axis.set_ticks(centres, letters)
        axis.set_tick_params(length=0)
    for start in starts[1:]:
        axes.axhline(start + 0.5, color="black", linewidth=0.6)
        axes.axvline(start + 0.5, color="black", linewidth=0.6)


def mark(axes: Any, top: Top, length: int) -> None:
    """Markers about as large as a pair's cell: circles of contacts and of unknown pairs, crosses of the others."""
    least = ALONE if top.contact is None else SMALLEST
    size = float(np.clip((SIDE_INCHES * 72 * 0.75 / length) ** 2, least, LARGEST))
    circles = np.ones(len(top.i), bool) if top.contact is None else top.contact
    range_of = "" if top.range == ANY else f"{top.range}-range "
    name, parts = f"likeliest {range_of}pairs", ("", "") if top.contact is None else (": true", ": false")
    for chosen, part, paint in (
        (circles, parts[0], {"marker": "o", "facecolors": "none", "edgecolors": TRUE}),
        (~circles, parts[1], {"marker": "x", "c": FALSE}),
    ):
        if part or chosen.any():
            label = f"{name}{part} ({int(chosen.sum()):,})"
            axes.scatter(top.j[chosen] + 1, top.i[chosen] + 1, size, linewidths=0.3 * size**0.5, label=label, **paint)
