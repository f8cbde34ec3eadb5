"""Compare runs by their held-out losses: what differs, a table, curves, paired differences and verdicts.

python -m extras.compare RUN RUN ... [--baseline RUN] [--output_dir DIR]

RUN is the output directory of a train script. Runs that differ in the seed alone are one row. Each row is compared
with the first one's, protein by protein; --output_dir gets comparison.md, .csv, .png and .svg. docs/comparing.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UserError, run
from common.figures import FigureFlags
from common.files.safe_files import replace_flushed
from common.flags import Flags, flag
from extras.command_line import words_and_flags
from extras.compare.paired import compare
from extras.compare.picture import draw
from extras.compare.report import markdown, write_csv
from extras.compare.runs import check_same_questions, group_runs, read_run

NAME = "comparison"
USAGE = "python -m extras.compare RUN RUN ... [--baseline RUN] [--eval_set NAME] [--output_dir DIR] [--smallest NATS]"


@dataclass(frozen=True)
class CompareArguments(Flags):
    output_dir: str | None = flag(None, f"Write {NAME}.md, .csv, .png and .svg there. Default: only print.")
    baseline: str | None = flag(None, "One of the runs; all others are compared with its group. Default: the first.")
    eval_set: str = flag(
        "",
        "Compare on a set that the runs have by --eval_dataset NAME=..., or on test. Default: the validation split.",
    )
    smallest: float = flag(0.005, "The difference in nats that would matter, for the number of proteins to see it.")
    figures: FigureFlags = field(default_factory=FigureFlags)
    changed: ClassVar[dict[str, Any]] = {
        "figure_format": flag(["png", "svg"], "Formats of the picture, one or several of png svg pdf."),
    }

    def check(self) -> None:
        self.require_above(0, "smallest")


def main() -> None:
    words, args = words_and_flags(__doc__, "python -m extras.compare", CompareArguments)
    paths = list({path.resolve(): path for path in map(Path, words)}.values())
    if len(paths) < 2:
        raise UserError(f"give two runs or more: {USAGE}")
    baseline = Path(args.baseline) if args.baseline else None
    if baseline and baseline.resolve() not in {path.resolve() for path in paths}:
        raise UserError(f"--baseline {baseline}: not one of the runs: add it to them")
    runs = [read_run(path, args.eval_set) for path in paths]
    check_same_questions(runs)
    groups = group_runs(runs, baseline)
    pairs = {group.name: compare(groups[0], group) for group in groups[1:]}
    paired = {name: difference for name, difference in pairs.items() if difference is not None}
    text = markdown(groups, paired, args.smallest)
    print(text, end="")
    if args.output_dir:
        directory = Path(args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        pictures = draw(groups, directory / NAME, args.figures)
        write_csv(directory / f"{NAME}.csv", groups, paired, args.smallest)
        with replace_flushed(directory / f"{NAME}.md") as partial:
            partial.write_text(f"# Comparison\n\n{text}\n![Held-out loss over tokens]({pictures[0].name})\n")
        print(f"\nWritten: {directory}/{', '.join([f'{NAME}.md', '.csv', *(path.suffix for path in pictures)])}")


if __name__ == "__main__":
    run(main)
