"""Preflight finds what is wrong with a node or between nodes: each fault is a real one, made for the test."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest

from common.preflight_report import table
from tests.training_fixtures import ROOT, TIMEOUT_S, _free_port, environment, on_ranks

NEW_MOUNTS, NEW_HOSTNAME = 0x00020000, 0x04000000  # flags of unshare(2)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


def preflight(
    *flags, nproc: int = 2, one_node: bool = False, before: dict | None = None
) -> tuple[list[int], list[str]]:
    """Exit statuses and output of `nproc` ranks, each a node of its own. before: what to do first, by rank."""
    return on_ranks(nproc, _as_node, [str(flag) for flag in flags], one_node, before or {})


def _as_node(flags: list[str], one_node: bool, before: dict) -> None:
    rank = os.environ.get("RANK", "0")
    if not one_node:
        os.environ |= {"GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for function, *arguments in before.get(int(rank), ()):
        function(*arguments)
    sys.argv = ["common/preflight.py", *flags]
    runpy.run_module("common.preflight", run_name="__main__")


def lines_of(said: str, word: str = "error") -> list[str]:
    return [line for line in said.splitlines() if line.startswith(f"{word}: ")]


# ---- a healthy run ------------------------------------------------------------------------------------------


def test_two_nodes_under_torchrun_as_the_job_scripts_start_it(dataset, tmp_path):
    """The table and the JSON tell the same; everything is looked at, within seconds; nothing is left behind."""
    output = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{_free_port()}", f"--rdzv_id={os.getpid()}"]
    command += ["-m", "common.preflight", f"--dataset_dir={dataset}", f"--output_dir={output}", "--fail_on=error"]
    command += ["--min_free_gb=0.1", f"--json={tmp_path / 'report.json'}"]
    agents = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT
        )
        for _ in range(2)
    ]
    try:
        said = "".join(agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["nodes"]) == (2, 2)
    assert report["seconds"] < 20
    assert table(report) in said
    checks = {row["check"]: row for row in report["checks"]}
    assert {"gpus", "versions", "shm", "output", "cache", "dataset", "hostnames", "interfaces"} <= checks.keys()
    assert {"clocks", "pairs", "all-reduce"} <= checks.keys()
    assert "240 train, 40 validation, 20 test" in checks["dataset"]["found"]
    (pair,) = report["pairs"]
    assert pair["ranks"] == [0, 1]
    assert 0 < pair["latency"] < 1
    assert pair["bandwidth"] > 1e6
    assert not output.exists()
    assert not list(tmp_path.glob(".preflight*"))
