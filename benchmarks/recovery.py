"""From the SIGKILL of a rank, or of the launcher with its ranks, to the first optimiser step that is new.

    python -m benchmarks.recovery --dataset_dir processed/arrow [--before COMMIT] [--output table.md]

A run of extras.launch, as a user types it, is killed --kills times, each time --steps_lost steps after a checkpoint.
A killed rank is the launcher's to replace; a killed launcher is started again at once with the same command, as a
batch system would. With --before, that commit's runs take turns with this one's, with the same flags. The parts are
those of the run's own line "First step ..."; what it cannot know, from the kill to the launcher's notice, is the rest.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commits import called
from benchmarks.measuring import ROOT, PreparedFlags, publish, say, spread, where_measured, words
from common.cli import UserError, run
from common.flags import flag, parse_arguments

CASES = {  # model, script, ranks, what is killed
    "8M, DDP x 2, a rank": ("facebook/esm2_t6_8M_UR50D", "train_ddp.py", 2, "rank"),
    "8M, DDP x 2, the launcher": ("facebook/esm2_t6_8M_UR50D", "train_ddp.py", 2, "launcher"),
    "8M, FSDP2 x 2, a rank": ("facebook/esm2_t6_8M_UR50D", "train_fsdp2.py", 2, "rank"),
    "8M, FSDP2 x 4, a rank": ("facebook/esm2_t6_8M_UR50D", "train_fsdp2.py", 4, "rank"),
    "35M, DDP x 2, a rank": ("facebook/esm2_t12_35M_UR50D", "train_ddp.py", 2, "rank"),
    "35M, FSDP2 x 4, a rank": ("facebook/esm2_t12_35M_UR50D", "train_fsdp2.py", 4, "rank"),
}
STEP, RESUMED = re.compile(r"- step: (\d+)/"), re.compile(r"Resuming after step (\d+)")
START_UP = re.compile(r"First step ([\d.]+) s after .*?: (.*)")
TIMEOUT_S = 300.0


@dataclass
class Arguments(PreparedFlags):
    before: str | None = flag(None, "An earlier commit, to run in turns.")
    cases: list[str] | None = flag(None, f"Some of: {'; '.join(CASES)}.")
    kills: int = flag(3, "Of each run.")
    save_steps: int = flag(20, "Steps between checkpoints on the disk.")
    steps_lost: int = flag(10, "Steps after a checkpoint at which the run is killed.")
    tokens: int = flag(512, "In a pack; a step has a pack a rank.")
    memory_save_steps: int | None = flag(None, "Of this commit's runs.")
    output: str | None = flag(None, "Also write the table there.")

    def check(self) -> None:
        for case in self.cases or ():
            if case not in CASES:
                raise UserError(f"--cases {case}: choose of {'; '.join(CASES)}")


@dataclass(frozen=True)
class Recovery:
    """Seconds from a kill to the first new step; steps taken again; parts: seconds, as the run names them."""

    seconds: float
    repeated: int
    parts: dict[str, float]


class Job:
    """A launcher, its log and when each of its lines came. A context manager, which leaves no process."""

    def __init__(self, checkout: Path, command: list[str]):
        self.checkout, self.command = checkout, command
        self.lines: list[tuple[float, str]] = []

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.kill_all()

    def start(self) -> None:
        threads = {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            self.command, cwd=self.checkout, env=os.environ | threads, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stderr or ():
            self.lines.append((time.monotonic(), line))

    def found(self, pattern: re.Pattern, begin: int = 0) -> list[tuple[float, re.Match]]:
        """(when, match) of the lines from number `begin`."""
        return [(at, match) for at, line in self.lines[begin:] if (match := pattern.search(line))]

    def reached(self, begin: int = 0) -> int:
        return max((int(match[1]) for _, match in self.found(STEP, begin)), default=0)

    def until_step(self, step: int, begin: int = 0) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.reached(begin) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"{' '.join(self.command)}: ended before step {step}: {self.lines[-3:]}")
            time.sleep(0.002)

    def ranks(self) -> list[int]:
        """Of this launcher, by process id: those of its descendants that lead a session."""
        return sorted(pid for pid in descendants(self.process.pid) if leads_session(pid))

    def kill_all(self) -> None:
        for pid in (*self.ranks(), self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill(self, victim: str, at: int) -> Recovery:
        """Kill after step `at`, and wait for the first new step."""
        self.until_step(at)
        ranks, begin = self.ranks(), len(self.lines)
        killed = time.monotonic()
        if victim == "rank":
            os.kill(ranks[-1], signal.SIGKILL)
        else:
            self.kill_all()
            self.start()
        while not self.found(RESUMED, begin):
            time.sleep(0.002)
            if time.monotonic() - killed > TIMEOUT_S:
                raise UserError(f"{' '.join(self.command)}: not resumed: {self.lines[-3:]}")
        last = max(at, max((int(m[1]) for when, m in self.found(STEP) if when < self.found(RESUMED, begin)[0][0])))
        resumed = int(self.found(RESUMED, begin)[0][1][1])
        self.until_step(last + 1, begin)
        new = next(when for when, match in self.found(STEP, begin) if int(match[1]) > last)
        parts: dict[str, float] = {}
        if line := self.found(START_UP, begin):
            when, match = line[0]
            pairs = (part.rsplit(" ", 1) for part in match[2].strip().split(", "))
            parts = {"noticing": max(0.0, when - killed - float(match[1]))} | {n: float(s) for n, s in pairs}
        return Recovery(new - killed, last - resumed, parts)


def descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from descendants(child)


def leads_session(pid: int) -> bool:
    with suppress(OSError):
        return os.getsid(pid) == pid
    return False


def recoveries(args: Arguments, checkout: Path, case: str) -> list[Recovery]:
    model, script, ranks, victim = CASES[case]
    with tempfile.TemporaryDirectory() as out:
        flags = {
            "config_name": model,
            "dataset_dir": os.path.abspath(str(args.dataset_dir)),
            "output_dir": out,
            "tokens_per_pack": args.tokens,
            "max_seq_length": args.tokens,
            "packs_per_step": ranks,
            "max_steps": args.save_steps * (args.kills + 2),
            "save_steps": args.save_steps,
            "save_total_limit": 1,
            "logging_steps": 1,
            "use_cpu": True,
        }
        if checkout == ROOT and args.memory_save_steps is not None:
            flags["memory_save_steps"] = args.memory_save_steps
        launcher = ["-m", "extras.launch", f"--nproc_per_node={ranks}", f"--max_restarts={args.kills}"]
        with Job(checkout, [sys.executable, *launcher, script, *words(flags)]) as job:
            ats = [number * args.save_steps + args.steps_lost for number in range(1, args.kills + 1)]
            return [job.kill(victim, at) for at in ats]


def table(args: Arguments) -> str:
    sides = {"this": ROOT}
    with ExitStack() as stack:
        if args.before:
            earlier = Path(stack.enter_context(tempfile.TemporaryDirectory()), "earlier")
            called(["git", "clone", "-q", ROOT, earlier], ROOT)
            called(["git", "checkout", "-q", args.before], earlier)
            sides = {args.before: earlier} | sides
        found: dict[tuple[str, str], list[Recovery]] = {}
        for case in args.cases or CASES:
            for side, checkout in sides.items():
                found[case, side] = recoveries(args, checkout, case)
                say(f"{case}, {side}: {', '.join(f'{r.seconds:.2f} s' for r in found[case, side])}")
    named = [name for runs in found.values() for r in runs for name in r.parts]
    parts = list(dict.fromkeys(named))
    rows = [
        f"| what is killed | commit | kill to new step, s | spread | steps repeated | {' | '.join(parts)} |",
        f"|---|---|--:|--:|--:|{'--:|' * len(parts)}",
    ]
    for (case, side), runs in found.items():
        cells = [
            f"{statistics.median(r.parts.get(part, 0.0) for r in runs):.2f}" if runs[0].parts else "" for part in parts
        ]
        seconds = [r.seconds for r in runs]
        repeated = max(r.repeated for r in runs)
        first = [case, side, f"{statistics.median(seconds):.2f}", f"{spread(seconds):.0%}", str(repeated)]
        rows.append(f"| {' | '.join([*first, *cells])} |")
    about = f"median of {args.kills} kills, {args.steps_lost} steps after a checkpoint; parts in seconds"
    return "\n".join([*where_measured("benchmarks.recovery", "torch"), "", about, "", *rows])


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    publish(table(args), args.output)


if __name__ == "__main__":
    run(main)
