"""Is training right on this machine? This project's runs beside an independent loop over stock transformers.

    python -m benchmarks.prove [--output table.md]

The loop (benchmarks/stock_loop.py) shares with a run its initial weights, which transformers drew, its flags' values,
and the tokens and masks of each step. The runs are train_ddp.py, train_fsdp2.py and train_ddp_cp.py as a user starts
them: losses, gradient norms and final_model/ must be the loop's to within a bound, and a run that is killed and
resumed must have the bits of one that is not. Exit status 1 where a check fails. A row that fails or hangs costs
itself only. On two CPU cores it takes a few minutes; on a GPU, layers are compiled first.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.measuring import ROOT, completed, measured_afresh, publish, say, torchrun, where_measured, words
from benchmarks.stock_loop import FAMILIES, LAST_RATE, RECIPE, STEPS, Family, Sequences, Trained, loop, with_tanh_gelu
from common.cli import UserError, run
from common.data.packs_per_step import PacksPerStep
from common.distributed.world import World
from common.files.safe_files import read_json_lines
from common.flags import Flags, flag, parse_arguments
from common.models.layers.backend import BF16_SINCE
from common.training.command_line import parse_run, task_of
from common.training.load_model import load_model
from extras.formats.recipe import ADA
from extras.prepare.sample import write_sample
from train_ddp import DdpFlags

PACKS = 4  # a step
KILLED_STEPS, KILLED_AT = 100, 20  # of the run that is killed
# Of the runs, beside RECIPE.
FLAGS = {
    "ESM-2": {"lr_scheduler_type": "esm2", "tokens_per_pack": 1024, "max_seq_length": 256},
    "Llama": {
        "lr_scheduler_type": "linear",
        "min_lr": LAST_RATE,
        "tokenizer": "bytes",
        "per_device_train_batch_size": 4,
        "max_seq_length": 256,
    },
}
DATA = {"ESM-2": "proteins.fasta", "Llama": "documents.jsonl"}


class Bounds(NamedTuple):
    """Largest relative differences; of the weights relative to how far they have moved."""

    loss: float
    norm: float
    weights: float


BOUNDS = {
    "fp32": Bounds(1e-5, 1e-4, 1e-3),
    "bf16": Bounds(5e-3, 3e-2, 1e-1),
    "FP8": Bounds(3e-2, 3e-1, 6e-1),
    "bits": Bounds(0.0, 0.0, 0.0),
}


@dataclass(frozen=True)
class Row:
    """A run of a script, and what it is compared with."""

    family: str
    script: str
    ranks: int = 1
    precision: str = "fp32"
    backend: str = "torch"
    emulated: bool = False
    killed: bool = False

    @property
    def name(self) -> str:
        precision = "FP8 (emulated)" if self.emulated else self.precision
        launched = f"{self.script}, {self.ranks} rank{'s' * (self.ranks > 1)}"
        backend = ", Transformer Engine" * (self.backend == "te")
        return f"{self.family}, {precision}{backend}, {launched}" + ", killed and resumed" * self.killed

    @property
    def bounds(self) -> Bounds:
        return BOUNDS["bits" if self.killed else self.precision]

    @property
    def steps(self) -> int:
        return KILLED_STEPS if self.killed else STEPS

    @property
    def loop(self) -> str:
        """Of the independent loop: family, dtype (FP8 is compared with bf16) and GELU."""
        tanh = self.family == "ESM-2" and self.backend == "te"  # Transformer Engine's only GELU
        return f"{self.family}:{'fp32' if self.precision == 'fp32' else 'bf16'}:{'tanh' if tanh else 'exact'}"

    def flags(self, work: Path) -> dict[str, object]:
        ranks = 1 if self.script == "train_ddp_cp.py" else self.ranks  # that have packs of their own
        flags: dict[str, object] = {
            **FLAGS[self.family],
            **RECIPE,
            "model_name_or_path": work / self.family,
            "dataset": work / DATA[self.family],
            "gradient_accumulation_steps": PACKS // ranks,
            "max_steps": self.steps,
            "save_steps": KILLED_AT,
            "logging_steps": 1,
            "backend": self.backend,
            "bf16": str(self.precision != "fp32"),
            "fp8": str(self.precision == "FP8"),
            "emulate_precision": str(self.emulated),
            "deterministic": str(self.killed),
        }
        if self.precision == "FP8":
            flags["fp8_recipe"] = "current"  # delayed scaling takes some steps to find its scales
        if self.script == "train_ddp_cp.py":
            flags["cp_size"] = self.ranks
        return flags | ({"tokens_per_pack": 256, "gradient_accumulation_steps": 1} if self.killed else {})

    def command(self, work: Path, out: Path, device: str) -> list[str]:
        """As a user types it."""
        launcher = torchrun(self.ranks) if self.ranks > 1 else [sys.executable]
        places = {"output_dir": out} | ({"use_cpu": True} if device == "cpu" else {})
        return [*launcher, self.script, *words(self.flags(work) | places)]


def rows(device: str, gpus: int) -> list[Row]:
    """What this machine can check: two ranks on two GPUs, or on a CPU; FP8 emulated where the device has none."""
    ranks = 2 if device == "cpu" else min(2, gpus)
    te = device == "cuda" and find_spec("transformer_engine") is not None
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    fp8 = te and capability >= ADA
    pair = [("train_ddp.py", 2), ("train_ddp_cp.py", 2)] if ranks == 2 else []
    found = [Row("ESM-2", script, many) for script, many in [("train_ddp.py", 1), *pair, ("train_fsdp2.py", ranks)]]
    found += [Row("Llama", "train_ddp.py"), Row("Llama", "train_fsdp2.py", ranks)]
    if device == "cpu" or capability >= BF16_SINCE:
        for backend in ("torch", "te") if te else ("torch",):
            found += [Row("ESM-2", "train_fsdp2.py", ranks, "bf16", backend)]
            found += [Row("Llama", "train_ddp.py", 1, "bf16", backend)]
        for family in FAMILIES:
            found += [Row(family, "train_ddp.py", 1, "FP8", "te" if fp8 else "torch", emulated=not fp8)]
    return [*found, Row("ESM-2", "train_ddp.py", killed=True)]


def step_sequences(flags: Mapping[str, object]) -> list[list[Sequences]]:
    """Of each step, of each of its packs, the sequences that a run with these flags trains on: all that the loop has
    from this project."""
    args = parse_run("", DdpFlags, words({**flags, "output_dir": "unused", "use_cpu": True}))
    world = World(0, 0, 1, torch.device("cpu"))
    task = task_of(args)(load_model(args, world), args, world)
    task.open(evaluates=False)
    steps = task.steps(PacksPerStep.of(PACKS), 0, {}, STEPS, STEPS)
    return [[_sequences(batch) for batch in step.micro_batches] for step in steps]


def _sequences(batch: Mapping[str, Any]) -> Sequences:
    lengths = batch["cu_seqlens"].diff().tolist()
    return list(zip(batch["input_ids"].split(lengths), batch["labels"].split(lengths), strict=True))


def worker(args: Arguments) -> dict:
    """The loop `args.worker` in this process; its weights go below --keep."""
    name, dtype, gelu = args.worker.split(":")
    family, work = FAMILIES[name], Path(args.keep)
    steps = step_sequences(Row(name, "train_ddp.py").flags(work))
    model = family.model.from_pretrained(work / name)
    if gelu == "tanh":
        with_tanh_gelu(model)
    trained = loop(family, model, steps, args.device, dtype == "bf16")
    save_file(trained.weights, work / f"{args.worker}.safetensors")
    return {"losses": trained.losses, "norms": trained.norms}


def left_by(out: Path, family: Family) -> Trained:
    """What a run left, its model opened by transformers. UserError unless that finds every weight in its place."""
    logged = [row for row in read_json_lines(out / "metrics.jsonl") if "loss" in row]
    model, found = family.model.from_pretrained(out / "final_model", output_loading_info=True)
    if wrong := [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]:
        raise UserError(f"final_model: transformers finds no {wrong[0]}, or has no use for it")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Trained([row["loss"] for row in logged], [row["grad_norm"] for row in logged], weights)


def differences(ours: Trained, theirs: Trained, initial: Mapping[str, Tensor]) -> Bounds:
    """The worst of all steps; of the weights together, |ours - theirs| / |theirs - initial|."""

    def worst(some: list[float], others: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))

    def distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
        return sum(float((some[n].double() - others[n].double()).square().sum()) for n in others) ** 0.5

    return Bounds(
        worst(ours.losses, theirs.losses),
        worst(ours.norms, theirs.norms),
        distance(ours.weights, theirs.weights) / distance(initial, theirs.weights),
    )


def is_within(found: Bounds, bounds: Bounds) -> bool:
    """False for a NaN."""
    return all(value <= most for value, most in zip(found, bounds, strict=True))


def kill_and_resume(row: Row, work: Path, out: Path, args: Arguments) -> None:
    """Kill a run once it has a checkpoint, and start it again. UserError if it has ended before."""
    command = row.command(work, out, args.device)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + args.seconds
        while process.poll() is None and time.monotonic() < deadline and not any(out.glob("checkpoint-*")):
            time.sleep(0.005)
        process.kill()
    if process.returncode != -signal.SIGKILL or not any(out.glob("checkpoint-*")):
        raise UserError(
            f"no checkpoint in {args.seconds} s, or it ended (status {process.returncode}) before the kill"
        )
    completed(command, "resumed", seconds=args.seconds)


def prove(
    row: Row,
    work: Path,
    args: Arguments,
    initial: Mapping[str, Mapping[str, Tensor]],
    loops: Mapping[str, Future[dict]],
) -> Bounds | str:
    """The differences of a row, or why there are none. initial: weights by family."""
    family, out = FAMILIES[row.family], work / row.name.replace(" ", "_")
    try:
        completed(row.command(work, out, args.device), "run", seconds=args.seconds)
        if row.killed:
            theirs = left_by(out, family)
            out = out.with_name(out.name + "-killed")
            kill_and_resume(row, work, out, args)
        else:
            theirs = Trained(**loops[row.loop].result(), weights=load_file(work / f"{row.loop}.safetensors"))
        found: Bounds | str = differences(left_by(out, family), theirs, initial[row.family])
    except Exception as error:  # the other rows count
        found = f"failed: {' '.join(str(error).split())[-160:]}".replace("|", "/")
    say(cells(row, found))
    return found


def cells(row: Row, found: Bounds | str) -> str:
    """A line of the table."""
    if isinstance(found, str):
        return f"| {row.name} | {row.steps} | {found} | | | | **no** |"
    values = " | ".join("same" if value == 0 else f"{value:.1e}" for value in found)
    bound = "the same bits" if row.killed else " / ".join(f"{most:.0e}" for most in row.bounds)
    return f"| {row.name} | {row.steps} | {values} | {bound} | {'yes' if is_within(found, row.bounds) else '**no**'} |"


def report(found: Mapping[Row, Bounds | str], where: list[str]) -> tuple[str, int]:
    """(the page, the exit status)."""
    failed = [row for row, outcome in found.items() if isinstance(outcome, str) or not is_within(outcome, row.bounds)]
    lines = [*where, ""]
    lines += ["| check | steps | loss | norm | weights | bounds | ok? |", "|---|--:|--:|--:|--:|--:|---|"]
    lines += [cells(row, outcome) for row, outcome in found.items()]
    lines += ["", BOUNDS_EXPLAINED, "", f"{len(found) - len(failed)} of {len(found)} checks passed."]
    return "\n".join(lines), 1 if failed else 0


BOUNDS_EXPLAINED = """\
Worst relative difference of ten steps; of the weights, relative to how far ten steps have moved them. fp32 differs by
the order of its sums, bf16 by roundings that fall elsewhere in each implementation, FP8 from the loop in bf16."""


def prepare(work: Path) -> dict[str, dict[str, Tensor]]:
    """Generated proteins, the same as documents, and each family's initial weights, which it returns, as a model."""
    disable_progress_bar()  # of writing weights
    work.mkdir(exist_ok=True)
    write_sample(work / "proteins.fasta", num_proteins=400, families=20)
    records = (work / "proteins.fasta").read_text().split(">")[1:]
    (work / "documents.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    models = {name: family.initial() for name, family in FAMILIES.items()}
    for name, model in models.items():
        model.save_pretrained(work / name)
    return {name: model.state_dict() for name, model in models.items()}


def prove_all(args: Arguments, work: Path) -> dict[Row, Bounds | str]:
    """A process for every four cores, at least two: most of a run is imports, which take one core."""
    initial = prepare(work)
    found = rows(args.device, torch.cuda.device_count())
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4)) as pool:

        def start(name: str) -> Future[dict]:
            flags = {"worker": name, "keep": work, "device": args.device}
            return pool.submit(measured_afresh, "benchmarks.prove", flags, os.environ, "the loop", args.seconds)

        # They are first in the queue: no row waits for one that has not started.
        loops = {name: start(name) for name in dict.fromkeys(row.loop for row in found if not row.killed)}
        outcomes = pool.map(lambda row: prove(row, work, args, initial, loops), found)
        return dict(zip(found, outcomes, strict=True))


@dataclass
class Arguments(Flags):
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "Where to train.", choices=("cuda", "cpu"))
    seconds: int = flag(300, "Give a process up after so long; the first steps on a GPU compile.")
    keep: str | None = flag(None, "Leave all runs there: a new directory.")
    output: str | None = flag(None, "Also write the table there.")
    worker: str | None = flag(None, "Internal: run this loop in this process and print JSON.")

    def check(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: no GPU here; --device cpu checks the rest")
        if self.keep and Path(self.keep).exists() and not self.worker:
            raise UserError(f"--keep {self.keep}: exists: choose a new directory")


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    if args.worker:
        print(json.dumps(worker(args)))
        return
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as place:
        work = Path(place).resolve()
        found = prove_all(args, work)
    libraries = ["torch", "transformers", *["transformer_engine"] * bool(find_spec("transformer_engine"))]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    where, command = where_measured("benchmarks.prove", *libraries)
    text, status = report(
        found, ["# This project's runs beside an independent loop", "", f"{device}; {where}", "", command]
    )
    publish(text, args.output)
    raise SystemExit(status)


if __name__ == "__main__":
    run(main)
