"""Preflight finds what is wrong with a node or between nodes: each fault is a real one, made for the test."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from extras.preflight.report import ERROR, OK, WARN, table
from tests.patience import communicate
from tests.training_fixtures import ROOT, environment, free_port, on_ranks
from tests.warm_python import python

NEW_MOUNTS, NEW_HOSTNAME = 0x00020000, 0x04000000  # flags of unshare(2)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


def preflight(*flags, nproc: int = 2, per_node: int = 1, before: dict | None = None) -> tuple[list[int], list[str]]:
    """Exit statuses and output of `nproc` ranks, `per_node` of them a "node". before: what to do first, by rank."""
    return on_ranks(nproc, _as_rank, [str(flag) for flag in flags], per_node, before or {})


def _as_rank(flags: list[str], per_node: int, before: dict) -> None:
    rank = int(os.environ.get("RANK", 0))
    place = {"GROUP_RANK": rank // per_node, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    os.environ |= {name: str(value) for name, value in place.items()}
    for function, *arguments in before.get(rank, ()):
        function(*arguments)
    sys.argv = ["extras/preflight/__main__.py", *flags]
    runpy.run_module("extras.preflight", run_name="__main__")


def lines_of(said: str, word: str = "error") -> list[str]:
    return [line for line in said.splitlines() if line.startswith(f"{word}: ")]


# ---- a healthy run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_preflight_of_two_nodes_under_torchrun(dataset, tmp_path):
    """The table and the JSON tell the same; everything is checked within seconds; nothing is left behind."""
    output = tmp_path / "out"
    command = [python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", f"--rdzv_id={os.getpid()}"]
    command += ["-m", "extras.preflight", f"--dataset_dir={dataset}", f"--output_dir={output}", "--fail_on=error"]
    command += ["--min_free_gb=0.1", "--timeout=150", f"--json={tmp_path / 'report.json'}"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment(), "cwd": ROOT}
    agents = [subprocess.Popen(command, **options) for _ in range(2)]
    try:
        said = "".join(communicate(agent)[0] for agent in agents)
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


def test_preflight_of_three_nodes_of_two_ranks(tmp_path):
    """Only the first rank of a node stands for it; each node is in two pairs, though their number is odd."""
    codes, said = preflight(f"--json={tmp_path}/report.json", nproc=6, per_node=2)
    assert codes == [0] * 6, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["nodes"]) == (6, 3)
    assert sorted(sorted(pair["ranks"]) for pair in report["pairs"]) == [[0, 2], [0, 4], [2, 4]]
    checks = {row["check"]: row for row in report["checks"]}
    assert [place.split(" (")[0] for place in checks["shm"]["where"]] == ["rank 0", "rank 2", "rank 4"]
    assert checks["all-reduce"]["found"].startswith("all 6 ranks: ")


def test_preflight_of_one_process(dataset):
    codes, (said,) = preflight(f"--dataset_dir={dataset}", "--json=-", nproc=1)
    report = json.loads(said[said.index("\n{\n") :])
    assert codes == [0]
    assert report["level"] == OK
    assert (report["ranks"], report["nodes"], report["pairs"]) == (1, 1, [])
    assert table(report) in said


def test_preflight_reads_only_the_start_of_a_dataset(tmp_path):
    """A line that is no JSON, far behind the first proteins, is not come across."""
    proteins = "".join(f'{{"sequence": "MKT{"A" * 400}"}}\n' for _ in range(40_000))
    (tmp_path / "train.jsonl").write_text(proteins + "no json\n")
    codes, said = preflight(f"--dataset={tmp_path / 'train.jsonl'}")
    assert codes == [0, 0], said
    assert "1 train files (0.02 GB)" in said[0]


# ---- faults of a node ---------------------------------------------------------------------------------------


def _environ(name: str, value) -> None:
    os.environ[name] = str(value)


def fails(said: list[str], codes: list[int], *expected: str) -> None:
    """Every rank ends with status 2 and rank 0 alone says why, in one line that holds what is expected."""
    assert codes == [2] * len(codes), said
    (line,) = lines_of(said[0])
    for part in expected:
        assert part in line
    assert not any(lines_of(each) for each in said[1:]), said


EFA = [(_environ, "FI_PROVIDER", "efa")]
NO_GLOO = [(_environ, "GLOO_SOCKET_IFNAME", "nope0")]


@pytest.mark.parametrize(
    ("flag", "nproc", "before", "expected"),
    [
        ("--gpus_per_node=8", 2, {}, ("error: gpus: all 2 nodes: ", "8 required", "nvidia-smi")),
        ("--use_cpu", 2, {0: EFA, 1: EFA}, ("efa: all 2 nodes: FI_PROVIDER=efa, but there is no EFA device", "TCP")),
        ("--use_cpu", 1, {0: NO_GLOO}, ("interfaces: rank 0", "GLOO_SOCKET_IFNAME=nope0: there is no nope0")),
        ("--json={0}/none/report", 2, {}, ("error: --json {0}/none/report: No such file or directory",)),
        ("--output_dir={0}/file", 1, {}, ("{0}/file is a file, not a directory",)),
        (
            "--dataset_dir={0}/none",
            2,
            {},
            ("dataset: all 2 nodes", "no such directory", "1.tokenize_uniref_csv.py"),
        ),
    ],
    ids=["gpus", "efa", "gloo", "json", "output", "dataset"],
)
def test_preflight_reports_a_fault_in_one_line(tmp_path, flag, nproc, before, expected):
    (tmp_path / "file").touch()
    codes, said = preflight(flag.format(tmp_path), nproc=nproc, before=before)
    fails(said, codes, *(part.format(tmp_path) for part in expected))


def test_preflight_reports_a_truncated_dataset(dataset, tmp_path):
    torn = shutil.copytree(dataset, tmp_path / "torn")
    (file,) = (torn / "train").glob("*.arrow")
    os.truncate(file, file.stat().st_size // 2)
    codes, said = preflight(f"--dataset_dir={torn}", nproc=1)
    fails(said, codes, "dataset: rank 0", str(file), "tokenise again")


@needs_root
def test_preflight_reports_data_that_differ_between_nodes(dataset, tmp_path):
    """The same path, but another directory behind it on the second node."""
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    shutil.copytree(dataset / "validation", other / "train", dirs_exist_ok=True)
    codes, said = preflight(f"--dataset_dir={dataset}", before={1: [(_own_mounts,), (_bind, other, dataset)]})
    fails(said, codes, "dataset/train differs between nodes", "-240 on", "-40 on")


def _own_mounts() -> None:
    _unshare(NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _bind(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--bind", source, target], check=True)


def _tmpfs(target: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", target], check=True)


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


@needs_root
def test_preflight_reports_dockers_shared_memory():
    small = {1: [(_own_mounts,), (_tmpfs, Path("/dev/shm"), "size=64m")]}
    codes, said = preflight(before=small)
    fails(said, codes, "error: shm: rank 1", "too small for loader workers", "--shm-size", "medium: Memory")
    codes, said = preflight("--dataloader_num_workers=0", before=small)
    assert codes == [0, 0], said
    assert "shm: rank 1" in "".join(lines_of(said[0], "warning"))
    codes, said = preflight("--dataloader_num_workers=0", "--fail_on=warn", before=small)
    assert codes == [2, 2]


@needs_root
def test_preflight_reports_unusable_output_directory(tmp_path):
    output = tmp_path / "shared" / "out"
    output.mkdir(parents=True)
    for options, expected in (
        ("ro,size=64m", f"{output}: cannot be written to (Read-only file system)"),
        ("size=64m", "(tmpfs): 0.1 GB free: free disk space"),
    ):
        mounted = {0: [(_own_mounts,), (_tmpfs, output.parent, options)]}
        codes, said = preflight(f"--output_dir={output}", nproc=1, before=mounted)
        fails(said, codes, "output: rank 0", expected)
    own = {1: [(_own_mounts,), (_tmpfs, output.parent, "size=8g")]}
    codes, said = preflight(f"--output_dir={output}", "--min_free_gb=0.1", before=own)
    fails(said, codes, "output: rank 1", f"{output.parent} is not the directory that rank 0 sees there")
    assert "lost with the container" in said[0]


@needs_root
def test_preflight_reports_an_unwritable_cache(tmp_path):
    (tmp_path / "cache").mkdir()
    mount = f"mount -t tmpfs -o ro,size=1m tmpfs {tmp_path}/cache"
    command = f"{mount} && HF_HOME={tmp_path}/cache exec {sys.executable} -m extras.preflight"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert "Read-only file system" in done.stderr
    assert "set HF_HOME" in "".join(lines_of(done.stderr, "warning"))


@needs_root
def test_preflight_reports_unresolved_host_name():
    """The second node's name does not resolve: for itself an error (gloo needs it), to the others a warning."""
    codes, said = preflight(before={1: [(_own_name, "unknown-host")]})
    errors = lines_of(said[0])
    assert codes == [2, 2]
    assert "rank 1 (unknown-host): its own name unknown-host does not resolve" in errors[0]
    assert any("other nodes' names do not resolve: unknown-host" in line for line in lines_of(said[0], "warning"))


def _own_name(name: str) -> None:
    _unshare(NEW_HOSTNAME)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.sethostname(name.encode(), len(name)) == 0


def test_preflight_reports_variables_that_leave_no_interface():
    names = ",".join(name for _, name in socket.if_nameindex())
    codes, said = preflight("--fail_on=warn", before={1: [(_environ, "NCCL_SOCKET_IFNAME", f"^{names}")]})
    assert codes == [2, 2]  # a warning only: gloo does not read that variable
    assert "rank 1" in "".join(lines_of(said[0], "warning"))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--frobnicate", "unknown flag --frobnicate"),
        ("--fail_on=never", "--fail_on never: choose error, warn"),
        ("--timeout=0", "--timeout 0.0: must be above 0"),
    ],
)
def test_preflight_refuses_wrong_flags(flag, message):
    codes, (said,) = preflight(flag, nproc=1)
    assert codes == [2]
    assert message in said
    assert len(said.splitlines()) == 1


# ---- faults between nodes -----------------------------------------------------------------------------------

PATIENCE = 10  # seconds; on a busy machine the ranks that do come are seconds apart


def test_preflight_names_a_missing_rank():
    codes, said = preflight(f"--timeout={PATIENCE}", nproc=3, before={1: [(_stay_away,)]})
    assert codes[0] == codes[2] == 2
    assert len(lines_of(said[0])) == 1, said[0]
    (line,) = lines_of(said[0])
    assert f"rank 1 (node 1, no rank of which has started) has not started within {PATIENCE} s" in line
    assert float(said[0].split(" nodes, ")[1].split(" s")[0]) < 3 * PATIENCE
    assert not lines_of(said[2])


def test_preflight_names_a_missing_rank_of_a_node_that_answers():
    codes, said = preflight(f"--timeout={PATIENCE}", nproc=4, per_node=2, before={3: [(_stay_away,)]})
    assert codes == [2, 2, 2, 9]
    (line,) = lines_of(said[0])
    assert f"rank 3 ({socket.gethostname()}) has not started within {PATIENCE} s" in line


def _stay_away() -> None:
    """It never connects: for the others this is as if it came too late."""
    os._exit(9)


def test_preflight_reports_missing_rank_0():
    codes, said = preflight(f"--timeout={PATIENCE}", before={0: [(_stay_away,)]})
    assert codes == [9, 2]
    (line,) = lines_of(said[1])
    assert "rank 1: rank 0 does not answer at 127.0.0.1:" in line


@pytest.mark.parametrize(
    ("function", "step"),
    [("init_process_group", "rank 1"), ("new_group", "an all-reduce between rank 0 (")],
    ids=["before the clocks", "in a pair"],
)
def test_preflight_names_a_rank_that_stops_answering(function, step):
    codes, said = preflight("--timeout=2", before={1: [(_freeze_after, function)]})
    assert codes == [2, -signal.SIGKILL]
    errors = lines_of(said[0])
    assert any(step in line for line in errors), errors
    assert any("rank 1 (" in line and "stopped answering within 2 s" in line for line in errors), errors
    assert "no rank of which" not in said[0]


def _freeze_after(function: str) -> None:
    """As a machine that dies in a call of torch.distributed: no answer, no closed connection. A shell kills it."""
    original = getattr(dist, function)

    def freeze(*args, **kwargs) -> None:
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGSTOP)

    setattr(dist, function, freeze)
    subprocess.Popen(["sh", "-c", f"sleep 15; kill -9 {os.getpid()}"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
def test_preflight_reports_clock_skew(tmp_path):
    """One node's clock is really 40 s ahead, another's 20 minutes behind, for all that they can tell."""
    port = free_port()
    nodes = []
    for rank, shift in enumerate((None, "+40s", "-1200s")):
        variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FAKETIME_DONT_FAKE_MONOTONIC": 1}
        variables = environment() | {name: str(value) for name, value in variables.items()}
        # python(): a shifted clock, which is a library loaded first, has it start a real one
        command = [python(), "-m", "extras.preflight", "--timeout=150", f"--json={tmp_path}/report.json"]
        start = ["faketime", "-f", shift] if shift else []
        pipes = {"stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen([*start, *command], env=variables, cwd=ROOT, **pipes))
    try:
        said = [communicate(node)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [2, 2, 2], said
    assert len(lines_of(said[0])) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    found = [(row["level"], row["found"]) for row in report["checks"] if row["check"] == "clocks"]
    for (level, what), (expected, who, direction, seconds) in zip(
        found, ((WARN, "rank 1", "ahead of", 40), (ERROR, "rank 2", "behind", 1200)), strict=True
    ):
        assert level == expected
        assert what.startswith(who)
        assert f" s {direction} rank 0" in what
        assert abs(float(what.split(" is ")[1].split()[0]) - seconds) < 0.5
