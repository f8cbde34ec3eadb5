"""The map as a picture: a point a protein, in the colours of classes or numbers, with the numbers of the clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.figures import SEQUENTIAL, TWO_COLUMNS, FigureFlags, figure_style, save_figure
from extras.after.maps.clusters import Cluster
from extras.after.maps.colouring import MISSING, Colouring
from extras.after.maps.projections import Projection

HEIGHT = 0.62  # of the width
LARGEST, SMALLEST = 14.0, 0.6  # points^2 of a marker
INK = 16_000  # points^2 of all markers together
AS_PIXELS = 2000  # proteins above which the points of SVG and PDF are an image
LONGEST = 30  # characters of a class in the legend


def draw(
    projection: Projection, colouring: Colouring, clusters: Sequence[Cluster], path: Path, flags: FigureFlags
) -> list[Path]:
    """Write the picture; path: without a suffix. Returns its files."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(TWO_COLUMNS, HEIGHT * TWO_COLUMNS), layout="constrained")
        axes = figure.subplots()
        points = projection.points
        size = float(np.clip(INK / len(points), SMALLEST, LARGEST))
        form: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": len(points) > AS_PIXELS}
        missing = np.array([not text for text in colouring.texts])
        axes.scatter(*points[missing].T, color=MISSING, **form)
        draw_known(figure, axes, points, colouring, ~missing, form)
        for cluster in clusters:
            mark(axes, cluster, points)
        axes.set_xlabel(projection.axes[0])
        axes.set_ylabel(projection.axes[1])
        if not projection.axes[0].startswith("PC"):  # distances between far points mean nothing
            axes.set_xticks([])
            axes.set_yticks([])
        axes.spines[["top", "right"]].set_visible(False)
        return save_figure(figure, path, flags)


def draw_known(
    figure: Any, axes: Any, points: np.ndarray, colouring: Colouring, known: np.ndarray, form: dict[str, Any]
) -> None:
    """The points with a value, in a random order so that no class covers the others, and what their colours mean."""
    order = np.random.default_rng(0).permutation(np.flatnonzero(known))
    notes = [f"{name} ({count:,})" for name, _, count in colouring.legend() if name == colouring.absent]
    if colouring.numbers is not None:
        low, high = colouring.limits()
        drawn = axes.scatter(
            *points[order].T, c=colouring.numbers[order], cmap=SEQUENTIAL, vmin=low, vmax=high, **form
        )
        bar = figure.colorbar(drawn, label=colouring.title, shrink=0.6, extend="both")
        bar.outline.set_visible(False)
        if notes:
            axes.set_title(f"grey: {notes[0]}", fontsize="small", loc="right")
        return
    colours = colouring.of_points()
    axes.scatter(*points[order].T, color=[colours[place] for place in order], **form)
    handles = [
        axes.scatter([], [], s=16, color=colour, linewidths=0, label=f"{shortened(name)} ({count:,})")
        for name, colour, count in colouring.legend()
    ]
    figure.legend(handles=handles, title=shortened(colouring.title), loc="outside right upper", alignment="left")


def mark(axes: Any, cluster: Cluster, points: np.ndarray) -> None:
    """The cluster's number at its median."""
    from matplotlib.patheffects import withStroke

    x, y = np.median(points[cluster.members], axis=0)
    halo = [withStroke(linewidth=2, foreground="white")]
    axes.text(x, y, str(cluster.number), ha="center", va="center", weight="bold", path_effects=halo)


def shortened(text: str) -> str:
    """For a legend; `$` would begin a formula."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text.replace("$", r"\$")
