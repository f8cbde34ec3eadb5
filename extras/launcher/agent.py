"""torchrun's agent, with a rule for starting again: not after bad input, nor when told to stop, nor thrice in vain.

What is overridden are methods that torch documents for an agent of one's own (torch.distributed.elastic.agent).
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from common.cli import BAD_INPUT, UserError
from common.distributed.stopping import PREEMPTED
from extras.launcher.restart_limit import RestartCounter, unique_id


class Stopped(SignalException):
    """The ranks have ended because this node was told to stop; torchrun then leaves the rendezvous open, in which the
    other nodes wait for its successor."""

    def __init__(self, number: int, failure: ProcessFailure):
        super().__init__(f"told to stop by signal {number}", number)
        self.failure = failure


class Agent(LocalElasticAgent):
    """told: signals that have come, in the launcher's own list; output_dir: of the run, None for what is no run."""

    told: list[int] = []
    output_dir: Path | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._starts: RestartCounter | None = None
        self._counts = True  # the next start, unless nodes have only joined or left
        self._verdict: str | None = None

    def run(self, role: str = "default") -> RunResult:
        result = super().run(role)
        if result.is_failed() and self._verdict:
            raise UserError(f"{self._verdict}; the last one: {_what_happened(result.failures)}")
        if result.is_failed() and self.told:
            raise Stopped(self.told[0], _first(result.failures))
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if worker_group.group_rank == 0 and self.output_dir:
            self._starts = RestartCounter(self.output_dir, unique_id() or worker_group.spec.rdzv_handler.get_run_id())
            if self._counts:
                self._starts.begin()
        else:
            self._starts = None
        self._counts = False
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with _held_back(api.logger) as records:
            result = super()._monitor_workers(worker_group)
        statuses = {failure.exitcode for failure in result.failures.values()}
        if BAD_INPUT not in statuses:  # that one's line says all there is to know
            for record in records:
                api.logger.handle(record)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            sys.stderr.writelines(_last_words(result.failures))
            self._counts = True
            self._decide(statuses)
        elif result.state == WorkerState.SUCCEEDED and self._starts:
            self._starts.end()
        return result

    def _decide(self, statuses: set[int]) -> None:
        """Whether torchrun may start the ranks again, if it has restarts left."""
        if BAD_INPUT in statuses or self.told:
            self._remaining_restarts = 0
        if not self._starts:
            return
        if BAD_INPUT in statuses:
            self._starts.end()
        elif PREEMPTED in statuses or self.told:
            self._starts.forget()
        elif self._starts.spent():
            self._remaining_restarts = 0
            self._verdict = self._starts.verdict()
            self._starts.end()


@contextmanager
def _held_back(logger: logging.Logger) -> Iterator[list[logging.LogRecord]]:
    """What the logger would have said."""
    records: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield records
    finally:
        logger.removeFilter(hold)


def _last_words(failures: dict[int, ProcessFailure]) -> list[str]:
    """The error lines that ranks have left (common.cli), each once: the ranks of a node share a command line."""
    said = [failure.message for failure in sorted(failures.values(), key=lambda failure: failure.timestamp)]
    ours = [each["message"] for each in said if isinstance(each, dict) and "py_callstack" not in each["extraInfo"]]
    return [f"{line}\n" for line in dict.fromkeys(ours)]


def _first(failures: dict[int, ProcessFailure]) -> ProcessFailure:
    return min(failures.values(), key=lambda failure: failure.timestamp)


def _what_happened(failures: dict[int, ProcessFailure]) -> str:
    if not failures:
        return "its ranks did not answer"
    failure = _first(failures)
    rank = next(rank for rank, other in failures.items() if other is failure)
    how = f"status {failure.exitcode}" if failure.exitcode >= 0 else f"killed by {failure.signal_name()}"
    return f"rank {rank} on {socket.gethostname()}: {how}, see what it said"
