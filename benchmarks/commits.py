"""train_ddp.py of two commits on this machine, the same run in turns: tokens a second, start to end, last loss.

    python -m benchmarks.commits --before b101f10 --fasta my_proteins.fasta.gz [--output table.md]

Each commit is checked out into a place of its own and runs with this environment. The 8M model; the first steps are
left out of the speed; the data are prepared once, by the earlier commit.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import ROOT, publish, say, spread, where_measured
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments

ERROR = re.compile(r"^(\[rank\d+\]: )?(error|[\w.]+Error): .*", re.MULTILINE)
LEFT_OUT = 4  # steps, before the speed is that of all others


@dataclass
class Arguments(Flags):
    before: str = flag("", "The earlier commit.")
    after: str = flag("HEAD", "The later one.")
    fasta: str = flag("", "Proteins to train on.")
    tokens: int = flag(4096, "Tokens in a pack.")
    steps: int = flag(16, "Steps of a run.")
    rounds: int = flag(4, "Times that every run is repeated.")
    output: str | None = flag(None, "Also write the table there.")

    def check(self) -> None:
        if not self.before or not self.fasta:
            raise UserError("say which --before and what --fasta")
        self.require_at_least(LEFT_OUT + 2, "steps")


def called(command: list[str | Path], place: Path) -> None:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    if done.returncode:
        error = ERROR.search(done.stderr)  # torchrun says more after that of its ranks
        raise UserError(f"{' '.join(map(str, command))}: failed: {error[0] if error else done.stderr.strip()[-500:]}")


def prepare(checkout: Path, fasta: str, place: Path) -> Path:
    python = sys.executable
    called([python, "0.download_data.py", "--source", Path(fasta).resolve(), "--output_dir", place], checkout)
    called(
        [python, "1.tokenize_uniref_csv.py", "--input_dir", place / "csv", "--output_dir", place / "processed"],
        checkout,
    )
    return place / "processed" / "arrow"


def measure(checkout: Path, data: Path, args: Arguments, precision: str) -> tuple[float, float, float]:
    """Tokens a second, seconds from start to end, the last step's loss."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "train_ddp.py", "--config_name", "facebook/esm2_t6_8M_UR50D", "--dataset_dir", data]
        command += ["--output_dir", out, "--overwrite_output_dir", "--logging_steps", "1", "--use_cpu"]
        command += ["--tokens_per_pack", str(args.tokens), "--max_steps", str(args.steps)]
        began = time.monotonic()
        called(command + ["--bf16"] * (precision == "bf16"), checkout)
        seconds = time.monotonic() - began
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]  # of one step each: --logging_steps 1
    return statistics.median(row["tokens_per_second"] for row in rows[LEFT_OUT:]), seconds, rows[-1]["loss"]


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    commits = [args.before, args.after]
    found: dict[tuple[str, str], list] = {}
    with tempfile.TemporaryDirectory() as work:
        places = [Path(work) / name for name in ("before", "after")]
        for place, commit in zip(places, commits, strict=True):
            called(["git", "clone", "--quiet", ROOT, place], ROOT)
            called(["git", "checkout", "--quiet", "--detach", commit], place)
        data = prepare(places[0], args.fasta, Path(work) / "data")
        for number in range(args.rounds):
            for precision in ("fp32", "bf16"):
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    taken = measure(places[which], data, args, precision)
                    found.setdefault((precision, commits[which]), []).append(taken)
                    say(f"{number + 1} {precision} {commits[which]} {taken}")
    lines = ["| precision | commit | tokens/s | spread | start to end, s | last loss |", "|---|---|--:|--:|--:|--:|"]
    for (precision, commit), runs in sorted(found.items(), key=lambda item: (item[0][0], commits.index(item[0][1]))):
        speeds, seconds, losses = zip(*runs, strict=True)
        speed = statistics.median(speeds)
        lines.append(
            f"| {precision} | {commit} | {speed:,.0f} | {spread(speeds):.0%} "
            f"| {statistics.median(seconds):.1f} | {losses[0]:.7f} |"
        )
    publish("\n\n".join([*where_measured("benchmarks.commits", "torch"), "\n".join(lines)]) + "\n", args.output)


if __name__ == "__main__":
    run(main)
