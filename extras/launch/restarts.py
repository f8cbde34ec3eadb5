"""Restarts of a job: none after bad input, a stop signal, or three starts in a row without a new checkpoint.

slurm/common.sh, torchrun's restarts and Kubernetes start a failed run again, without this for ever. The count is kept
beside the checkpoints (`.starts`), because each start may be on another machine; a new job counts from zero.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from common.cli import BAD_INPUT, UserError, one_line
from common.distributed.start_up import LAUNCHED
from common.distributed.stopping import PREEMPTED
from common.files.safe_files import open_private
from common.training.same_run import unique_job_id
from extras.launch.memory import LauncherMemory

MAX_STARTS = 3
FILE = ".starts"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of the pod's service account, if it has one
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def output_dir_of(arguments: list[str]) -> Path | None:
    """The train script's --output_dir; None for a command that writes no checkpoints to count starts by."""
    in_parts = any(Path(word).name in ("embed.py", "predict.py", "proteingym.py") for word in arguments)
    if in_parts or not {"-m", "--module"}.isdisjoint(arguments):
        return None
    output_dir = None
    for word, following in zip(arguments, [*arguments[1:], None], strict=False):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") in ("__output_dir", "__checkpoint_dir"):
            output_dir = value if equals else following
    return Path(output_dir) if output_dir else None


class RestartCounter:
    """Starts of `job` in a row that made no new checkpoint in `output_dir`; used by the launcher of rank 0.

    in_memory: the newest step there, which counts like a checkpoint. A start on another number of nodes than the last
    is not counted: a node was lost, or has returned. If the count cannot be written (no directory, no space) nothing
    is counted: the run itself reports the reason.
    """

    def __init__(self, output_dir: Path, job: str, in_memory: Callable[[], int | None] | None = None):
        self.output_dir, self.job, self.in_memory = output_dir, job, in_memory
        self._created = [path for path in (output_dir, *output_dir.parents) if not path.exists()]

    def increment(self) -> None:
        """Count a start. UserError if the limit is reached."""
        if self.exhausted():
            message = self.message()
            self.clear()  # submitted again, even under the same name, the job counts from zero
            raise UserError(message)
        self._write(self._read() + 1)

    def change_nodes(self, nodes: int) -> int | None:
        """Record on how many nodes this start is. Returns how many the job's last start was on if that differs."""
        before = self._saved().get("nodes")
        self._write(self._read(), nodes)
        return before if isinstance(before, int) and before != nodes else None

    def exhausted(self) -> bool:
        return self._read() >= MAX_STARTS

    def decrement(self) -> None:
        """Do not count the last start: a signal stopped it."""
        self._write(max(0, self._read() - 1))

    def clear(self) -> None:
        """The job is over: remove the count, and directories made for it that are empty."""
        with suppress(OSError):
            (self.output_dir / FILE).unlink(missing_ok=True)
            for path in self._created:  # upwards
                path.rmdir()

    def message(self) -> str:
        newest = self._newest_checkpoint()
        stands = "there is none" if newest is None else f"the newest is still checkpoint-{newest}"
        return (
            f"{self.output_dir}: not started again: {MAX_STARTS} starts of this job in a row made no new checkpoint "
            f"({stands}): fix what ended them, or save more often (--save_steps), then submit it anew"
        )

    def _saved(self) -> dict[str, Any]:
        """What the job's last start has left; empty for a new job."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads((self.output_dir / FILE).read_text())
            if saved["job"] == self.job:
                return saved
        return {}

    def _read(self) -> int:
        saved = self._saved()
        with suppress(ValueError, KeyError, TypeError):
            if saved["newest"] == self._newest_step():
                return int(saved["starts"])
        return 0

    def _write(self, starts: int, nodes: int | None = None) -> None:
        content = {"job": self.job, "newest": self._newest_step(), "starts": starts}
        content["nodes"] = nodes or self._saved().get("nodes")
        with suppress(OSError):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            with open(self.output_dir / FILE, "w", opener=open_private) as file:
                file.write(json.dumps(content))

    def _newest_step(self) -> int | None:
        """Of the checkpoints on the disk and in memory."""
        steps = (self._newest_checkpoint(), self.in_memory and self.in_memory())
        return max((step for step in steps if step is not None), default=None)

    def _newest_checkpoint(self) -> int | None:
        """Its step; a checkpoint gets its name when it is complete."""
        try:
            matches = [_CHECKPOINT.fullmatch(path.name) for path in self.output_dir.iterdir()]
        except OSError:
            return None
        return max((int(match[1]) for match in matches if match), default=None)


class Stopped(SignalException):
    """The ranks have exited because this node received a stop signal. torchrun then leaves the rendezvous open, in
    which the other nodes wait for this node's successor."""

    def __init__(self, number: int, failure: ProcessFailure):
        super().__init__(f"stopped by signal {number}", signal.Signals(number))
        self.failure = failure


class Agent(LocalElasticAgent):
    """torchrun's agent; the methods are those that torch documents for custom agents.

    signals: those received, the launcher's own list; output_dir: the run's, None if it writes no checkpoints; memory:
    for its states.
    """

    signals: list[int] = []
    output_dir: Path | None = None
    memory: LauncherMemory | None = None
    begun = 0.0  # when the launcher was started, seconds since the epoch

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._counter: RestartCounter | None = None
        self._count_next = True  # False if nodes have only joined
        self._resumed_at: int | None = None  # the newest step in memory at the last start
        self._futile_starts = 0  # from there, that failed before they came further
        self._ended = {"begun": self.begun}  # common.distributed.start_up.LAUNCHED: its beginning
        self._limit_message: str | None = None

    def run(self, role: str = "default") -> RunResult:
        result = super().run(role)
        if result.is_failed() and self._limit_message:
            raise UserError(f"{self._limit_message}; the last one: {_first_failure_message(result.failures)}")
        if result.is_failed() and self.signals:
            raise Stopped(self.signals[0], _by_time(result.failures)[0])
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._counter = None
        newest = self.memory and self.memory.newest()
        came_no_further = newest is not None and newest == self._resumed_at
        self._futile_starts = self._futile_starts + self._count_next if came_no_further else 0
        if self.memory and self._futile_starts > 1:  # the state may be the reason: take the checkpoint on the disk
            self.memory.clear()
            newest = None
        self._resumed_at = newest
        os.environ[LAUNCHED] = json.dumps(self._ended | {"rendezvous": time.time()})
        if worker_group.group_rank == 0 and self.output_dir:
            job = unique_job_id() or worker_group.spec.rdzv_handler.get_run_id()
            self._counter = RestartCounter(self.output_dir, job, self.memory.newest if self.memory else None)
            nodes, ranks = worker_group.group_world_size, worker_group.workers[0].world_size
            if before := self._counter.change_nodes(nodes):
                now = f"{_number(nodes, 'node')}, {_number(ranks, 'rank')}"
                sys.stderr.write(f"the run continues on {now} (it was on {_number(before, 'node')})\n")
            elif self._count_next:
                self._counter.increment()
        self._count_next = False
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._ended = {"noticed": time.time()}
        with _captured(api.logger) as records:
            result = super()._monitor_workers(worker_group)
        statuses = {failure.exitcode for failure in result.failures.values()}
        if BAD_INPUT not in statuses:  # the rank's own line says it all
            for record in records:
                api.logger.handle(record)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            messages = [failure.message for failure in _by_time(result.failures)]
            # The ranks' error lines (common.cli), each once: the ranks of a node share a command line.
            lines = [m["message"] for m in messages if isinstance(m, dict) and "py_callstack" not in m["extraInfo"]]
            sys.stderr.writelines(f"{line}\n" for line in dict.fromkeys(lines))
            self._count_next = True
            self._ended["teardown"] = time.time()
            self._limit_restarts(statuses)
        elif result.state == WorkerState.SUCCEEDED and self._counter:
            self._counter.clear()
        return result

    def _limit_restarts(self, statuses: set[int]) -> None:
        """Set torchrun's remaining restarts to 0 if it must not start the ranks again."""
        if BAD_INPUT in statuses or self.signals:
            self._remaining_restarts = 0
        if not self._counter:
            return
        if BAD_INPUT in statuses:
            self._counter.clear()
        elif PREEMPTED in statuses or self.signals:
            self._counter.decrement()
        elif self._counter.exhausted():
            self._remaining_restarts = 0
            self._limit_message = self._counter.message()
            self._counter.clear()


@contextmanager
def _captured(logger: logging.Logger) -> Iterator[list[logging.LogRecord]]:
    """Collect the logger's records instead of emitting them."""
    records: list[logging.LogRecord] = []

    def capture(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(capture)
    try:
        yield records
    finally:
        logger.removeFilter(capture)


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _by_time(failures: dict[int, ProcessFailure]) -> list[ProcessFailure]:
    return sorted(failures.values(), key=lambda failure: failure.timestamp)


def _first_failure_message(failures: dict[int, ProcessFailure]) -> str:
    if not failures:
        return "its ranks did not answer"
    failure = _by_time(failures)[0]
    rank = next(rank for rank, other in failures.items() if other is failure)
    how = f"status {failure.exitcode}" if failure.exitcode >= 0 else f"killed by {failure.signal_name()}"
    return f"rank {rank} on {socket.gethostname()}: {how}, see its log"


def set_job_uid(account: Path = ACCOUNT) -> None:
    """Set JOB_UID, for the ranks too, to the owner of this pod as the Kubernetes API has it.

    Unless it is set already (trainjob-template.yaml) or the pod has no account. Without an answer jobs are told apart
    by rendezvous id, flags and time.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if os.environ.get("JOB_UID") or not host or not (account / "token").exists():
        return
    try:
        namespace, token = ((account / name).read_text().strip() for name in ("namespace", "token"))
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods/{socket.gethostname()}"
        context = ssl.create_default_context(cafile=account / "ca.crt")
        # Not through a proxy that the pod's variables name for other hosts.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        with opener.open(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=20) as answer:
            owners = json.load(answer)["metadata"]["ownerReferences"]
        os.environ["JOB_UID"] = next(owner["uid"] for owner in owners if owner.get("controller"))
    except (OSError, HTTPException, ValueError, KeyError, TypeError, StopIteration) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        sys.stderr.write(f"warning: the API does not say this pod's job (kubernetes/job-uid.yaml): {reason}\n")
