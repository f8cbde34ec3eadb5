"""Held-out loss over tokens, one colour a group, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.files.safe_files import replace_flushed
from extras.compare.runs import Group, Run, baselines, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), which colour-blind readers tell apart; without yellow, which is faint on white. Baselines are
# black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
STYLES = ("-", "-.", (0, (1, 1)))  # beyond seven groups; dashes are the baselines'
SHOWN_FROM = 0.25  # of a run's evaluations on, the whole curve lies in the picture: losses fall steeply before


def draw(groups: Sequence[Group], directory: Path, name: str) -> list[Path]:
    """Writes directory/NAME.png and directory/NAME.svg."""
    import matplotlib

    figure, paths = figure_of(groups), []
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):  # the same file for the same runs
        for form, options in (
            ("png", {"dpi": 100}),
            ("svg", {"metadata": {"Date": None}}),
        ):
            paths.append(directory / f"{name}.{form}")
            with replace_flushed(paths[-1]) as file:
                figure.savefig(file, format=form, bbox_inches="tight", **options)
    return paths


def figure_of(groups: Sequence[Group]) -> Figure:
    """The legend lies beside the axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, 4.8))
    axes = figure.subplots()
    tops = []
    for number, group in enumerate(groups):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        tops += _draw_group(axes, group, color=colour, linestyle=style)
    for (label, loss), style in zip(baselines(groups), ("--", (0, (2, 2))), strict=False):
        axes.axhline(loss, color="black", linewidth=1, linestyle=style, label=label)
        tops.append(loss)
    lowest = axes.dataLim.y0
    if tops and max(tops) > lowest:
        axes.set_ylim(lowest - 0.05 * (max(tops) - lowest), max(tops) + 0.05 * (max(tops) - lowest))
    axes.set(xlabel="tokens of training", ylabel=f"held-out loss, {unit(groups[0].runs[0])}")
    lines = "thick: mean of the seeds, thin: one seed" if any(len(group.runs) > 1 for group in groups) else ""
    axes.set_title("\n".join(filter(None, (groups[0].runs[0].asked, lines))), fontsize=10)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, fontsize=9)
    return figure


def _draw_group(axes: Axes, group: Group, **style) -> list[float]:
    """A thin line for each seed, a thick one for their mean; returns each seed's loss where the picture begins."""
    curves = [curve for run in group.runs if len(curve := _curve(run))]
    name = f"{group.name}: {group.label}"
    for curve in curves:
        axes.plot(*curve.T, linewidth=0.8, alpha=0.7, **style)
    if curves and len({len(curve) for curve in curves}) == 1:
        axes.plot(*np.mean(curves, axis=0).T, linewidth=2, label=name, **style)
    else:  # a run that is not finished: no mean
        axes.plot([], [], linewidth=2, label=name, **style)
    return [curve[int(SHOWN_FROM * len(curve)), 1] for curve in curves]


def _curve(run: Run) -> np.ndarray:
    """(tokens, loss) of each evaluation, float64 [evaluations, 2]; finite ones."""
    points = [(row.get("tokens", 0), row[run.key]) for row in run.evaluations if run.key in row]
    curve = np.array(points, dtype=np.float64).reshape(-1, 2)
    return curve[np.isfinite(curve).all(1)]
