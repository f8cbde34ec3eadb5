"""Held-out loss over tokens, a colour and a line style a group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from common.figures import TWO_COLUMNS, FigureFlags, figure_style, save_figure, series_style
from extras.compare.runs import Group, Run, baselines, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE_LINES = ((0, (8, 2)), (0, (8, 2, 1, 2, 1, 2)))  # no group's
LABEL_WIDTH = 45  # characters
SHOWN_FROM = 0.25  # of a run's evaluations on, the whole curve lies in the picture: losses fall steeply before


def draw(groups: Sequence[Group], path: Path, flags: FigureFlags) -> list[Path]:
    """path: without a suffix."""
    with figure_style():
        figure = figure_of(groups)
    return save_figure(figure, path, flags)


def figure_of(groups: Sequence[Group]) -> Figure:
    """The legend lies beside the axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(TWO_COLUMNS, 0.55 * TWO_COLUMNS), layout="constrained")
    axes = figure.subplots()
    tops = []
    for number, group in enumerate(groups):
        tops += _draw_group(axes, group, **series_style(number))
    for (label, loss), style in zip(baselines(groups), BASELINE_LINES, strict=False):
        axes.axhline(loss, color="black", linewidth=1, linestyle=style, label=label)
        tops.append(loss)
    lowest = axes.dataLim.y0
    if tops and max(tops) > lowest:
        axes.set_ylim(lowest - 0.05 * (max(tops) - lowest), max(tops) + 0.05 * (max(tops) - lowest))
    axes.set(xlabel="tokens of training", ylabel=f"held-out loss, {unit(groups[0].runs[0])}")
    lines = "thick: mean of the seeds, thin: one seed" if any(len(group.runs) > 1 for group in groups) else ""
    axes.set_title("\n".join(filter(None, (groups[0].runs[0].asked, lines))))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(visible=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, handlelength=3)
    return figure


def _draw_group(axes: Axes, group: Group, **style) -> list[float]:
    """A thin line for each seed, a thick one for their mean; returns each seed's loss where the picture begins."""
    curves = [curve for run in group.runs if len(curve := _curve(run))]
    name = fill(f"{group.name}: {group.label}", LABEL_WIDTH, subsequent_indent="    ")
    for curve in curves:
        axes.plot(*curve.T, linewidth=0.5, alpha=0.7, **style)
    if curves and len({len(curve) for curve in curves}) == 1:
        axes.plot(*np.mean(curves, axis=0).T, linewidth=1.5, label=name, **style)
    else:  # a run that is not finished: no mean
        axes.plot([], [], linewidth=1.5, label=name, **style)
    return [curve[int(SHOWN_FROM * len(curve)), 1] for curve in curves]


def _curve(run: Run) -> np.ndarray:
    """(tokens, loss) of each evaluation, float64 [evaluations, 2]; finite ones."""
    points = [(row.get("tokens", 0), row[run.key]) for row in run.evaluations if run.key in row]
    curve = np.array(points, dtype=np.float64).reshape(-1, 2)
    return curve[np.isfinite(curve).all(1)]
