"""The scripts of slurm/, submitted to a real cluster of two nodes: gloo on CPUs, a tiny model, real faults."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from common.sample import write_sample
from tests.live_runs import assert_same_run, newest_step
from tests.ops.slurm_cluster import SlurmCluster, missing
from tests.training_fixtures import ROOT, TINY_MODEL, TINY_OVERRIDES, flags_of, losses, rows, train

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

STEPS = 600
FLAGS = {"max_steps": STEPS, "save_steps": 50, "bf16": True, "save_final_model": False}
TWO_NODES = "--nodes=2 --gpus-per-node=1"  # one rank on each


def flags(**more) -> str:
    """What comes after the script: those flags of a tiny run that no variable gives."""
    return " ".join(flags_of(None, None, **{"config_name": None, "config_overrides": TINY_OVERRIDES} | more))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes, and a checkout where jobs are submitted: their logs stay there."""
    checkout = tmp_path_factory.mktemp("slurm") / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".sh") or path.name in ("common", "slurm"):
            (checkout / path.name).symlink_to(path)
    (checkout / ".venv").symlink_to(sys.prefix)
    variables = {"MODEL": TINY_MODEL["config_name"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with SlurmCluster(checkout, variables) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory) -> Path:
    """The run of FLAGS on two ranks, never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    train(dataset, out, 2, **FLAGS | {"do_eval": True})
    return out


def start(cluster, dataset: Path, target: Path, options: str = "") -> int:
    """Submit a job that does the run of FLAGS; it is under way."""
    job = cluster.submit(
        f"{TWO_NODES} {options} slurm/train_ddp.sh {flags(**FLAGS)}",
        TARGET_PATH=str(target),
        DATASET_DIR=str(dataset),
        PREFLIGHT="off",
    )
    cluster.until(lambda: len(rows(target / "out-ddp")) > 60, "no step was done")
    return job


def said(cluster, job: int) -> str:
    (log,) = cluster.checkout.glob(f"*_{job}.out")
    return log.read_text()


def test_data_then_training(cluster, tmp_path):
    """FASTA to a model by three jobs, each of which waits for the one before."""
    target = tmp_path / "target"
    write_sample(tmp_path / "my.fasta", num_proteins=150, seed=1)
    data = cluster.on_head(
        f"slurm/submit_data.sh --source {tmp_path}/my.fasta -- --validation_size 10 --test_size 5 2>/dev/null",
        TARGET_PATH=str(target),
    )
    job = cluster.submit(
        f"--dependency=afterok:{data} --kill-on-invalid-dep=yes --gpus-per-node=2 slurm/train_fsdp.sh {flags()}",
        TARGET_PATH=str(target),
    )
    assert cluster.job(job)["JobState"] == "PENDING"
    assert cluster.end(job) == "COMPLETED", cluster.said()
    out = target / "out-fsdp"
    assert json.loads((out / "all_results.json").read_text())["eval_samples"] == 10
    train(target / "processed" / "arrow", tmp_path / "one", 4, script="train_fsdp2.py", bf16=True)
    assert losses(out) == losses(tmp_path / "one")
    logs = [*(cluster.checkout / "logs" / f"esm2-fsdp_{job}" / "0").glob("n[12]/*/attempt_0/[01]/stderr.log")]
    assert len(logs) == 4
    assert sum("***** Running training *****" in log.read_text() for log in logs) == 1
    assert "***** Running training *****" in said(cluster, job)


def test_the_walltime_comes_near(cluster, dataset, whole, tmp_path):
    """Warned, saved, requeued, and then the run that was never interrupted, to the bit."""
    job = start(cluster, dataset, tmp_path)
    # Slurm looks at walltimes every half minute. The run is held so long, so that it needs not be a long one.
    cluster.signal_ranks(job, signal.SIGSTOP)
    cluster.on_head(f"scontrol update JobId={job} TimeLimit=3")
    cluster.until(lambda: "SIGUSR1: the job's time is nearly over" in said(cluster, job), "no warning")
    assert newest_step(tmp_path / "out-ddp") < STEPS
    cluster.signal_ranks(job, signal.SIGCONT)
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", "not requeued")
    cluster.on_head(f"scontrol update JobId={job} TimeLimit=10")
    assert cluster.end(job) == "COMPLETED", cluster.said()
    assert "Stopped as asked, the state is saved" in said(cluster, job)
    assert "Resuming after step" in said(cluster, job)
    assert_same_run(tmp_path / "out-ddp", whole, STEPS, tmp_path)


def test_a_node_dies(cluster, dataset, whole, tmp_path):
    job = start(cluster, dataset, tmp_path)
    cluster.kill("n2")
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", "not requeued")
    assert newest_step(tmp_path / "out-ddp") < STEPS
    cluster.up("n2")
    assert cluster.end(job) == "COMPLETED", cluster.said()
    assert_same_run(tmp_path / "out-ddp", whole, STEPS, tmp_path)


def test_scancel_saves_and_the_job_does_not_come_back(cluster, dataset, whole, tmp_path):
    job = start(cluster, dataset, tmp_path)
    cluster.on_head(f"scancel {job}")
    assert cluster.end(job) == "CANCELLED"
    cluster.until(lambda: "not requeueing" in said(cluster, job), "the script did not end")
    assert not cluster.ranks(job)
    out = tmp_path / "out-ddp"
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    assert cluster.job(job)["Restarts"] == "0"

