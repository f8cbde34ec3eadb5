"""training_curves.png: a run's loss, learning rate, gradient norm and speed, drawn from its output directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from common.cli import UserError
from common.figures import COLOURS, DEFAULT, MARKERS, TWO_COLUMNS, FigureFlags, figure_style, save_figure
from common.files.runs import BASELINES, METRICS, read_run_info
from common.files.safe_files import read_json_lines
from common.training.verdict import held_out_key, held_out_prefixes

BLUE, ORANGE, GREEN, *OTHERS = COLOURS
CURVES = "training_curves"
LABELS, LEGEND_COLUMNS = 6, 3  # of the legend, without the held-out sets
FEW = 50  # rows: up to here points are drawn, too


class PlotLabels(NamedTuple):
    """A task's labels in the plot of the loss; the defaults are masked language modelling's."""

    loss: str = "Masked-language-modelling loss"
    unit: str = "nats per residue"
    held_out: str = "held-out proteins, hidden residues"
    baseline: str = "the same, by residue frequencies"
    neighbours: str = "the same, by their neighbours"
    training: str = "training, all selected residues"


def draw_curves(output_dir: Path, flags: FigureFlags = DEFAULT) -> list[Path]:
    """Draw the curves over the steps. Returns the files, or [] if no training step was logged."""
    from matplotlib.figure import Figure

    rows = read_json_lines(output_dir / METRICS)
    trained = [r for r in rows if "loss" in r]
    if not trained:
        return []
    results, info = read_results(output_dir), read_run_info(output_dir)
    labels = PlotLabels(*info.get("words", ()))
    with figure_style():
        # Fixed margins: a layout engine draws everything several times, which takes longer than a short run.
        figure = Figure(figsize=(TWO_COLUMNS, 0.7 * TWO_COLUMNS))
        axes = figure.subplots(2, 2)
        held_out = held_out_prefixes((*rows, results))
        bottom = 0.095 + 0.027 * math.ceil((LABELS + len(held_out)) / LEGEND_COLUMNS)
        figure.subplots_adjust(left=0.065, right=0.985, top=0.88, bottom=bottom, wspace=0.36, hspace=0.45)
        figure.suptitle(_title(info, rows), x=0.065, ha="left")
        loss, rate, norm, speed = axes.flat
        _draw_loss(loss, rows, trained, results, labels)
        for axis, key, title, unit in (
            (rate, "learning_rate", "Learning rate", ""),
            (norm, "grad_norm", "Gradient norm before clipping", ""),
            (speed, "tokens_per_second", "Speed", "tokens/s, without padding"),
        ):
            points = [(r["step"], r[key]) for r in rows if key in r]
            axis.plot(*zip(*points, strict=True), color=BLUE, linewidth=0.8, marker=_marker(points))
            axis.set_title(title, y=1.0)
            axis.set_ylabel(unit)
            axis.set_ylim(bottom=0)
        last = rows[-1]["step"]
        for axis in axes.flat:
            axis.set_xlabel("step")
            axis.set_xlim(0, last * 1.02)
            axis.grid(visible=True)
            for n, step in enumerate(step for step in info.get("starts", ()) if 1 < step <= last):
                label = "resumed" if n == 0 and axis is loss else None
                axis.axvline(step - 0.5, color=GREEN, linestyle="-.", linewidth=0.8, label=label)
        below = {"bbox_to_anchor": (0.5, 0.005), "bbox_transform": figure.transFigure, "loc": "lower center"}
        loss.legend(ncols=LEGEND_COLUMNS, **below)
    return save_figure(figure, output_dir / CURVES, flags)


def _draw_loss(loss, rows: list[dict], trained: list[dict], results: dict, labels: PlotLabels) -> None:
    """Loss in nats on the left axis, perplexity on the right."""
    steps, values = [r["step"] for r in trained], [r["loss"] for r in trained]
    loss.plot(steps, values, color="0.75", linewidth=0.6, marker=_marker(steps), label=f"{labels.training}")
    loss.plot(steps, moving_average(values), color=BLUE, label="smoothed")
    for number, prefix in enumerate(held_out_prefixes((*rows, results))):
        style = {"color": OTHERS[number % len(OTHERS)], "marker": MARKERS[number % len(MARKERS)]}
        _draw_held_out(loss, rows, results, labels, prefix, style)
    skipped, before = [], 0
    for row in rows:
        if row.get("skipped_steps", before) > before:
            before = row["skipped_steps"]
            skipped.append(row["step"])
    if skipped:
        loss.plot(skipped, [0.02] * len(skipped), "^", color=ORANGE, markersize=4.5, label="steps skipped before",
                  transform=loss.get_xaxis_transform(), clip_on=False)  # fmt: skip
    loss.set_title(labels.loss, y=1.0)  # a fixed y saves a layout pass over the ticks
    loss.set_ylabel(labels.unit)
    perplexity = loss.secondary_yaxis("right", functions=(lambda nats: nats, lambda nats: nats))
    perplexity.yaxis.set_major_formatter(lambda nats, _: f"{math.exp(min(nats, 700)):.3g}")
    perplexity.set_ylabel("perplexity")


def _draw_held_out(loss, rows: list[dict], results: dict, labels: PlotLabels, prefix: str, style: dict) -> None:
    """The loss on a held-out set, and of what it is compared with on the validation split."""
    key = held_out_key((*rows, results), prefix)
    held_out = {r["step"]: r[key] for r in rows if key in r}
    if key in results:  # the evaluation after the last step is not in metrics.jsonl
        held_out[results.get("best_global_step", rows[-1]["step"])] = results[key]
    if held_out:
        name = labels.held_out + ("" if prefix == "eval" else f" of {prefix.removeprefix('eval_')}")
        points = sorted(held_out.items())
        loss.plot(*zip(*points, strict=True), label=name, **style)
    styles = zip(BASELINES, (labels.baseline, labels.neighbours), ("--", ":"), strict=True)
    for (name, _), label, dashes in styles if prefix == "eval" else ():
        field = f"eval_{name}_loss{key.removeprefix('eval_loss')}"
        if (value := next((each[field] for each in (results, *rows) if field in each), None)) is not None:
            loss.axhline(value, color="black", linestyle=dashes, linewidth=0.8, label=label)


def _title(info: dict, rows: list[dict]) -> str:
    last = rows[-1]
    progress = [f"step {last['step']:,}" + (f" of {last['total_steps']:,}" if "total_steps" in last else "")]
    progress += [f"{last['tokens']:,} tokens"] if "tokens" in last else []
    progress += [f"{last['epoch']:.2f} epochs"] if last.get("epoch") is not None else []
    run = [info[key] for key in ("model", "data", "device") if info.get(key)]
    return "\n".join(filter(None, ["   ".join(run), "   ".join(progress)]))


def _marker(points: list) -> str:
    return "." if len(points) <= FEW else ""


def read_results(output_dir: Path) -> dict:
    """all_results.json; {} if it is missing. UserError if it is damaged."""
    path = output_dir / "all_results.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path}: damaged, {error}: the run's command writes it again") from error


def moving_average(values: list[float]) -> list[float]:
    """Bias-corrected exponential moving average; the decay is lower where there are few values."""
    weight = min(0.9, max(0.0, 1 - 10 / max(len(values), 1)))
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total)
    return out
