"""--nnodes=1:2: nodes leave and return, the run resumes with the same global batch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Callable

import pytest

from tests.live_runs import newest_step, ranks_of, wait_until
from tests.training_fixtures import ROOT, environment, flags_of, free_port, losses, rows, train
from tests.warm_python import python

FLAGS = {"max_steps": 100_000, "packs_per_step": 2, "save_steps": 5, "save_total_limit": 2, "logging_steps": 1}


class Agent:
    """One node's launcher, in a process group of its own."""

    def __init__(self, log, endpoint: str, job: str, argv: list[str]):
        # Waits of seconds instead of minutes. A node whose heartbeat a busy machine keeps back for ten is dead; and
        # whoever joins has to write between two heartbeats of the others.
        patience = "join_timeout=60,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5"
        self.log = log
        command = [python(), "-m", "extras.launch", "--nnodes=1:2", "--nproc_per_node=1"]
        command += ["--max_restarts=10", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", f"--rdzv_id={job}"]
        command += [f"--rdzv_conf={patience}", "--local_addr=127.0.0.1", "--monitor_interval=0.3", *argv]
        with open(log, "w") as file:
            # torch 2.13: agents that share the ranks' store never tell a new one where it is, and both wait for ever.
            env = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """The node is gone: agent and ranks at once."""
        ranks = ranks_of(self.process.pid).values() if self.alive() else ()
        for pid in (*ranks, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def test_elastic_run_is_unchanged_by_a_node_that_leaves_and_returns(dataset, tmp_path):
    out = tmp_path / "out"
    argv = ["train_fsdp2.py", *flags_of(dataset, out, **FLAGS)]
    endpoint, job = f"127.0.0.1:{free_port()}", uuid.uuid4().hex
    first = Agent(tmp_path / "first.log", endpoint, job, argv)
    agents = [first]

    def said() -> str:
        return "\n".join(f"{agent.log.name}:\n{agent.log.read_text()}" for agent in agents)

    def wait_for(happened: Callable[[], bool]) -> None:
        """As long as no node leaves unless it is stopped: one that cannot join gives up after its join_timeout."""
        alive = [agent for agent in agents if agent.alive()]
        assert wait_until(happened, lambda: all(agent.alive() for agent in alive), 0.05, said), said()

    def starts(ranks: int) -> int:
        """How often the run has started with so many ranks; rank 0 announces it, on whichever node it is."""
        return sum(agent.log.read_text().count(f"Device = cpu x {ranks},") for agent in agents)

    def starts_again(ranks: int, before: int) -> None:
        wait_for(lambda: starts(ranks) > before)
        reached = newest_step(out)
        wait_for(lambda: newest_step(out) >= reached + 10)

    try:
        wait_for(lambda: ranks_of(first.process.pid))
        agents.append(Agent(tmp_path / "second.log", endpoint, job, argv))
        starts_again(2, 0)
        alone, both = starts(1), starts(2)
        agents[-1].kill()
        starts_again(1, alone)
        agents.append(Agent(tmp_path / "third.log", endpoint, job, argv))
        starts_again(2, both)
    finally:
        for agent in agents:
            agent.kill()
    done = newest_step(out)
    found = [row for row in rows(out) if row["step"] <= done]
    assert [row["step"] for row in found] == list(range(1, done + 1))
    train(dataset, tmp_path / "whole", **FLAGS, stop_at_step=done)
    # fp32 sums in two orders, and a few hundred steps for the difference to grow in
    assert [row["loss"] for row in found] == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    assert [row["loss"] for row in found][:30] == pytest.approx(losses(tmp_path / "whole")[:30], rel=1e-5)
