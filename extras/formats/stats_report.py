"""Heat maps of --quant_stats: layers down, tensors across, how much underflows and how large the error is.

python -m extras.formats.stats_report DIR [STEP] [--figure_format png svg pdf] [--dpi N]

DIR: with quant_stats.jsonl; STEP: else the last one logged. Draws DIR/quant_stats.png. The error is relative, the mean
squared error over the tensor's mean square, where the log has `mean` and `std`: gradients and weights then fit on one
scale.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from common.cli import UserError, run
from common.figures import DEFAULT, SEQUENTIAL, TWO_COLUMNS, FigureFlags, figure_style, save_figure
from common.files.safe_files import read_json_lines
from extras.command_line import words_and_flags
from extras.formats.stats import GEMMS
from extras.formats.stats_plan import FILE, MODULES, OPERANDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROGRAM = "python -m extras.formats.stats_report"
PICTURE = "quant_stats"
COLUMN, ROW = 0.12, 0.14  # inches of a cell, at least
Cell = tuple[int, str]  # layer, name of the column
ANNOTATED_LAYERS, ANNOTATED_COLUMNS = 12, 26  # with more, numbers would not be read in the cells


def cells(rows: list[dict], step: int) -> tuple[list[str], dict[str, dict[Cell, float]]]:
    """Columns, and for `underflows%` and `error` the value of each cell; cells that were not logged are missing."""
    rows = [row for row in rows if row["step"] == step and row["tensor"] in OPERANDS]
    found: dict[str, dict[Cell, float]] = {"underflows%": {}, "error": {}}
    split = {row["tensor"] for row in rows if len(row["gemms"]) == 1}
    columns = [
        column
        for module in MODULES
        for tensor in OPERANDS
        for column in (
            [f"{module} {tensor} {g}" for g in GEMMS[tensor]] if tensor in split else [f"{module} {tensor}"]
        )
    ]
    for row in rows:
        name = f"{row['module']} {row['tensor']}"
        for column in [f"{name} {gemm}" for gemm in row["gemms"]] if row["tensor"] in split else [name]:
            for kind, value in (("underflows%", row.get("underflows%")), ("error", error(row))):
                if value is not None:
                    found[kind][row["layer"], column] = value
    there = {column for of in found.values() for _, column in of}
    return [column for column in columns if column in there], found


def error(row: dict) -> float | None:
    """Mean squared error over mean square; without `mean` and `std` the former alone; None where there is neither."""
    if row.get("mse") is None:
        return None
    if row.get("mean") is None or row.get("std") is None:
        return row["mse"]
    square = row["mean"] ** 2 + row["std"] ** 2
    return row["mse"] / square if square > 0 else None


def draw(directory: Path, step: int | None = None, flags: FigureFlags = DEFAULT) -> list[Path]:
    """quant_stats.png, or of other formats, of a step. UserError where the log has no such step."""
    rows = [row for row in read_json_lines(directory / FILE) if "underflows%" in row or "mse" in row]
    if not rows:
        raise UserError(f"{directory}: no statistics there: {FILE} is missing or empty: train with --quant_stats")
    steps = sorted({row["step"] for row in rows})
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{directory / FILE}: no step {step}: it has {', '.join(map(str, steps[:10]))}, ...")
    with figure_style():
        figure = figure_of(rows, step)
    return save_figure(figure, directory / PICTURE, flags)


def figure_of(rows: list[dict], step: int) -> Figure:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    columns, found = cells(rows, step)
    formats = {row["layer"]: row["format"] for row in rows}
    layers = range(1, max(formats) + 1)
    relative = all(row.get("mean") is not None and row.get("std") is not None for row in rows)
    titles = {
        "underflows%": "Underflow: numbers that became zero, %",
        "error": "Mean squared error / mean square" if relative else "Mean squared error",
    }
    size = (max(TWO_COLUMNS, 1.5 + COLUMN * len(columns)), 1 + 2 * (0.4 + ROW * len(layers)))
    figure = Figure(figsize=size, layout="constrained")
    for axis, (kind, title) in zip(figure.subplots(2, 1, sharex=True), titles.items(), strict=True):
        grid = [[found[kind].get((layer, column), math.nan) for column in columns] for layer in layers]
        values = [v for v in found[kind].values() if v > 0] or [1.0]
        # At least 1 % and a factor of ten across the colours: what is small, or all the same, shall look so.
        under = Normalize(0, max(*values, 1.0))
        norm = under if kind == "underflows%" else LogNorm(min(values), max(*values, 10 * min(values)))
        colours = colormaps[SEQUENTIAL].with_extremes(bad="0.9", under="white")
        image = axis.imshow(grid, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axis, pad=0.01)
        axis.set(title=f"{title} (step {step})", ylabel="layer")
        axis.set_yticks(range(len(layers)), [f"{layer}  {formats.get(layer, 'not quantised')}" for layer in layers])
        axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor")
        for number in range(1, len(columns)):  # a line between the matmuls
            if columns[number].split()[0] != columns[number - 1].split()[0]:
                axis.axvline(number - 0.5, color="white", linewidth=2)
        if len(layers) <= ANNOTATED_LAYERS and len(columns) <= ANNOTATED_COLUMNS:
            for (layer, column), value in found[kind].items():
                is_percent = kind == "underflows%" and (value >= 0.01 or not value)
                text = f"{value:.2g}" if is_percent else f"{value:.0e}".replace("e-0", "e-")
                shade = "black" if norm(value) > 0.5 else "white"
                axis.text(columns.index(column), layer - 1, text, ha="center", va="center", color=shade, fontsize=5)
    return figure


def main() -> None:
    words, flags = words_and_flags(__doc__, PROGRAM, FigureFlags)
    if len(words) not in (1, 2) or not all(step.isdigit() for step in words[1:]):
        raise UserError(f"usage: {PROGRAM} DIR [STEP] [--figure_format png svg pdf] [--dpi N]")
    step = int(words[1]) if words[1:] else None
    print(*draw(Path(words[0]), step, flags), sep="\n")


if __name__ == "__main__":
    run(main)
