"""Runs that a test watches, signals and kills while under way: forked processes, or torchrun's.

The processes are real and so are the signals; they are only saved the seconds of importing torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from common.files.runs import list_checkpoints
from common.training.log_row import FIELDS
from tests.forked import context
from tests.patience import POLL_S, TIMEOUT_S, communicate, join, wait_until
from tests.training_fixtures import (
    ROOT,
    _as_rank,
    _main,
    checkpoint_state,
    environment,
    flags_of,
    free_port,
    rows,
)
from tests.warm_python import at_work, python

PREEMPTED = 75
SAVE_POLL_S = 0.0005  # a save takes some 10 ms
TIMES = {field.name for field in FIELDS if field.group == "perf"}


class LiveRun:
    """A script's `main` in `nproc` forked processes. A context manager: nothing it started survives it.

    flags: of the tiny ESM-2 on `dataset_dir`; or argv: a command line of another model's.
    """

    def __init__(
        self,
        dataset_dir: Path | None,
        output_dir: Path,
        logs: Path,
        nproc: int = 1,
        env: dict | None = None,
        script: str = "train_ddp.py",
        argv: list[str] | None = None,
        **flags,
    ):
        self.output_dir = output_dir
        logs.mkdir(parents=True, exist_ok=True)
        number = len(list(logs.iterdir()))
        self.logs = [logs / f"{number}-rank{rank}.log" for rank in range(nproc)]
        port, argv = free_port(), argv or flags_of(dataset_dir, output_dir, **flags)
        self.processes = [
            context().Process(target=_as_rank, args=(rank, nproc, port, log, _main_with, (argv, script, env or {})))
            for rank, log in enumerate(self.logs)
        ]

    def __enter__(self) -> LiveRun:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def signal(self, number: int, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.is_alive():
                os.kill(process.pid, number)

    def said(self, rank: int = 0) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def children(self, rank: int = 0) -> list[int]:
        """Process ids of the rank's loader workers."""
        return _children(self.processes[rank].pid)

    def until(self, happened: Callable[[], bool], poll: float = POLL_S) -> None:
        assert wait_until(happened, self.alive, poll, self.said), f"ended before:\n{self.said()}"

    def until_said(self, text: str, rank: int = 0) -> None:
        self.until(lambda: text in self.said(rank))

    def until_step(self, step: int) -> None:
        """Until that step is in metrics.jsonl."""
        self.until(lambda: any(row["step"] >= step for row in rows(self.output_dir)))

    def end(self, seconds: float = TIMEOUT_S) -> list[int]:
        """Exit codes, once all have ended."""
        join(self.processes, seconds)
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, "still running:\n" + "\n".join(map(self.said, range(len(self.processes))))
        return codes


def _main_with(argv: list[str], script: str, env: dict) -> None:
    os.environ |= env
    _main(argv, script)


def torchrun(
    dataset: Path, output_dir: Path, nproc: int, *launcher: str, script: str = "train_ddp.py", **flags
) -> subprocess.Popen:
    """torchrun, warm, in a process group of its own, its output and that of its ranks in one pipe."""
    start = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *launcher]
    command = [*start, str(ROOT / script), *flags_of(dataset, output_dir, **flags)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )


def ranks_of(agent: int) -> dict[int, int]:
    """{rank: process id} of the ranks of torchrun, or of extras.launch, which have one name and another parent."""
    found, agent = {}, at_work(agent)
    children = _children(agent)
    forked = [rank for child in children if is_running(child) for rank in _children(at_work(child))]
    for child in (*children, *forked):
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = at_work(child)
        except OSError:
            continue  # has just ended
        if name.startswith("rank-"):
            found[int(name.removeprefix("rank-"))] = rank
        elif child in children:
            found |= {int(v.removeprefix(b"RANK=")): rank for v in variables if v.startswith(b"RANK=")}
    return found


def _children(pid: int) -> list[int]:
    """Of its main thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_all(job: subprocess.Popen) -> None:
    """Kill -9 a torchrun and its ranks, which have sessions of their own, if they are still there."""
    if job.poll() is None:
        for pid in (*ranks_of(job.pid).values(), job.pid):
            os.kill(pid, signal.SIGKILL)
    communicate(job)


def newest_step(output_dir: Path) -> int:
    checkpoints = list_checkpoints(output_dir)
    return checkpoints[0][0] if checkpoints else 0


def trajectory(output_dir: Path) -> list[dict]:
    """metrics.jsonl without the times."""
    return [
        {
            key: value
            for key, value in row.items()
            if key not in TIMES and not key.startswith("eval_") or key == "eval_loss"
        }
        for row in rows(output_dir)
    ]


def outcome(output_dir: Path, step: int, scratch: Path) -> dict:
    """All tensors of a checkpoint, weights and optimiser, flat."""
    return _flat(checkpoint_state(output_dir / f"checkpoint-{step}", scratch))


def _flat(tree, prefix: str = "") -> dict:
    if isinstance(tree, dict):
        return {name: value for key, part in tree.items() for name, value in _flat(part, f"{prefix}{key}/").items()}
    if isinstance(tree, list | tuple):
        return _flat(dict(enumerate(tree)), prefix)
    return {prefix.rstrip("/"): tree}


def assert_same_run(one: Path, other: Path, step: int, scratch: Path, stopped: bool = False) -> None:
    """The same trajectory, each step once, and the same weights and optimiser state: bit for bit.

    stopped: `one` was stopped after that step, `other` was not.
    """
    expected = trajectory(other)
    assert trajectory(one) == ([row for row in expected if row["step"] <= step] if stopped else expected)
    a, b = outcome(one, step, scratch), outcome(other, step, scratch)
    assert a.keys() == b.keys()
    different = [name for name in a if not _same(a[name], b[name])]
    assert not different


def _same(a, b) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else a == b
