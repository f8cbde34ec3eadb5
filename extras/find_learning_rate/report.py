"""What a search for a learning rate found: a table, advice and a picture."""

from __future__ import annotations

from pathlib import Path

from common.files.json_files import replace_flushed
from extras.curves import moving_average
from extras.find_learning_rate.trials import FLAT, Trial, best_of, last_part, recommended

LEARNED = 0.05  # nats below the unigram predictor: a trial has learned more than residue frequencies


def line(trial: Trial) -> str:
    losses = "diverged" if trial.diverged else f"training loss {trial.train_loss:.4f}"
    held_out = "" if trial.eval_loss is None else f", held-out loss {trial.eval_loss:.4f}"
    return f"Learning rate {trial.learning_rate:g}: {losses}{held_out}"


def table(trials: list[Trial]) -> list[str]:
    """Markdown; the lowest rate first."""
    longest = max(len(trial.losses) for trial in trials)
    first = longest - last_part(longest) + 1
    lines = [f"| learning rate | training loss, steps {first} to {longest} | held-out loss | above the best |"]
    lines.append("|--:|--:|--:|--:|")
    best = best_of(trials)
    for trial in sorted(trials, key=lambda trial: trial.learning_rate):
        held_out = "" if trial.eval_loss is None else f"{trial.eval_loss:.4f}"
        train, above = f"{trial.train_loss:.4f}", f"{trial.loss - best.loss:.4f}" if best else ""
        if trial.diverged:
            train, above = f"diverged after {len(trial.losses)} steps", ""
        lines.append(f"| {trial.learning_rate:g} | {train} | {held_out} | {above} |")
    return lines


def advice(trials: list[Trial], total_steps: int | None, baseline: float | None, unfinished: bool) -> list[str]:
    """What to pass, and how far that is known. baseline: held-out loss of the unigram predictor, if there is one."""
    chosen, best = recommended(trials), best_of(trials)
    if chosen is None or best is None:
        return ["Every trial diverged: no recommendation."]
    steps = max(len(trial.losses) for trial in trials)
    by = "training" if chosen.eval_loss is None else "held-out"
    lines = [f"Recommended: --learning_rate {chosen.learning_rate:g}"]
    lines.append(
        f"The lowest rate with a {by} loss within {FLAT} nats of the best ({best.learning_rate:g}), in "
        f"{len(trials)} trials of {steps} steps ({chosen.tokens:,} tokens), each with one seed."
    )
    if total_steps and total_steps > steps:
        share = f"{100 * steps / total_steps:.2g} %"
        lines.append(f"They saw {share} of the run's {total_steps:,} steps: the best rate depends on the length.")
    if baseline is not None and best.loss > baseline - LEARNED:
        lines.append(
            f"Too short to tell: no trial is {LEARNED} nats below the unigram predictor ({baseline:.4f}), so the "
            "losses show how soon residue frequencies are learned. Raise --find_steps."
        )
    rates = [trial.learning_rate for trial in trials]
    if best.learning_rate == max(rates) or chosen.learning_rate == min(rates):
        lines.append(
            "Not complete: rates beyond those of the table may be better. "
            + ("The same command continues the search (--find_minutes)." if unfinished else "Start from another rate.")
        )
    return lines


def draw(trials: list[Trial], path: Path) -> None:
    """The trials' training losses over the steps, and the loss over the learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6))
    curves, rates = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.92, bottom=0.12, wspace=0.2)
    ordered = sorted(trials, key=lambda trial: trial.learning_rate)
    for trial in ordered:
        label = f"{trial.learning_rate:g}{' (diverged)' * trial.diverged}"
        curves.plot(range(1, len(trial.losses) + 1), moving_average(trial.losses), linewidth=1, label=label)
    curves.set_title("Training loss by learning rate, smoothed", y=1.0)
    curves.set_xlabel("step")
    curves.set_ylabel("nats")
    curves.legend(fontsize=8)
    best, chosen = best_of(trials), recommended(trials)
    trained = [trial for trial in ordered if not trial.diverged]
    for name, losses in (
        ("training, last part", [trial.train_loss for trial in trained]),
        ("held-out", [trial.eval_loss for trial in trained if trial.eval_loss is not None]),
    ):
        if losses:
            rates.plot([trial.learning_rate for trial in trained], losses, "o-", markersize=4, label=name)
    if best and chosen:
        rates.axhspan(best.loss, best.loss + FLAT, color="0.9", label=f"within {FLAT} nats of the best")
        rates.axvline(chosen.learning_rate, color="tab:green", linestyle="--", label="recommended")
        rates.legend(fontsize=8)
    rates.set_xscale("log")
    rates.set_xticks([trial.learning_rate for trial in ordered], [f"{trial.learning_rate:g}" for trial in ordered])
    rates.minorticks_off()
    rates.set_title("Loss of the trials", y=1.0)
    rates.set_xlabel("learning rate")
    for axis in (curves, rates):
        axis.grid(alpha=0.3)
    with replace_flushed(path) as file:
        figure.savefig(file, dpi=120, format="png")
