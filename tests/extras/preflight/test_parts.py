"""The parts of preflight that need no second process: arithmetic, merging, and what other programs' output means."""

from __future__ import annotations

import resource
import subprocess
import threading

import pytest

from common.cli import UserError
from extras.preflight.group import Timing, check_clock, clock_offset, outliers, ring_rounds
from extras.preflight.network import check_efa, check_interfaces, check_nccl_log, efa_devices, interfaces_left
from extras.preflight.node import bytes_needed, check_output, checkpoint_bytes, named_model, nvidia_driver
from extras.preflight.report import (
    ERROR,
    OK,
    WARN,
    Finding,
    LocalChecks,
    RankReport,
    differences,
    merge,
    problems,
    table,
)


def test_clock_offset_uses_the_shortest_round_trip():
    exact = (10.0, 40.001, 10.002)  # 30 s ahead, 2 ms there and back
    assert clock_offset([(9.0, 39.9, 9.9), exact, (11.0, 41.0, 11.5)]) == pytest.approx((30.0, 0.001))
    assert check_clock("n2", 1.5, 0.6, 1.0) is None  # may be within
    assert check_clock("n2", -1.5, 0.1, 1.0).level == WARN
    assert check_clock("n2", 301, 0.1, 1.0).level == ERROR


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 255, 512])
def test_ring_rounds_are_disjoint_pairs(count):
    """Every node beside both neighbours, never in two pairs of a round, in two rounds or three."""
    rounds = ring_rounds(count)
    assert len(rounds) == {1: 0, 2: 1}.get(count, 2 + count % 2)
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    pairs = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert pairs == {frozenset((node, (node + 1) % count)) for node in range(count) if count > 1}


def test_outliers_are_slow_pairs():
    fine = [Timing([n, n + 1], 1e-4, 1e9 + n) for n in range(6)]
    slow, late = Timing([7, 8], 1e-4, 0.2e9), Timing([8, 9], 4e-4, 1e9)
    assert outliers([*fine, slow, late]) == [slow, late]
    assert outliers([fine[0], slow]) == []  # which of the two is the odd one?


def test_report_merges_many_nodes():
    """Equal findings share a row, harmless differences do not fill the table, facts that differ are errors."""
    reports = [
        RankReport(
            rank,
            f"n{rank // 2}",
            str(rank // 2),
            rank % 2 == 0,
            [Finding("shm", OK, "8 GB"), Finding("output", OK, f"{rank} GB free")] if rank % 2 == 0 else [],
            {"torch": "2.13.0", "driver": "570" if rank < 10 else "580"},
        )
        for rank in range(40)
    ]
    reports[7].findings.append(Finding("gpus", ERROR, "GPU 1 does not compute", "drain it"))
    report = merge(reports, differences(reports), 1.0)
    assert (report["level"], report["ranks"], report["nodes"]) == (ERROR, 40, 20)
    text = table(report)
    assert "8 GB  [all 20 nodes]" in text
    assert text.count("GB free") == 4
    assert "output    ok     and 16 more  [see --json]" in text
    assert problems(report) == [
        "error: gpus: rank 7 (n3): GPU 1 does not compute: drain it",
        "error: versions: the run: driver differs between nodes: 570 on n0, n1, n2, n3, n4; 580 on n5, n6, n7, n8, "
        "n9, n10, n11, n12 and 7 more: give every node the same image, environment and data: ranks that differ hang "
        "or compute other numbers",
    ]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("^docker,lo,veth", ["eth0", "eth1"]),
        ("^docker,lo,veth,eth", []),
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^=eth0,lo,docker0", ["eth1"]),
        ("ens", []),
    ],
)
def test_interfaces_left_by_nccl_socket_ifname(setting, left):
    interfaces = ["lo", "docker0", "eth0", "eth1"]
    assert interfaces_left(setting, interfaces) == left
    finding = check_interfaces({"NCCL_SOCKET_IFNAME": setting}, True, 2, interfaces)
    assert finding.level == (OK if left else ERROR)


def test_check_interfaces_refuses_loopback_between_nodes():
    assert check_interfaces({"NCCL_SOCKET_IFNAME": "lo"}, True, 2, ["lo", "eth0"]).level == ERROR
    assert check_interfaces({"NCCL_SOCKET_IFNAME": "lo"}, True, 1, ["lo", "eth0"]).level == OK


def test_efa_devices_are_amazons_alone(tmp_path):
    for name, vendor, number in (("rdmap16s27", "0x1d0f", "0xefa2"), ("mlx5_0", "0x15b3", "0x101e")):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device" / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device" / "device").write_text(f"{number}\n")
    assert efa_devices(tmp_path) == ["rdmap16s27"]
    assert efa_devices(tmp_path / "none") == []


EFA = "provider: efa\n    fabric: efa\n    domain: rdmap16s27-rdm\nprovider: efa\n    fabric: efa-direct\n"


@pytest.mark.parametrize(
    ("absent", "fi_info", "found"),
    [
        (None, EFA, None),
        ("verbs", EFA, "no {0}/verbs/uverbs* that this user can open"),
        ("plugin", EFA, "NCCL's plugin for EFA is not found: NCCL would use TCP"),
        ("memory", EFA, "locked memory is limited (ulimit -l), and RDMA locks its own"),
        (None, "fi_getinfo: -61 (No data)", "fi_info -p efa finds no provider (fi_getinfo: -61 (No data))"),
    ],
)
def test_check_efa_reports_what_is_missing(tmp_path, monkeypatch, absent, fi_info, found):
    """A node as the kernel and the EFA software lay it out."""
    for folder in ("sys/efa0/device", "verbs", "lib", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sys/efa0/device/vendor").write_text("0x1d0f\n")
    (tmp_path / "sys/efa0/device/device").write_text("0xefa2\n")
    for name, file in (("verbs", "verbs/uverbs0"), ("plugin", "lib/libnccl-net.so")):
        if name != absent:
            (tmp_path / file).touch()
    limit = 65536 if absent == "memory" else resource.RLIM_INFINITY
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    (tmp_path / "bin" / "fi_info").write_text(f"#!/bin/sh\necho '{fi_info}'\n")
    (tmp_path / "bin" / "fi_info").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    places = {"use_gpu": True, "sysfs": tmp_path / "sys", "verbs": tmp_path / "verbs"}
    findings = check_efa({"FI_PROVIDER": "efa", "LD_LIBRARY_PATH": str(tmp_path / "lib")}, **places)
    if found:
        assert [(f.level, f.found) for f in findings] == [(ERROR, found.format(tmp_path))]
    else:
        assert [(f.level, f.found) for f in findings] == [(OK, f"1 devices, plugin {tmp_path}/lib/libnccl-net.so")]
    assert check_efa({"FI_PROVIDER": ""}, **places) == []


def test_nvidia_driver_is_the_modules_version(tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (dvs-builder@U22)\n"
    )
    assert nvidia_driver(tmp_path / "version") == "570.133.20"


N1 = "n1:1:9 [0] NCCL INFO"
BY_EFA = f"{N1} NET/OFI Selected Provider is efa (found 16 nics)\n{N1} Using network Libfabric\n"
BY_TCP = (
    f"{N1} NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.\n"
    f"{N1} NET/Socket : Using [0]eth0:10.0.0.7<0>\n{N1} Using network Socket\n"
)


@pytest.mark.parametrize(
    ("log", "level", "found"),
    [
        (BY_EFA, OK, "NCCL: Selected Provider is efa (Libfabric)"),
        (
            f"{N1} NET/OFI Selected provider is efa, fabric is efa-direct\n",
            OK,
            "NCCL: Selected Provider is efa (network not named)",
        ),
        (BY_TCP, ERROR, "NCCL uses Socket, not EFA"),
        (BY_TCP + BY_EFA, OK, "NCCL: Selected Provider is efa (Libfabric)"),
        ("", WARN, "NCCL's log does not say which network it uses"),
    ],
)
def test_check_nccl_log_finds_the_network(log, level, found):
    finding = check_nccl_log(log)
    assert (finding.level, finding.found) == (level, found)


def test_local_checks_report_errors_and_hangs():
    def fail(error: Exception) -> None:
        raise error

    report, released = RankReport(0, "n0", "0", True), threading.Event()
    checks = LocalChecks(0.2)
    checks.start("shm", lambda: (Finding("shm", OK, "8 GB"), {"torch": "2.13.0"}))
    checks.start("gpus", lambda: None)
    checks.start("output", fail, UserError("no such directory"))
    checks.start("cache", fail, OSError(5, "Input/output error"))
    checks.start("efa", fail, subprocess.TimeoutExpired("fi_info", 8))
    checks.start("dataset", released.wait)
    checks.finish(report)
    released.set()
    assert report.facts == {"torch": "2.13.0"}
    assert [(f.check, f.level, f.found) for f in report.findings] == [
        ("shm", OK, "8 GB"),
        ("output", ERROR, "no such directory"),
        ("cache", ERROR, "[Errno 5] Input/output error"),
        ("efa", ERROR, "Command 'fi_info' timed out after 8 seconds"),
        ("dataset", ERROR, "no answer within 0.2 s"),
    ]


def test_check_output_refuses_a_disk_too_small_for_checkpoints(tmp_path):
    """12 bytes a parameter, for as many as are kept and the next; those that are there make way."""
    small = "facebook/esm2_t6_8M_UR50D"  # 7,512,353 parameters
    made = named_model(small)
    assert bytes_needed(made, 3) == 12 * 7_512_353 * 4
    assert bytes_needed(made, 0) == 12 * 7_512_353 * 3
    hidden = 6 * 12 * 320**2 + 320**2  # weights of the layers' matrices and of the head's dense one
    assert bytes_needed(made, 1, "muon") == (12 * 7_512_353 - 4 * hidden) * 2
    assert bytes_needed(named_model("llama3_1_70b"), 1) == 12 * 70_553_706_496 * 2
    assert named_model("some/model") is None
    assert check_output(str(tmp_path), 0.0, small, lambda: made, 3).level != ERROR
    found = check_output(str(tmp_path), 0.0, "llama3_1_70b", lambda: named_model("llama3_1_70b"), 1000)
    assert found.level == ERROR
    assert "too little for checkpoints of llama3_1_70b: 1000 and the next take 847" in found.found
    assert found.todo == "free disk space, or lower --save_total_limit"
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5.old").mkdir()
    for directory in ("checkpoint-5", "checkpoint-5.old"):
        (tmp_path / directory / "__0_0.distcp").write_bytes(bytes(1000))
    assert checkpoint_bytes(tmp_path) == 1000
