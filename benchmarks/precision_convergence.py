"""What low precision does to training: held-out loss of BF16, FP8, MXFP8 and NVFP4, emulated, on the same batches.

With --formats also of FP32, of gradients all-reduced in bf16 (`BF16 buckets`, under DDP of --ranks), and
of a bf16 residual stream.

    python -m benchmarks.precision_convergence --dataset_dir quickstart/sample/processed/arrow --output_dir convergence
        [--steps 2000] [--seeds 1,2,3] [--formats BF16,NVFP4] [--ranks 2] [--max_runs 2] [--report path.md]

Each (format, seed) is a run of train_ddp.py in output_dir/<format>-<seed>: of one seed, all formats start from the
same weights and see the same batches and masks. Finished runs are kept, an interrupted one resumes, and
--max_runs stops after so many, so that it can all be done in pieces; the table and the plot show what there is.
Differences are those to BF16 of the same seed; their noise is over the seeds.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring import ROOT, PreparedFlags, completed, mean_and_error, say, torchrun, where_measured, words
from common.cli import UserError, run
from common.figures import TWO_COLUMNS, figure_style, save_figure, series_style
from common.files.safe_files import read_json_lines
from common.flags import Missing, flag, parse_arguments
from common.models.esm2.config import load_config
from common.models.layers.config_base import override

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "BF16"
# Flags of each; of a model with n layers, {half} is 1 to n/2: NVFP4's authors keep the last layers in BF16.
EMULATED = {
    BASE: {},
    "FP8 delayed": {"fp8": True, "emulate_precision": True},
    "MXFP8": {"fp8": True, "fp8_recipe": "mxfp8", "emulate_precision": True},
    "NVFP4 half": {"fp4": True, "fp4_layers": "{half}", "emulate_precision": True},
    "NVFP4 all": {"fp4": True, "emulate_precision": True},
}
FORMATS = EMULATED | {
    "FP32": {"bf16": False},
    "BF16 buckets": {"ddp_bucket_dtype": "bf16"},
    "BF16 residual": {"bf16_residual": True},
    "BF16 buckets and residual": {"ddp_bucket_dtype": "bf16", "bf16_residual": True},
}
LOSS = "eval_loss_masked"  # of the hidden residues
LAST_PART = 0.25  # of the curve, whose mean is less noisy than its last point


@dataclass
class Arguments(PreparedFlags):
    output_dir: str | None = flag(None, "Where the runs, the table and the plot go.")
    config_name: str = flag("facebook/esm2_t6_8M_UR50D", "The model.")
    config_overrides: str | None = flag(None, "Change it: num_hidden_layers=2,...")
    formats: str = flag(",".join(EMULATED), "Which formats.")
    ranks: int = flag(1, "Processes of a run, under DDP, each with a pack a step.")
    seeds: str = flag("1,2,3", "Of weights, order, crops and masks.")
    steps: int = flag(2000, "Optimiser steps of each run.")
    evaluations: int = flag(20, "Points of each curve.")
    tokens_per_pack: int = flag(8192, "Tokens of a batch.")
    max_seq_length: int = flag(512, "Crop.")
    learning_rate: float = flag(4e-4, "Peak.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N held-out proteins only.")
    max_runs: int | None = flag(None, "Start at most so many runs in this call; 0: only the report.")
    report: str | None = flag(None, "The table's path; the plot gets .png. Default: output_dir/convergence.md.")

    def missing(self) -> Iterator[Missing]:
        if not self.output_dir:
            yield Missing("--output_dir", "where the runs, the table and the plot go", "out")

    def check(self) -> None:
        for name in self.formats.split(","):
            if name not in FORMATS:
                raise UserError(f"--formats {name}: choose of {','.join(FORMATS)}")
        if not all(seed.isdigit() for seed in self.seeds.split(",")):
            raise UserError(f"--seeds {self.seeds}: expected numbers such as 1,2,3")
        if not 1 <= self.evaluations <= self.steps:
            raise UserError(f"--evaluations {self.evaluations}: between 1 and --steps, {self.steps}")


def directory_of(args: Arguments, name: str, seed: str) -> Path:
    return Path(args.output_dir) / f"{name.replace(' ', '_')}-{seed}"


def command_of(args: Arguments, name: str, seed: str) -> list[str]:
    config = load_config(args.config_name)
    config = override(config, args.config_overrides) if args.config_overrides else config
    every = max(1, args.steps // args.evaluations)
    shared = {
        "config_name": args.config_name,
        "config_overrides": args.config_overrides,
        "dataset_dir": args.dataset_dir,
        "output_dir": directory_of(args, name, seed),
        "seed": seed,
        "max_steps": args.steps,
        "tokens_per_pack": args.tokens_per_pack,
        "max_seq_length": args.max_seq_length,
        "learning_rate": args.learning_rate,
        "max_eval_samples": args.max_eval_samples,
        "eval_steps": every,
        "save_steps": every,
        "save_total_limit": 1,
        "logging_steps": every,
        "backend": "torch",
        "save_final_model": False,
        "bf16": True,
        "do_eval": True,
        "disable_tqdm": True,
    }
    half = f"1-{max(1, config.num_hidden_layers // 2)}"
    own = {key: half if value == "{half}" else value for key, value in FORMATS[name].items()}
    flags = words({key: value for key, value in (shared | own).items() if value is not None})
    launcher = torchrun(args.ranks) if args.ranks > 1 else [sys.executable]
    return [*launcher, str(ROOT / "train_ddp.py"), *flags]


def train(args: Arguments) -> int:
    """Take the runs that are missing, seed by seed; how many are still to do."""
    pairs = [(name, seed) for seed in args.seeds.split(",") for name in args.formats.split(",")]
    missing = [pair for pair in pairs if not finished(directory_of(args, *pair), args.steps)]
    for number, (name, seed) in enumerate(missing):
        if number == args.max_runs:
            return len(missing) - number
        say(f"run {number + 1} of {len(missing)}: {name}, seed {seed}")
        completed(command_of(args, name, seed), f"{name}, seed {seed}")
    return 0


def finished(directory: Path, steps: int) -> bool:
    results, state = directory / "eval_results.json", directory / "trainer_state.json"
    return results.exists() and state.exists() and json.loads(state.read_text())["step"] >= steps


def curves(args: Arguments) -> dict[str, dict[str, dict[int, float]]]:
    """Held-out loss by format, seed and step, of the finished runs."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name in args.formats.split(","):
        for seed in args.seeds.split(","):
            directory = directory_of(args, name, seed)
            if finished(directory, args.steps):
                rows = read_json_lines(directory / "metrics.jsonl")
                curve = {row["step"]: row[LOSS] for row in rows if LOSS in row}
                curve[args.steps] = json.loads((directory / "eval_results.json").read_text())[LOSS]
                found.setdefault(name, {})[seed] = curve
    return found


def last_part(curve: dict[int, float]) -> float:
    return statistics.mean(loss for step, loss in curve.items() if step >= (1 - LAST_PART) * max(curve))


def table(args: Arguments, found: dict) -> list[str]:
    def shown(values: list[float], form: str) -> str:
        mean, error = mean_and_error(values)
        return f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:.4f}")

    lines = [
        "| format | seeds | held-out loss, hidden residues | difference from BF16 | the same over the last quarter |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, runs in found.items():
        paired = [seed for seed in runs if seed in found.get(BASE, {})]
        cells = [name, str(len(runs)), shown([curve[args.steps] for curve in runs.values()], ".4f")]
        for of in (lambda curve: curve[args.steps], last_part):
            differences = [of(runs[seed]) - of(found[BASE][seed]) for seed in paired]
            cells.append(shown(differences, "+.4f") if differences and name != BASE else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(found: dict, path: Path) -> None:
    """Mean over the seeds, shaded from the smallest to the largest; beside it the difference from BF16.

    path: without a suffix.
    """
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(TWO_COLUMNS, 0.45 * TWO_COLUMNS), layout="constrained")
        _draw(figure, found)
    save_figure(figure, path)


def _draw(figure: Figure, found: dict) -> None:
    losses, differences = figure.subplots(1, 2)
    base = found.get(BASE, {})
    for number, (name, runs) in enumerate(found.items()):
        off = {s: {k: v - base[s][k] for k, v in c.items() if k in base[s]} for s, c in runs.items() if s in base}
        style = series_style(number)
        for axis, of in ((losses, runs), (differences, off)):
            steps = sorted(set.intersection(*(set(curve) for curve in of.values()))) if of else []
            values = [[curve[step] for curve in of.values()] for step in steps]
            axis.plot(steps, [statistics.mean(v) for v in values], label=name, **style)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axis.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
    losses.set(title="Held-out loss", ylabel="nats per hidden residue")
    differences.set(title="Difference from BF16 of the same seed", ylabel="nats")
    for axis in (losses, differences):
        axis.set_xlabel("step")
        axis.grid(visible=True)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=3)


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    left = train(args)
    found = curves(args)
    if not found:
        raise UserError(f"{args.output_dir}: no run is finished there yet: raise --max_runs")
    import torch  # noqa: F401  (its version)

    path = Path(args.report or Path(args.output_dir) / "convergence.md")
    hardware, command = where_measured("benchmarks.precision_convergence", "torch")
    text = [
        f"{args.config_name}{f' ({args.config_overrides})' if args.config_overrides else ''}, {args.steps} steps of "
        f"{args.ranks} x {args.tokens_per_pack} tokens, formats emulated, --bf16; means over the seeds ± their "
        "standard error; "
        f"{hardware}",
        "",
        command,
        "",
        *table(args, found),
    ]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    draw(found, path.with_suffix(""))
    print("\n".join(text))
    print(f"\nplot    {path.with_suffix('.png')}" + (f"\n{left} runs are still to do" if left else ""))


if __name__ == "__main__":
    run(main)
