"""How far a run parts from itself by rounding alone: its first steps, from weights moved by 1e-7 of their size.

    python -m benchmarks.precision_floor [--steps 5] [--perturbations 3] [--relative 1e-7] [--ranks 1] SCRIPT FLAGS...
    python -m benchmarks.precision_floor train_ddp.py --config_name facebook/esm2_t6_8M_UR50D \
        --dataset_dir processed/arrow --output_dir unused --bf16 --fp8 --emulate_precision

SCRIPT FLAGS are a run's own, with its precision plan, schedule and seed; nothing is written to its --output_dir. The
run is started once from its initial weights, and once from each of several perturbed copies, with the same batches,
masks and random bits of rounding. A row has the largest relative difference of loss and gradient norm from the first
run's. Two plans that differ less at that step, on one seed, cannot be distinguished.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measuring import completed, publish, torchrun, where_measured, words
from common.cli import UserError, run
from common.files.safe_files import read_json_lines
from common.flags import Flags, flag, parse_arguments

PLAN = "recision:"  # ends the line that the plan follows in a run's log


@dataclass
class Arguments(Flags):
    steps: int = flag(5, "Optimiser steps that are compared.")
    perturbations: int = flag(3, "Runs from moved weights.")
    relative: float = flag(1e-7, "Standard deviation of a weight's change, as a part of the weight.")
    ranks: int = flag(1, "Processes of a run, started by torchrun.")
    report: str | None = flag(None, "Write the table there, too.")

    def check(self) -> None:
        self.require_at_least(1, "steps", "perturbations", "ranks")
        self.require_above(0, "relative")


def perturb(model: Path, moved: Path, relative: float, seed: int) -> None:
    """Write a copy of an exported model to `moved`: each weight times 1 + `relative` x a normal deviate."""
    shutil.copytree(model, moved)
    generator = torch.Generator().manual_seed(seed)
    for path in sorted(moved.glob("*.safetensors")):
        weights = load_file(path)
        for weight in weights.values():
            if weight.is_floating_point():
                weight.addcmul_(weight, torch.randn(weight.shape, generator=generator), value=relative)
        save_file(weights, path, {"format": "pt"})


def start(command: Sequence[str], ranks: int, output_dir: Path, **flags: object) -> str:
    """Run a training script with further flags; its log. UserError with its own error line where it fails."""
    launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
    flags |= {"output_dir": output_dir, "report_to": "none"}
    return completed([*launcher, *command, *words(flags)], command[0]).stderr


def plan_of(log: str) -> list[str]:
    """The lines of a run's log that tell its precision plan; none where nothing is quantised."""
    lines = log.splitlines()
    begin = next((number + 1 for number, line in enumerate(lines) if line.endswith(PLAN)), len(lines))
    end = next((number for number in range(begin, len(lines)) if not lines[number].startswith("  ")), len(lines))
    return lines[begin:end]


def measure(args: Arguments, command: list[str], scratch: Path) -> tuple[list[str], list[list[dict]]]:
    """The plan, and the rows of metrics.jsonl of each run: from the initial weights, then from moved ones."""
    start(command, args.ranks, scratch / "initial", do_train=False, save_final_model=True)
    plan, found = [], []
    for number in range(args.perturbations + 1):
        weights = scratch / "initial" / "final_model"
        if number:
            weights = scratch / f"weights-{number}"
            perturb(scratch / "initial" / "final_model", weights, args.relative, number)
        out = scratch / f"run-{number}"
        how = {"stop_at_step": args.steps, "logging_steps": 1, "save_final_model": False}
        log = start(command, args.ranks, out, model_name_or_path=weights, **how)
        plan = plan or plan_of(log)
        found.append(read_json_lines(out / "metrics.jsonl"))
        shutil.rmtree(out)
        if number:
            shutil.rmtree(weights)
    return plan, found


def table(runs: list[list[dict]]) -> list[str]:
    """Markdown: a row a step that no run skipped."""
    lines = ["| step | loss | apart by | gradient norm | apart by |", "|--:|--:|--:|--:|--:|"]
    for first, *others in zip(*runs, strict=True):
        cells = [str(first["step"])]
        for key in ("step_loss", "grad_norm"):
            if not all(key in row for row in (first, *others)):
                cells += ["skipped", ""]
                continue
            apart = max(abs(other[key] / first[key] - 1) for other in others)
            cells += [f"{first[key]:.4f}", f"{apart:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    words = sys.argv[1:]
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
    args = parse_arguments(__doc__, Arguments, argv=words[:script])
    if script == len(words):
        raise UserError("no script among the arguments: say train_ddp.py and its flags, after those of this command")
    with tempfile.TemporaryDirectory(prefix="precision_floor-") as scratch:
        plan, runs = measure(args, words[script:], Path(scratch))
    hardware, command = where_measured("benchmarks.precision_floor", "torch")
    text = [hardware, "", command, "", *(["```", *plan, "```", ""] if plan else []), *table(runs)]
    publish("\n".join(text), args.report)


if __name__ == "__main__":
    run(main)
