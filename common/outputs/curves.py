"""The picture of a run, from the files it left: training_curves.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from common.files.json_files import read_json_lines


class Words(NamedTuple):
    """How a task's loss is called, its unit, and what is held out."""

    loss: str = "Masked-language-modelling loss"
    unit: str = "nats per masked residue"
    held_out: str = "held-out proteins"


ESM2 = Words()


def draw_curves(output_dir: Path, words: Words = ESM2) -> Path | None:
    """Loss (training, held-out, unigram), learning rate, gradient norm and speed over the steps; None without rows."""
    from matplotlib.figure import Figure

    rows = read_json_lines(output_dir / "metrics.jsonl")
    trained = [r for r in rows if "loss" in r]
    if not trained:
        return None
    results = read_results(output_dir)
    held_out = {r["step"]: r["eval_loss"] for r in rows if "eval_loss" in r}
    if "eval_loss" in results:  # the evaluation at the end is no row
        held_out[rows[-1]["step"]] = results["eval_loss"]
    unigram = results.get("eval_unigram_loss")
    steps = [r["step"] for r in trained]
    # Fixed margins: a layout engine draws everything many times over, most of the time that a short run takes.
    figure = Figure(figsize=(11, 7))
    axes = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.07, right=0.985, top=0.95, bottom=0.07, wspace=0.2, hspace=0.28)
    loss, rate, norm, speed = axes.flat
    loss.plot(steps, [r["loss"] for r in trained], color="0.75", linewidth=0.8, label="training, mean of each row")
    loss.plot(steps, _smoothed([r["loss"] for r in trained]), color="tab:blue", label="training, smoothed")
    if held_out:
        loss.plot(held_out.keys(), held_out.values(), "o-", color="tab:red", markersize=4, label=words.held_out)
    if unigram is not None:
        loss.axhline(unigram, color="black", linestyle="--", linewidth=1, label="unigram predictor, held-out")
    loss.set_title(words.loss, y=1.0)  # given y, it is not looked for among the ticks
    loss.set_ylabel(words.unit)
    loss.legend(fontsize=8)
    for axis, key, title, unit in (
        (rate, "learning_rate", "Learning rate", ""),
        (norm, "grad_norm", "Gradient norm before clipping", ""),
        (speed, "tokens_per_second", "Speed", "tokens/s, without padding"),
    ):
        axis.plot(*zip(*((r["step"], r[key]) for r in rows if key in r), strict=True), color="tab:blue", linewidth=1)
        axis.set_title(title, y=1.0)
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    path = output_dir / "training_curves.png"
    figure.savefig(path.with_suffix(".partial.png"), dpi=120)
    path.with_suffix(".partial.png").replace(path)
    return path


def read_results(output_dir: Path) -> dict:
    """all_results.json; {} where there is none."""
    path = output_dir / "all_results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _smoothed(values: list[float]) -> list[float]:
    """Exponential moving average, its start corrected for having no past; over fewer values it forgets sooner."""
    weight = min(0.9, max(0.0, 1 - 10 / max(len(values), 1)))
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total)
    return out
