"""The launcher's port: on one node loopback only; with several nodes no client that runs code there."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from common.distributed.process_group import join_store, serve_store, store_host, use_loopback_interface
from extras.launch import rendezvous
from tests.forked import Script
from tests.live_runs import ranks_of, wait_until
from tests.training.test_trackers import settings  # noqa: F401  (a fixture)
from tests.training_fixtures import environment, flags_of, free_port, rows
from tests.warm_python import python

RUN = "job"
LISTENS = "0A"  # a socket's state in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def a_state() -> _RendezvousState:
    state, nodes = _RendezvousState(), [_NodeDesc(f"node-{n}", 100 + n, n) for n in range(4)]
    state.round, state.complete, state.closed = 3, True, False
    state.deadline = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    state.participants = {nodes[0]: 1, nodes[1]: 0}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[3]}
    state.last_heartbeats = {node: state.deadline + timedelta(microseconds=node.pid) for node in nodes}
    return state


@pytest.mark.parametrize("state", [a_state(), _RendezvousState()], ids=["full", "new"])
def test_rendezvous_state_survives_json(state):
    assert vars(rendezvous.decode(rendezvous.encode(state))) == vars(state)


def changed(**fields) -> bytes:
    return json.dumps(json.loads(rendezvous.encode(a_state())) | fields).encode()


NODE = ["node", 1, 0]
FOREIGN = {
    "a pickle": pickle.dumps(_RendezvousState()),
    "an old pickle": pickle.dumps({}, protocol=0),
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "another object": b"{}",
    "one field more": changed(more=1),
    "deep": b"[" * 200_000,
    "no UTF-8": b'"\xff"',
    "digits": changed(round=0).replace(b'"round": 0', b'"round": ' + b"9" * 5000),
    "a large number": changed(round=1 << 63),
    "a negative one": changed(round=-1),
    "a fraction": changed(round=1.0),
    "true for a number": changed(round=True),
    "1 for true": changed(closed=1),
    "a time without zone": changed(deadline="2026-01-02T03:04:05"),
    "a time before all": changed(deadline="0001-01-01T00:00:00+23:59"),
    "no time": changed(last_heartbeats=[[NODE, "soon"]]),
    "a number for a time": changed(deadline=1.5),
    "a node that is text": changed(wait_list=["abc"]),
    "a node of two": changed(wait_list=[["node", 1]]),
    "a node with an object": changed(wait_list=[[{}, 1, 0]]),
    "a dict for a list": changed(wait_list={"node": 1}),
    "a rank that is text": changed(participants=[[NODE, "0"]]),
    "a pair of three": changed(participants=[[NODE, 0, 0]]),
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_rendezvous_refuses_foreign_state_in_one_line(data):
    backend = rendezvous.JsonBackend(C10dRendezvousBackend(dist.HashStore(), RUN))
    assert backend.get_state() is None
    _, token, done = backend.set_state(pickle.dumps(a_state()))
    assert done
    backend._backend.set_state(data, token)
    for look in (backend.get_state, lambda: backend.set_state(pickle.dumps(a_state()), token)):
        with pytest.raises(RendezvousStateError, match="^the rendezvous state was not written by extras.launch"):
            look()


def test_rendezvous_state_size_is_bounded(monkeypatch):
    monkeypatch.setattr(rendezvous, "LARGEST", len(rendezvous.encode(a_state())) - 1)
    with pytest.raises(ValueError, match=r"^\d+ bytes$"):
        rendezvous.decode(rendezvous.encode(a_state()))


@pytest.mark.parametrize(
    ("flags", "nodes", "chosen"),
    [
        ({}, 1, ("c10d-json", "127.0.0.1:0", "127.0.0.1")),
        ({"standalone": True}, 1, ("c10d-json", "127.0.0.1:0", "127.0.0.1")),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "node:1"}, 1, ("c10d-json", "127.0.0.1:0", "127.0.0.1")),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "node:1"}, 2, ("c10d-json", "node:1", None)),
        ({"rdzv_backend": "etcd-v2", "rdzv_endpoint": "etcd:1"}, 1, ("etcd-v2-json", "etcd:1", None)),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "etcd:1"}, 2, ("etcd", "etcd:1", None)),
        ({"local_addr": "10.0.0.1"}, 2, ("static", "", "10.0.0.1")),
    ],
)
def test_use_json_backend_sets_backend_and_endpoint(flags, nodes, chosen):
    told = {"standalone": False, "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_id": "none", "local_addr": None}
    parsed = Namespace(**told | flags)
    rendezvous.use_json_backend(parsed, nodes)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.local_addr) == chosen
    assert (parsed.rdzv_id == "none") == (chosen[1] != "127.0.0.1:0")


def listening(pid: int) -> list[str]:
    """The addresses, as /proc has them, at which a process listens."""
    files = Path(f"/proc/{pid}/fd")
    sockets = {os.readlink(file) for file in files.iterdir() if file.is_symlink()}
    lines = [line.split() for of in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{of}").read_text().splitlines()]
    return [line[1].partition(":")[0] for line in lines if line[3] == LISTENS and f"socket:[{line[9]}]" in sockets]


def test_serve_store_on_loopback_listens_there_only():
    before = Counter(listening(os.getpid()))
    for host in ("127.0.0.1", "localhost"):
        store = serve_store(host, 0)
        assert Counter(listening(os.getpid())) - before == {"0100007F": 1}
        join_store(host, store.port).set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            serve_store(host, store.port)
        del store


@pytest.mark.parametrize(
    ("variables", "host", "interface"),
    [
        ({}, "127.0.0.1", "lo"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node"}, "127.0.0.1", "lo"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node"}, "node", None),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "node"}, "node", None),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, "127.0.0.1", "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}, "127.0.0.1", "eth0"),
    ],
)
def test_use_loopback_interface_on_one_node(monkeypatch, variables, host, interface):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # to be put back as it was
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    use_loopback_interface()
    assert store_host() == host
    assert [os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")] == [interface] * 2


@contextmanager
def running(*scripts: Script) -> Iterator[None]:
    """None is left; their ranks end with them."""
    try:
        yield
    finally:
        for script in scripts:
            script.send_signal(signal.SIGKILL)
            script.wait()


def descendants(pid: int) -> list[int]:
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    found = [int(child) for text in texts for child in text.split()]
    return [*found, *(each for child in found for each in descendants(child))]


def test_launcher_on_one_node_listens_on_loopback_only(dataset, tmp_path):
    """Nor do the ranks' loader workers, which inherit sockets, listen elsewhere."""
    out = tmp_path / "out"
    flags = {"max_steps": 100_000, "logging_steps": 1, "dataloader_num_workers": 1}
    argv = ["--nproc_per_node=2", "train_ddp.py", *flags_of(dataset, out, **flags)]
    script = Script("extras.launch", *argv, env=environment(), settings={"sys.executable": python()})
    with running(script):
        assert wait_until(lambda: bool(rows(out)), lambda: script.poll() is None), script.said()
        ranks = ranks_of(script.pid)
        workers = [child for rank in ranks.values() for child in descendants(rank)]
        found = {pid: listening(pid) for pid in (script.pid, *ranks.values(), *workers)}
    assert (len(ranks), len(workers)) == (2, 2)
    assert all(found[pid] for pid in (script.pid, *ranks.values())), found
    assert {at for addresses in found.values() for at in addresses} <= LOOPBACK, found


@pytest.mark.parametrize("report_to", ["none", "tensorboard", "wandb"])
def test_one_process_and_its_tracker_listen_on_loopback_only(dataset, tmp_path, settings, report_to):  # noqa: F811
    if report_to != "none":
        pytest.importorskip(report_to)
    flags = {"max_steps": 100_000, "logging_steps": 1, "dataloader_num_workers": 1, "report_to": report_to}
    script = Script("train_ddp.py", *flags_of(dataset, tmp_path / "out", **flags), env=settings)
    with running(script):
        assert wait_until(lambda: bool(rows(tmp_path / "out")), lambda: script.poll() is None), script.said()
        found = {pid: listening(pid) for pid in (script.pid, *descendants(script.pid))}
    assert len(found) > (2 if report_to == "wandb" else 1)
    assert {at for addresses in found.values() for at in addresses} <= LOOPBACK, found


# A rank without torch; it ends with its launcher.
RANK = "import ctypes, pathlib, sys, time\nctypes.CDLL(None).prctl(1, 9)\n"
RANK += "pathlib.Path(sys.argv[1], f'rank-{time.monotonic_ns()}').touch()\ntime.sleep(60)\n"


def node(tmp_path: Path, port: int, **variables: str) -> Script:
    """The launcher of one of two nodes, with RANK."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "ranks").mkdir(exist_ok=True)
    where = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id={RUN}"]
    where += ["--nproc_per_node=1", "--monitor_interval=0.05", "--local_addr=127.0.0.1", "--max_restarts=1"]
    where += ["--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=3"]
    argv = [*where, str(tmp_path / "rank.py"), str(tmp_path / "ranks")]
    return Script("extras.launch", *argv, env=environment() | variables)


def until_ranks(tmp_path: Path, number: int, nodes: list[Script]) -> None:
    """So many ranks have started."""
    alive = lambda: all(node.poll() is None for node in nodes)  # noqa: E731
    assert wait_until(lambda: len(os.listdir(tmp_path / "ranks")) == number, alive), [node.said() for node in nodes]


@contextmanager
def two_nodes(tmp_path: Path, **variables: str) -> Iterator[tuple[list[Script], int]]:
    """The launchers of two nodes with their ranks under way, the first holds the store; and its port."""
    port = free_port()
    nodes = [node(tmp_path, port, **variables)]
    with running(nodes[0]):
        assert wait_until(lambda: listening(nodes[0].pid), lambda: nodes[0].poll() is None), nodes[0].said()
        nodes.append(node(tmp_path, port, **variables))
        with running(nodes[1]):
            until_ranks(tmp_path, 2, nodes)
            yield nodes, port


@pytest.mark.parametrize(
    ("variables", "status"),
    [({}, None), pytest.param({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}, 1, marks=pytest.mark.slow)],
    ids=["unset", "shared"],
)
def test_launcher_takes_back_a_node_that_died(tmp_path, variables, status):
    """Unless the user has the agents share the ranks' store (torch 2.13): then both nodes say so in one line."""
    with two_nodes(tmp_path, **variables) as (nodes, port):
        nodes[1].send_signal(signal.SIGKILL)
        nodes[1].wait()
        for rank in ranks_of(nodes[0].pid).values():
            os.kill(rank, signal.SIGKILL)  # it would end itself: its collective fails
        nodes[1] = node(tmp_path, port, **variables)
        with running(nodes[1]):
            if status is None:
                until_ranks(tmp_path, 4, nodes)
                return
            assert [node.wait() for node in nodes] == [status, status]
            for said in (node.said()[1] for node in nodes):
                assert "error: the other nodes are gone, or the job is over: " in said
                assert "Traceback" not in said


def test_launcher_refuses_a_pickle_in_the_rendezvous(tmp_path):
    with two_nodes(tmp_path) as (nodes, port):
        store = join_store("127.0.0.1", port)
        key = f"torch.rendezvous.{RUN}"  # which `list_keys` of the store tells everybody
        assert store.check([key])
        store.set(key, base64.b64encode(pickle.dumps(Evil(tmp_path / "owned"))).decode())
        assert [node.wait() for node in nodes] == [1, 1]
        said = [node.said()[1] for node in nodes]
    errors = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2  # one a node; the second may only see that the first is gone
    assert any("was not written by extras.launch (a pickle, as torchrun itself writes" in e for e in errors)
    assert "Traceback" not in "".join(said)
    assert not (tmp_path / "owned").exists()
