"""A comparison as text: what differs, a table of the groups, verdicts; Markdown and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.files.safe_files import replace_flushed, shorten
from extras.compare.paired import Difference, mean_over_seeds, verdict
from extras.compare.runs import Group, baselines, differences, unit, without_effect

NO_PAIRS = (
    "No paired error: the evaluation of a decoder keeps no losses per sequence, as its contexts are cut from one "
    "stream of text. Compare the rows by their spread over seeds."
)


def markdown(groups: Sequence[Group], paired: Mapping[str, Difference], smallest: float) -> str:
    """The whole comparison. paired: {group: difference from the first group}, of those that have one."""
    parts = [what_differs(groups), "\n".join(table(groups, paired)), legend(groups, paired)]
    if groups[0].runs[0].is_decoder:
        return "\n\n".join([*parts, NO_PAIRS]) + "\n"
    for group in groups[1:]:
        if group.name in paired:
            parts.append(verdict(groups[0], group, paired[group.name], smallest))
        else:
            parts.append(
                f"{group.name} and {groups[0].name}: no verdict: a run that is not finished has no losses of proteins."
            )
    return "\n\n".join(parts) + "\n"


def what_differs(groups: Sequence[Group]) -> str:
    """Flags, data, code and device of each group where they differ; what is the same in all, in a line."""
    different, settings = differences(groups), groups[0].settings
    unknown = [group.name for group in groups if not group.runs[0].state]
    blocks = [] if len(groups) < 2 or different or unknown else ["Nothing that the runs record differs."]
    if different:
        head = ["", *(group.name for group in groups)]
        rows = [[name, *map(_cell, values)] for name, values in different.items()]
        blocks.append("\n".join(aligned([head, *rows], left=len(head))))
    same = ("data", "code", "device") if not unknown else ()
    same = [f"{name} {settings.get(name, 'not recorded')}" for name in same if name not in different]
    lines = [f"The same in all: {'; '.join(same)}."] if same else []
    if unknown:
        lines.append(
            f"What differs is not known: {', '.join(unknown)} saved no checkpoint, which records flags and data."
        )
    if ignored := without_effect(groups):
        lines.append(f"Differs too, without effect on the losses: {', '.join(ignored)}.")
    return "\n\n".join([*blocks, *lines])


def _cell(value: Any) -> str:
    return "" if value is None else shorten(value).strip("'").replace("|", "\\|")


def table(groups: Sequence[Group], paired: Mapping[str, Difference]) -> list[str]:
    """A row for each group, then the baselines."""
    key, decoder = groups[0].runs[0].key, groups[0].runs[0].is_decoder
    head = ["", "run", "seeds", "tokens", "loss", "perplexity"]
    head += ["below " + groups[0].name, "± proteins", "± seeds"] if paired else []
    head += [] if decoder else ["loss, all"]
    rows = []
    for group in groups:
        values = group.lasts(key)
        mean, error = mean_over_seeds(values) if values else (math.nan, math.nan)
        tokens = group.lasts("tokens")
        cells = [group.name, group.label, str(len(group.runs)), f"{sum(tokens) / len(tokens):,.0f}" if tokens else ""]
        cells += [_with_error(mean, error), f"{_perplexity(mean):.3f}"]
        if paired:
            d = paired.get(group.name)
            cells += ["", "", ""] if d is None else [f"{d.mean:+.4f}", _number(d.over_proteins), _number(d.over_seeds)]
        rows.append(cells + ([] if decoder else [_with_error(*mean_over_seeds(group.lasts("eval_loss")))]))
    for name, loss in baselines(groups):
        cells = ["", name, "", "", f"{loss:.4f}", f"{_perplexity(loss):.3f}"]
        rows.append(cells + [""] * (len(head) - len(cells)))
    return list(aligned([head, *rows], left=2))


def legend(groups: Sequence[Group], paired: Mapping[str, Difference]) -> str:
    """What the columns of the table are."""
    run = groups[0].runs[0]
    text = f"Loss: {unit(run)}, over {run.asked}; mean of the seeds ± its standard error over seeds."
    if paired:
        text += f" Below {groups[0].name}: paired over the same residues and seeds, ± its standard errors over "
        text += f"{next(iter(paired.values())).unit} and over seeds; the verdict's counts both."
    return text if run.is_decoder else f"{text} Loss, all: of all selected residues (eval_loss)."


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """A Markdown table that is also read as it stands; the first `left` columns are text, the others numbers."""
    widths = [max(3, *(len(row[n]) for row in rows)) for n in range(len(rows[0]))]
    rule = ["-" * width if n < left else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
    for row in (rows[0], rule, *rows[1:]):
        cells = (f"{c:<{w}}" if n < left else f"{c:>{w}}" for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield f"| {' | '.join(cells)} |"


def write_csv(path: Path, groups: Sequence[Group], paired: Mapping[str, Difference], smallest: float) -> None:
    """A row for each group; all numbers in full."""
    key = groups[0].runs[0].key
    rows = []
    for group in groups:
        mean, error = mean_over_seeds(group.lasts(key)) if group.lasts(key) else (math.nan, math.nan)
        tokens = group.lasts("tokens")
        row: dict[str, Any] = {"group": group.name, "label": group.label}
        row |= {
            "runs": ";".join(str(run.path) for run in group.runs),
            "seeds": ";".join(str(r.seed) for r in group.runs),
        }
        row |= {"tokens": sum(tokens) / len(tokens) if tokens else "", key: mean, f"{key}_stderr_over_seeds": error}
        row |= {"perplexity": _perplexity(mean)}
        if group.name in paired:
            d = paired[group.name]
            row |= {f"below_{groups[0].name}": d.mean, "stderr": d.error} | asdict(d)
            row |= {"verdict": verdict(groups[0], group, d, smallest)}
            del row["mean"]
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with replace_flushed(path) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows
        )


def _with_error(mean: float, error: float) -> str:
    return f"{mean:.4f}" if math.isnan(error) else f"{mean:.4f} ± {error:.4f}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))
