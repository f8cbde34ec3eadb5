"""MIN_NODES: an array of one-node jobs is one run, which a lost node does not end. On a real cluster."""

from __future__ import annotations

import re

import pytest

from tests.live_runs import newest_step
from tests.ops.slurm_cluster import SlurmCluster, missing
from tests.ops.test_slurm import flags, make_checkout, seldom
from tests.training_fixtures import TINY_MODEL, losses, rows, train
from tests.warm_python import programs

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.slow]
FLAGS = {"max_steps": 100_000, "packs_per_step": 2, "save_steps": 5, "save_total_limit": 2, "save_final_model": False}


@pytest.fixture
def cluster(tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "bin").symlink_to(programs())
    variables = {"MODEL": TINY_MODEL["config_name"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with SlurmCluster(checkout, variables) as cluster:
        yield cluster


@pytest.mark.parametrize("lost", ["n2", "n1"], ids=["another", "first"])
def test_array_continues_without_a_lost_node_and_takes_it_back(cluster, dataset, tmp_path, lost):
    """Of the first task's node, which has the rendezvous, the other waits for the successor."""
    out = tmp_path / "target" / "out-ddp"
    variables = {"TARGET_PATH": str(tmp_path / "target"), "DATASET_DIR": str(dataset), "PREFLIGHT": "off"}
    variables |= {"MIN_NODES": "1", "NPROC_PER_NODE": "1"}
    array = cluster.submit(f"--array=0-1 --nodes=1 slurm/train_ddp.sh {flags(**FLAGS)}", **variables)
    task = f"{array}_{0 if lost == 'n1' else 1}"
    state = seldom(lambda: cluster.job(task)["JobState"])
    start_now = seldom(lambda: cluster.start_now(task), 1)

    def said() -> str:
        return "\n".join(log.read_text() for log in cluster.checkout.glob("esm2-ddp_*.out"))

    def gets_on(nodes: int, starts: int) -> None:
        """The run has started so often on so many nodes, and makes new checkpoints."""
        cluster.until(
            lambda: start_now() or len(re.findall(rf"Device = cpu x {nodes},", said())) >= starts, f"no {nodes} nodes"
        )
        reached = newest_step(out)
        cluster.until(lambda: newest_step(out) >= reached + 10, f"{nodes} nodes do not get on")

    gets_on(2, 1)
    cluster.kill(lost)
    if lost == "n2":
        gets_on(1, 1)
        assert "the run continues on 1 node, 1 rank (it was on 2 nodes)" in said()
    cluster.until(lambda: state() == "PENDING", "Slurm does not requeue the task", 120)
    cluster.up(lost)
    gets_on(2, 2)
    cluster.on_head(f"scancel {array}")
    cluster.until(lambda: not cluster.on_head("squeue -h"), "the array does not end", 120, 0.5)
    done = newest_step(out)
    found = [row for row in rows(out) if row["step"] <= done]
    assert [row["step"] for row in found] == list(range(1, done + 1))
    train(dataset, tmp_path / "whole", **FLAGS, stop_at_step=done)
    # fp32 sums in two orders, as in tests/extras/launch/test_elastic.py
    assert [row["loss"] for row in found] == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
