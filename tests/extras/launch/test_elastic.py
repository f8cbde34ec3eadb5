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

    def __init__(self, log, endpoint: str, job: str, ranks: int, argv: list[str]):
        # Waits of seconds instead of minutes. A node whose heartbeat a busy machine keeps back for ten is dead; and
        # whoever joins has to write between two heartbeats of the others.
        patience = "join_timeout=60,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5"
        self.log = log
        command = [python(), "-m", "extras.launch", "--nnodes=1:2", f"--nproc_per_node={ranks}"]
        command += ["--max_restarts=10", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", f"--rdzv_id={job}"]
        command += [f"--rdzv_conf={patience}", "--local_addr=127.0.0.1", "--monitor_interval=0.3", *argv]
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT, start_new_session=True
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


@pytest.mark.parametrize(
    ("script", "ranks", "strategy"),
    [
        ("train_ddp.py", 1, {}),
        pytest.param("train_fsdp2.py", 1, {}, marks=pytest.mark.slow),
        ("train_fsdp2.py", 2, {"sharding_strategy": "hybrid"}),
    ],
    ids=["ddp", "fsdp2", "hsdp"],
)
def test_elastic_run_is_unchanged_by_a_node_that_leaves_and_returns(dataset, tmp_path, script, ranks, strategy):
    """ranks: of each node. Hybrid sharding has a replica on each."""
    out = tmp_path / "out"
    argv = [script, *flags_of(dataset, out, **FLAGS, **strategy)]
    endpoint, job = f"127.0.0.1:{free_port()}", uuid.uuid4().hex

    def node(name: str) -> Agent:
        return Agent(tmp_path / f"{name}.log", endpoint, job, ranks, argv)

    first = node("first")
    agents = [first]

    def said() -> str:
        return "\n".join(f"{agent.log.name}:\n{agent.log.read_text()}" for agent in agents)

    def wait_for(happened: Callable[[], bool]) -> None:
        """As long as no node leaves unless it is stopped: one that cannot join gives up after its join_timeout."""
        alive = [agent for agent in agents if agent.alive()]
        assert wait_until(happened, lambda: all(agent.alive() for agent in alive), 0.05, said), said()

    def starts(nodes: int) -> int:
        """How often the run has started on so many nodes; rank 0 announces it, on whichever node it is."""
        return said().count(f"Device = cpu x {nodes * ranks},")

    def starts_again(nodes: int, before: int) -> None:
        wait_for(lambda: starts(nodes) > before)
        reached = newest_step(out)
        wait_for(lambda: newest_step(out) >= reached + 10)

    try:
        wait_for(lambda: ranks_of(first.process.pid))
        agents.append(node("second"))
        starts_again(2, 0)
        alone, both = starts(1), starts(2)
        agents[-1].kill()
        starts_again(1, alone)
        agents.append(node("third"))
        starts_again(2, both)
    finally:
        for agent in agents:
            agent.kill()
    for nodes, before in ((1, 2), (2, 1)):
        assert f"the run continues on {nodes} node" in said()
        assert f"{nodes * ranks} rank" in said()
        assert f"(it was on {before} node" in said()
    done = newest_step(out)
    found = [row for row in rows(out) if row["step"] <= done]
    assert [row["step"] for row in found] == list(range(1, done + 1))
    train(dataset, tmp_path / "whole", **FLAGS, stop_at_step=done)
    # fp32 sums in two orders, and a few hundred steps for the difference to grow in
    assert [row["loss"] for row in found] == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    assert [row["loss"] for row in found][:30] == pytest.approx(losses(tmp_path / "whole")[:30], rel=1e-5)
