"""The picture of a protein's predicted contacts: probabilities, the likeliest pairs, and the true contacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from extras.after.downstream.contacts import RANGES, SEPARATION, Top, top_pairs
from extras.after.downstream.structures import CONTACT_ANGSTROM, Chain

# Of Okabe and Ito's colours for all kinds of colour vision: blue, vermilion, and a light yellow of the background.
TRUE, FALSE, UNKNOWN = "#0072B2", "#D55E00", "#FFF8DC"
SIDE_INCHES = 4.6  # of the map
LARGEST, SMALLEST = 36.0, 6.0  # markers, points^2


def title_of(chain: Chain, top: Top | None) -> str:
    """Chain, range, and how many of the marked pairs are true beside chance."""
    lines = [f"{chain.name[:50]}, {len(chain.sequence):,} residues"]
    if top is None:
        return "\n".join([*lines, f"no pairs {SEPARATION} or more residues apart"])
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


def draw(chain: Chain, probabilities: np.ndarray, path: Path) -> None:
    """Above the diagonal predicted probabilities [L, L] with the pairs of `top_pairs` marked, true and false ones;
    below it the true contacts, or without a structure the probabilities again. The colours end at the highest
    probability shown."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    contacts, known = chain.contacts()
    length, has_structure = len(chain.sequence), bool(known.any())
    image = np.array(probabilities, dtype=np.float64)
    place = np.arange(length)
    image[np.abs(place[:, None] - place) < SEPARATION] = np.nan
    upper = np.triu(np.ones_like(known), SEPARATION)
    highest = float(image[upper].max(initial=0)) or 1.0
    if has_structure:
        image[upper.T] = np.where(known, contacts * highest, np.nan)[upper.T]
    figure = Figure(figsize=(SIDE_INCHES + 1.4, SIDE_INCHES + 1.6), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(UNKNOWN)
    extent = (0.5, length + 0.5, length + 0.5, 0.5)
    shown = axes.imshow(image, cmap="Greys", vmin=0, vmax=highest, extent=extent, interpolation="nearest")
    figure.colorbar(shown, label="predicted probability of a contact", shrink=0.8)
    top = top_pairs(chain, probabilities)
    axes.set_title(title_of(chain, top), fontsize=10)
    for axis, set_label in ((axes.xaxis, axes.set_xlabel), (axes.yaxis, axes.set_ylabel)):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        set_label("residue")
    if top is not None:
        mark(axes, top, length)
        below = f"true contacts (C-beta closer than {CONTACT_ANGSTROM:g} Å)" if has_structure else "the same, unmarked"
        missing = ", or without coordinates" if has_structure and not known.all() else ""
        note = f"below the diagonal: {below}\nyellow: less than {SEPARATION} residues apart{missing}"
        figure.legend(loc="outside lower center", fontsize=8, ncols=2, title=note, title_fontsize=8)
    figure.savefig(path, dpi=120)


def mark(axes: Any, top: Top, length: int) -> None:
    """Markers about as large as a pair's cell: circles of contacts and of unknown pairs, crosses of the others."""
    size = float(np.clip((SIDE_INCHES * 72 * 0.75 / length) ** 2, SMALLEST, LARGEST))
    circles = np.ones(len(top.i), bool) if top.contact is None else top.contact
    name, parts = f"likeliest {top.range}-range pairs", ("", "") if top.contact is None else (": true", ": false")
    for chosen, part, paint in (
        (circles, parts[0], {"marker": "o", "facecolors": "none", "edgecolors": TRUE}),
        (~circles, parts[1], {"marker": "x", "c": FALSE}),
    ):
        if part or chosen.any():
            label = f"{name}{part} ({int(chosen.sum()):,})"
            axes.scatter(top.j[chosen] + 1, top.i[chosen] + 1, size, linewidths=0.9, label=label, **paint)
