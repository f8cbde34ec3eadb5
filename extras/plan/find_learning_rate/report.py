"""What a search for a learning rate found: a table, advice and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.figures import COLOURS, LINES, SEQUENTIAL, TWO_COLUMNS, figure_style, save_figure
from common.training.curves import moving_average
from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.plan.find_learning_rate.trials import Trial, best_of, flat_within, last_part, recommended

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNED = 0.05  # nats below the unigram predictor: a trial has learned more than residue frequencies


@dataclass(frozen=True)
class Found:
    """start, baseline: held-out loss of the starting weights and of the unigram predictor, None if unknown; proteins:
    {rate: losses of the held-out proteins}, of rate 0 those of the starting weights."""

    trials: list[Trial]
    start: float | None = None
    baseline: float | None = None
    proteins: Mapping[float, ProteinLosses] = field(default_factory=dict)

    @property
    def in_order(self) -> list[Trial]:
        return sorted(self.trials, key=lambda trial: trial.learning_rate)

    def above(self, rate: float, other: float) -> tuple[float, float] | None:
        """How far the loss at one rate is above that at another, and the standard error, paired over proteins; None
        if any of it is unknown."""
        if not {rate, other} <= self.proteins.keys():
            return None
        one, two = self.proteins[rate], self.proteins[other]
        mean, error = mean_and_error(one.loss_sum - two.loss_sum, one.masked, one.clusters)
        return (mean, error) if math.isfinite(error) else None


def line(trial: Trial) -> str:
    losses = "diverged" if trial.diverged else f"training loss {trial.train_loss:.4f}"
    held_out = "" if trial.eval_loss is None else f", held-out loss {trial.eval_loss:.4f}"
    return f"Learning rate {trial.learning_rate:g}: {losses}{held_out}"


def table(found: Found) -> list[str]:
    """Markdown; the starting weights first, then the lowest rate."""
    longest = max(len(trial.losses) for trial in found.trials)
    first, best = longest - last_part(longest) + 1, best_of(found.trials)
    lines = [
        f"| learning rate | training loss, steps {first} to {longest} | held-out loss | below the start | "
        "above the best |",
        "|--:|--:|--:|--:|--:|",
    ]
    if found.start is not None and best:
        above = _signed(found.above(0.0, best.learning_rate), found.start - best.loss)
        lines.append(f"| start | | {found.start:.4f} | | {above} |")
    for trial in found.in_order:
        if trial.diverged or best is None:
            lines.append(f"| {trial.learning_rate:g} | diverged after {len(trial.losses)} steps | | | |")
            continue
        held_out = below = ""
        if trial.eval_loss is not None:
            held_out = f"{trial.eval_loss:.4f}"
            if found.start is not None:
                below = _signed(found.above(0.0, trial.learning_rate), found.start - trial.eval_loss)
        above = _signed(found.above(trial.learning_rate, best.learning_rate), trial.loss - best.loss)
        above = "0" if trial is best else above
        lines.append(f"| {trial.learning_rate:g} | {trial.train_loss:.4f} | {held_out} | {below} | {above} |")
    return lines


def _signed(paired: tuple[float, float] | None, difference: float) -> str:
    return f"{difference:.4f}" if paired is None else f"{paired[0]:.4f} ± {paired[1]:.4f}"


def advice(found: Found, total_steps: int | None, unfinished: bool) -> list[str]:
    """What to pass, and how far that is known."""
    trials, best = found.trials, best_of(found.trials)
    chosen, flat = recommended(trials, found.start), flat_within(trials, found.start)
    if chosen is None or best is None:
        return ["Every trial diverged: no recommendation."]
    steps = max(len(trial.losses) for trial in trials)
    by = "training" if chosen.eval_loss is None else "held-out"
    lines = [f"Recommended: --learning_rate {chosen.learning_rate:g}"]
    lines.append(
        f"The lowest rate with a {by} loss within {flat:.2g} nats of the best ({best.learning_rate:g}), in "
        f"{len(trials)} trials of {steps} steps ({chosen.tokens:,} tokens), each with one seed."
    )
    lines += _not_better_than_start(found, best) + _not_told_apart(found, best)
    if total_steps and total_steps > steps:
        share = f"{100 * steps / total_steps:.2g} %"
        lines.append(f"They saw {share} of the run's {total_steps:,} steps: the best rate depends on the length.")
    if found.baseline is not None and best.loss > found.baseline - LEARNED:
        lines.append(
            f"Too short to tell: no trial is {LEARNED} nats below the unigram predictor ({found.baseline:.4f}), so "
            "the losses show how soon residue frequencies are learned. Raise --find_steps."
        )
    rates = [trial.learning_rate for trial in trials]
    if best.learning_rate == max(rates) or chosen.learning_rate == min(rates):
        lines.append(
            "Not complete: rates beyond those of the table may be better. "
            + ("The same command continues the search (--find_minutes)." if unfinished else "Start from another rate.")
        )
    return lines


def _not_better_than_start(found: Found, best: Trial) -> list[str]:
    if (paired := found.above(0.0, best.learning_rate)) is None or paired[0] > 2 * paired[1]:
        return []
    return [
        f"No rate is better than the starting weights: the best by {paired[0]:.4f} ± {paired[1]:.4f} nats. Raise "
        "--find_steps, or look at the data."
    ]


def _not_told_apart(found: Found, best: Trial) -> list[str]:
    """The rates whose difference from the best is within two standard errors, over proteins."""
    same = [
        f"{trial.learning_rate:g}"
        for trial in found.in_order
        if trial is not best
        and (paired := found.above(trial.learning_rate, best.learning_rate)) is not None
        and paired[0] <= 2 * paired[1]
    ]
    return [f"Not told apart from the best, by two standard errors over proteins: {', '.join(same)}."] if same else []


def draw(found: Found, path: Path) -> None:
    """The trials' training losses over the steps, and the loss over the learning rate. path: without a suffix."""
    with figure_style():
        figure = figure_of(found)
    save_figure(figure, path)


def figure_of(found: Found) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(TWO_COLUMNS, 0.42 * TWO_COLUMNS), layout="constrained")
    curves, rates = figure.subplots(1, 2)
    colours = colormaps[SEQUENTIAL]
    for number, trial in enumerate(found.in_order):
        label = f"{trial.learning_rate:g}{' (diverged)' * trial.diverged}"
        # From dark to light up to 0.9: the map's end is faint on white. Neighbours have other lines.
        colour, dashes = colours(0.9 * number / max(1, len(found.trials) - 1)), LINES[number % len(LINES)]
        steps = range(1, len(trial.losses) + 1)
        curves.plot(steps, moving_average(trial.losses), label=label, color=colour, linestyle=dashes)
    curves.set_title("Training loss by learning rate, smoothed", y=1.0)
    curves.set_xlabel("step")
    curves.set_ylabel("nats")
    best, chosen = best_of(found.trials), recommended(found.trials, found.start)
    trained = [trial for trial in found.in_order if not trial.diverged]
    held_out = [trial for trial in trained if trial.eval_loss is not None]
    if trained:
        xs, ys = zip(*((trial.learning_rate, trial.train_loss) for trial in trained), strict=True)
        rates.plot(xs, ys, "s-", color="0.6", label="training, last part")
    if held_out:
        errors = (
            [(found.above(t.learning_rate, best.learning_rate) or (0.0, 0.0))[1] for t in held_out] if best else []
        )
        xs, ys = zip(*((trial.learning_rate, trial.eval_loss) for trial in held_out), strict=True)
        label = "held-out, ± of the difference\nfrom the best"
        rates.errorbar(xs, ys, errors, fmt="o-", capsize=2, color=COLOURS[3], label=label)
    if best and chosen:
        top = best.loss + flat_within(found.trials, found.start)
        rates.axhspan(best.loss, top, color="0.9", label="as good as the best")
        rates.axvline(chosen.learning_rate, color=COLOURS[2], linestyle="--", label="recommended")
        losses = [trial.loss for trial in trained]
        if found.start is not None and found.start - max(losses) < max(losses) - min(losses):  # else far above
            rates.axhline(found.start, color="black", linestyle=":", linewidth=1, label="starting weights")
    rates.set_xscale("log")
    rates.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    rates.xaxis.set_major_formatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-"))
    rates.xaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
    rates.xaxis.set_minor_formatter(NullFormatter())
    rates.set_title("Loss of the trials", y=1.0)
    rates.set_xlabel("learning rate")
    for axis in (curves, rates):
        axis.grid(visible=True)
        if axis.lines:  # no trial has a loss if all diverged
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), borderaxespad=0, ncols=3, handlelength=3)
    return figure
