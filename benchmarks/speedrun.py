"""Clock, held-out evaluation and leaderboard row of benchmarks/speedrun.sh.

    python -m benchmarks.speedrun --dataset_dir data/processed/arrow --output_dir speedrun --target 2.84 \\
        --held_out HASH [--price_per_hour 0.5] -- python train_ddp.py FLAGS

Before anything is trained it compares the held-out set with --held_out. It starts the command after `--` with
--dataset_dir and --output_dir and counts time, CPU time and energy from its start to its end. The final_model that it
leaves is evaluated in a process of its own, by flags that no attempt can change. Started again it resumes: all starts
count, the time between them does not.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.energy import Energy
from benchmarks.measuring import ROOT, PreparedFlags, commit, completed, processor, say, words
from common.cli import UserError, run
from common.files.runs import read_run_info
from common.files.safe_files import read_json, write_json
from common.flags import Missing, flag, parse_arguments
from common.models.esm2.config import load_config
from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.compare.losses_file import read_losses

MODEL = "facebook/esm2_t6_8M_UR50D"
# Decides which residues are hidden and what the model sees of a protein; in fp32, whatever a run trains in.
EVALUATION = {"max_seq_length": 512, "eval_mlm_probability": 0.15, "eval_mask_replace_prob": 0.8, "do_eval": True}
EVALUATION |= {"do_train": False, "backend": "torch", "disable_tqdm": True}
NOTED_EVERY_S = 1.0  # so much of its time a start may lose that is killed
HEADER = (
    "date | commit | hardware | hours | CPU-hours | energy | price | loss ± error | below residue frequencies | "
    "held-out set | command"
)


@dataclass
class Arguments(PreparedFlags):
    output_dir: str | None = flag(None, "Where the run, its clock and its evaluations go.")
    target: float | None = flag(None, "Loss to reach: nats per hidden residue of the validation split.")
    held_out: str | None = flag(None, "The leaderboard's held-out set, or `any`: for a table of your own.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N held-out proteins. Default: all.")
    price_per_hour: float | None = flag(None, "Of the machine, in any currency.")
    as_typed: str | None = flag(None, "The row's command. Default: the one that is timed.")

    def missing(self) -> Iterator[Missing]:
        yield from super().missing()
        for name, what, example in (
            ("output_dir", "where the attempt goes", "speedrun"),
            ("target", "the loss to reach", "2.84"),
            ("held_out", "the leaderboard's held-out set, or `any`", "any"),
        ):
            if getattr(self, name) is None:
                yield Missing(f"--{name}", what, example)

    @property
    def directory(self) -> Path:
        return Path(self.output_dir or "").absolute()


def held_out_losses(args: Arguments, name: str, flags: Mapping[str, object]) -> tuple[ProteinLosses, dict[str, Any]]:
    """Losses of single proteins, and eval_results.json, of the model that `flags` name. Evaluated once."""
    out = args.directory / name
    if not (out / "eval_losses.parquet").exists():
        say(f"Evaluating: {name}")
        flags = {"output_dir": out, "dataset_dir": Path(args.dataset_dir or "").absolute(), **EVALUATION, **flags}
        if args.max_eval_samples:
            flags["max_eval_samples"] = args.max_eval_samples
        completed([sys.executable, "train_ddp.py", *words(flags)], name)
    return read_losses(out / "eval_losses.parquet")[0], read_json(out / "eval_results.json")


def check_held_out(args: Arguments) -> str:
    """The hash of the residues that an evaluation hides and of what it shows. UserError if it is not --held_out."""
    losses, results = held_out_losses(args, "untrained", {"config_name": MODEL})
    found = losses.questions[:12]
    unigram = f"residue frequencies {results['eval_unigram_loss_masked']:.4f} nats"
    say(f"Held-out set {found}: {results['eval_samples']:,} proteins, {unigram}")
    if args.held_out not in (found, "any"):
        raise UserError(
            f"{args.dataset_dir}: held-out set {found}, not the leaderboard's {args.held_out}: its FASTA file and its "
            "version of MMseqs2 make that one (benchmarks/results/speedrun.md); --held_out any measures yours for a "
            "table of your own"
        )
    return found


class Clock:
    """Time of the starts of a command, kept in a file: {command, ended, starts: [{seconds, cpu_seconds, joules}]}.

    run: the command's output directory. Without it an earlier start failed before it began, and does not count.
    """

    def __init__(self, path: Path, command: Sequence[str], run: Path):
        self.path = path
        self.state: dict[str, Any] = {"command": shlex.join(command), "ended": None, "starts": []}
        if path.exists() and run.exists():
            self.state = read_json(path)
            if self.state["command"] != shlex.join(command):
                raise UserError(
                    f"{path.parent}: an attempt of another command ({self.state['command']}): choose another directory"
                )

    def time(self, command: Sequence[str]) -> None:
        """Run the command to its end and count it; nothing if an earlier call saw its end."""
        if self.state["ended"]:
            return
        began, energy, before = time.monotonic(), Energy(), resource.getrusage(resource.RUSAGE_CHILDREN)
        earlier = self.state["starts"]

        def note(cpu_seconds: float) -> None:
            measured = {"seconds": time.monotonic() - began, "cpu_seconds": cpu_seconds, "joules": energy.joules()}
            self.state["starts"] = [*earlier, measured]
            write_json(self.path, self.state)

        with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        status = process.wait(NOTED_EVERY_S)
                        break
                    note(session_cpu_seconds(process.pid))
            finally:
                process.terminate()  # if this process was told to stop: the command saves a checkpoint
                process.wait()
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                note(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if status:
            raise UserError(f"{self.path.parent}: the command ended with status {status}; started again it resumes")
        self.state["ended"] = time.strftime("%Y-%m-%d")
        write_json(self.path, self.state)

    @property
    def has_energy(self) -> bool:
        return None not in [start["joules"] for start in self.state["starts"]]

    def total(self, name: str) -> float:
        """Over all starts."""
        return sum(start[name] for start in self.state["starts"])


def session_cpu_seconds(session: int) -> float:
    """CPU time of a session's live processes, and of their children that have ended. Linux (proc(5), stat)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # from the 3rd field on: a name may hold blanks
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def check_model(directory: Path) -> None:
    """UserError unless final_model is an ESM-2 8M."""
    if load_config(str(directory)).fingerprint() != load_config(MODEL).fingerprint():
        raise UserError(f"{directory}: not the shape of {MODEL}: an attempt may not change it")


def row(args: Arguments, clock: Clock, losses: ProteinLosses, results: Mapping[str, Any]) -> str:
    """A line of the leaderboard's table, of the columns of HEADER."""
    loss, error = mean_and_error(losses.loss_sum, losses.masked, losses.clusters)
    device = read_run_info(args.directory / "run").get("device", "")
    hours, cpu_hours = clock.total("seconds") / 3600, clock.total("cpu_seconds") / 3600
    price = args.price_per_hour
    cells = [
        clock.state["ended"],
        commit(),
        f"{device}; {os.cpu_count()} cores, {processor()}",
        f"{hours:.3f}",
        f"{cpu_hours:.3f}",
        f"{clock.total('joules') / 3.6e6:.4f} kWh (CPU packages)" if clock.has_energy else "not measured",
        "not given" if price is None else f"{price * hours:.3f}",
        f"{loss:.4f} ± {error:.4f}",
        f"{results['eval_below_unigram_masked']:.4f} ± {results['eval_below_unigram_masked_stderr']:.4f}",
        losses.questions[:12],
        f"`{args.as_typed or clock.state['command']}`",
    ]
    return " | ".join(cells)


def main() -> None:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    args, command = parse_arguments(__doc__, Arguments, given[:at]), given[at + 1 :]
    if not command:
        raise UserError("no command to time: add `-- python train_ddp.py FLAGS`")
    args.directory.mkdir(parents=True, exist_ok=True)
    questions = check_held_out(args)
    out = args.directory / "run"
    places = words({"dataset_dir": Path(args.dataset_dir or "").absolute(), "output_dir": out})
    clock = Clock(args.directory / "clock.json", command, out)
    clock.time([*command, *places])
    check_model(out / "final_model")
    losses, results = held_out_losses(args, "run/judged", {"model_name_or_path": out / "final_model"})
    assert losses.questions[:12] == questions
    print(f"| {HEADER} |\n| {row(args, clock, losses, results)} |", flush=True)
    if (loss := results["eval_loss_masked"]) > args.target:
        raise UserError(f"{args.directory}: {loss:.4f} nats is above the target of {args.target:g}: no entry")
    say(f"Reached: {loss:.4f} nats, target {args.target:g}. The last line is the leaderboard's row.")


if __name__ == "__main__":
    run(main, resumable=True)
