"""Where each figure of a long run stops growing, and whether the held-out loss predicts the others.

python -m benchmarks.saturation RUN [RUN ...] [--output table.md]

RUN: output directories of the train scripts with --do_eval, --eval_steps and --eval_downstream_steps. Runs that differ
in the seed alone are one group. At a constant rate a figure wanders from one evaluation to the next: the tables have
its means over eighths of the longest run, the same steps for all groups. --output: the tables, and a picture of all
curves beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from benchmarks.measuring import publish, where_measured
from common.cli import UserError, run
from common.figures import TWO_COLUMNS, figure_style, save_figure, series_style
from extras.compare.runs import Group, group_runs, read_run

PARTS = 8  # of the longest run, of equal steps
REACHED = 0.95  # of the gain from the first part to the best one
LOSS = "eval_loss_masked"
# Of `metrics.jsonl`: how names begin and end. Losses fall, all else grows.
FIGURES = (
    ("eval_loss_masked", ""),
    ("eval_contacts_", "_p_at_l"),
    ("eval_mutations_", ""),
    ("eval_probe_", "_spearman"),
)
NO_FIGURE = ("_nearest_p_at_l", "_chance", "_baseline_spearman")
# What does as much without a model: a figure's end, its baseline's.
BASELINES = (
    ("eval_loss_masked", "eval_neighbours_loss_masked"),
    ("_p_at_l", "_nearest_p_at_l"),
    ("_spearman", "_baseline_spearman"),
)
PANELS_IN_A_ROW = 3


class Growth(NamedTuple):
    """parts: means [parts] over the evaluations of each part, and over seeds; seeds: standard deviation between seeds
    of the last part's mean, NaN of one; reached: index of the first part with 95 % of the gain, 0 of none; by_loss,
    by_step: Spearman's correlation over all evaluations with the loss's fall, with the number of steps."""

    parts: np.ndarray
    seeds: float
    reached: int
    by_loss: float
    by_step: float


def names_of(rows: Sequence[dict]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        name
        for begin, end in FIGURES
        for name in names
        if name.startswith(begin) and name.endswith(end) and not name.endswith(NO_FIGURE)
    ]


def baseline(group: Group, name: str) -> float:
    """NaN of a figure that has none."""
    rows = [row for run in group.runs for row in run.evaluations if name in row]
    for end, instead in BASELINES:
        if name.endswith(end):
            return float(rows[-1].get(name.removesuffix(end) + instead, np.nan))
    return float("nan")


def curves(group: Group, name: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(steps [evaluations], values and losses [seeds, evaluations]) of the evaluations that all seeds have."""
    of = [{row["step"]: (row[name], row[LOSS]) for row in run.evaluations if name in row} for run in group.runs]
    steps = sorted(set.intersection(*map(set, of)))
    values, losses = (
        np.array([[each[step] for step in steps] for each in of]).reshape(len(of), -1, 2).transpose(2, 0, 1)
    )
    return steps, values, losses


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's; NaN where one of them stands still."""
    return float(spearmanr(a, b).statistic) if np.ptp(a) > 0 and np.ptp(b) > 0 else float("nan")


def growth(steps: Sequence[int], values: np.ndarray, losses: np.ndarray, ends: Sequence[float], falls: bool) -> Growth:
    """steps [evaluations]; values, losses [seeds, evaluations]; ends: last steps of the parts, each of which has an
    evaluation; falls: lower is better."""
    part = np.searchsorted(ends, steps)
    means = np.stack([values[:, part == number].mean(1) for number in range(len(ends))], 1)
    parts = means.mean(0)
    upward = -parts if falls else parts
    gained = (upward - upward[0]) / max(upward.max() - upward[0], 1e-12)
    seeds = float(means[:, -1].std(ddof=1)) if len(values) > 1 else float("nan")
    curve, loss = values.mean(0) * (-1 if falls else 1), losses.mean(0)
    correlations = rank_correlation(curve, -loss), rank_correlation(curve, np.asarray(steps))
    return Growth(parts, seeds, int(np.argmax(gained >= REACHED)), *correlations)


def last_evaluation(group: Group) -> int:
    return curves(group, LOSS)[0][-1]


def table(group: Group, longest: int) -> list[str]:
    """longest: the last step of the longest group; a shorter one has fewer parts, its last one may be shorter."""
    names = names_of([row for run in group.runs for row in run.evaluations])
    last = last_evaluation(group)
    ends = [end for end in np.linspace(0, longest, PARTS + 1)[1:] if end < last] + [last]
    titles = ["figure", "without a model", *(f"to {end:,.0f}" for end in ends), "±"]
    titles += [f"{REACHED:.0%} of the gain by", "by loss", "by step"]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'--:|' * (len(titles) - 1)}"]
    for name in names:
        steps, values, losses = curves(group, name)
        if set(np.searchsorted(ends, steps)) != set(range(len(ends))):
            every = f"each {longest / PARTS:,.0f} steps, an eighth of the longest run"
            raise UserError(f"{group.runs[0].path}: {name}: {every}, need an evaluation")
        grown = growth(steps, values, losses, ends, name == LOSS)
        figures = baseline(group, name), *grown.parts, grown.seeds
        cells = ["–" if np.isnan(each) else f"{each:.4f}" for each in figures]
        cells += [f"{ends[grown.reached]:,.0f}" if grown.reached else "–"]
        cells += ["–" if np.isnan(each) else f"{each:+.2f}" for each in (grown.by_loss, grown.by_step)]
        lines.append(f"| {name.removeprefix('eval_')} | {' | '.join(cells)} |")
    return lines


def draw(groups: Sequence[Group], path: Path) -> None:
    """A panel for each figure: thin lines are seeds, thick ones their means, dotted ones need no model."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    names = names_of([row for group in groups for run in group.runs for row in run.evaluations])
    rows = -(-len(names) // PANELS_IN_A_ROW)
    with figure_style():
        figure = Figure(figsize=(TWO_COLUMNS, 0.27 * rows * TWO_COLUMNS), layout="constrained")
        panels = figure.subplots(rows, PANELS_IN_A_ROW, squeeze=False, sharex=True).ravel()
        for axes, name in zip(panels, names, strict=False):
            for number, group in enumerate(groups):
                steps, values, _ = curves(group, name)
                style = series_style(number)
                axes.plot(steps, values.T, linewidth=0.5, alpha=0.7, **style)
                axes.plot(steps, values.mean(0), linewidth=1.5, label=group.label, **style)
            axes.axhline(baseline(groups[0], name), color="black", linewidth=0.8, linestyle=":")
            axes.set_title(name.removeprefix("eval_"))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.grid(visible=True)
        for axes in panels[len(names) :]:
            axes.set_axis_off()
        figure.supxlabel("steps")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--output")
    args = parser.parse_args()
    lines = ["# Where figures stop growing", "", *where_measured("benchmarks.saturation", "torch"), ""]
    lines += [
        "Without a model: hidden residues by their neighbours, contacts nearest in the chain first, probes of residue",
        "counts. To a step: mean over the evaluations since the step before it and over seeds; ±: standard deviation",
        "between seeds in the last column. Gain: from the first column to the best. By loss, by step: Spearman's",
        f"correlation of a figure with the fall of {LOSS} and with the number of steps, over all evaluations,",
        "which are no independent draws: a loss that says only how long a run went on does no better than the step.",
    ]
    groups = group_runs([read_run(Path(each)) for each in args.runs])
    longest = max(map(last_evaluation, groups))
    for group in groups:
        tokens = ", ".join(f"{each:,.0f}" for each in group.lasts("tokens"))
        lines += [
            "",
            f"## {group.label}",
            "",
            f"Seeds {', '.join(str(r.seed) for r in group.runs)}; tokens: {tokens}.",
            "",
        ]
        lines += table(group, longest)
    if args.output:
        draw(groups, Path(args.output).with_suffix(""))
    publish("\n".join(lines), args.output)


if __name__ == "__main__":
    run(main)
