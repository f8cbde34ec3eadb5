"""torchrun's agent with limits on restarts: none after bad input, a stop signal, or three starts without progress.

It overrides methods that torch documents for custom agents (torch.distributed.elastic.agent).
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
    """The ranks have exited because this node received a stop signal. torchrun then leaves the rendezvous open, in
    which the other nodes wait for this node's successor."""

    def __init__(self, number: int, failure: ProcessFailure):
        super().__init__(f"stopped by signal {number}", number)
        self.failure = failure


class Agent(LocalElasticAgent):
    """signals: those received, the launcher's own list; output_dir: the run's, None if it writes no checkpoints."""

    signals: list[int] = []
    output_dir: Path | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._counter: RestartCounter | None = None
        self._count_next = True  # False if nodes have only joined or left
        self._limit_message: str | None = None

    def run(self, role: str = "default") -> RunResult:
        result = super().run(role)
        if result.is_failed() and self._limit_message:
            raise UserError(f"{self._limit_message}; the last one: {_first_failure_message(result.failures)}")
        if result.is_failed() and self.signals:
            raise Stopped(self.signals[0], _first(result.failures))
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._counter = None
        if worker_group.group_rank == 0 and self.output_dir:
            job = unique_id() or worker_group.spec.rdzv_handler.get_run_id()
            self._counter = RestartCounter(self.output_dir, job)
            if self._count_next:
                self._counter.increment()
        self._count_next = False
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with _captured(api.logger) as records:
            result = super()._monitor_workers(worker_group)
        statuses = {failure.exitcode for failure in result.failures.values()}
        if BAD_INPUT not in statuses:  # the rank's own line says it all
            for record in records:
                api.logger.handle(record)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            sys.stderr.writelines(_error_lines(result.failures))
            self._count_next = True
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


def _error_lines(failures: dict[int, ProcessFailure]) -> list[str]:
    """The ranks' error lines (common.cli), each once: the ranks of a node share a command line."""
    messages = [failure.message for failure in sorted(failures.values(), key=lambda failure: failure.timestamp)]
    ours = [m["message"] for m in messages if isinstance(m, dict) and "py_callstack" not in m["extraInfo"]]
    return [f"{line}\n" for line in dict.fromkeys(ours)]


def _first(failures: dict[int, ProcessFailure]) -> ProcessFailure:
    return min(failures.values(), key=lambda failure: failure.timestamp)


def _first_failure_message(failures: dict[int, ProcessFailure]) -> str:
    if not failures:
        return "its ranks did not answer"
    failure = _first(failures)
    rank = next(rank for rank, other in failures.items() if other is failure)
    how = f"status {failure.exitcode}" if failure.exitcode >= 0 else f"killed by {failure.signal_name()}"
    return f"rank {rank} on {socket.gethostname()}: {how}, see its log"
