"""torchrun's rendezvous with its state as JSON: torch pickles it, into a store that answers whoever reaches its port.

Who writes there runs code in every agent. Here what comes from the store is JSON of the right types, or the job ends;
all nodes have to be started with extras.launch.
"""

from __future__ import annotations

import json
import pickle
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.cli import one_line
from common.compat import NodeDesc, RendezvousState, rendezvous_has_time_zones, set_tcp_store_factory
from common.distributed.run import LOOPBACK, is_loopback, join_store, serve_store

LARGEST = 1 << 24  # bytes of JSON: some 100,000 nodes
SUFFIX = "-json"  # of our backends' names
READ_TIMEOUT_S = 60  # torch's default


def choose(flags: Namespace, nodes: int) -> None:
    """Set torchrun's parsed flags to a backend of this module; on one node, on loopback: no other has to find it.

    nodes: the most that there may be. The static rendezvous has no state; etcd's first one has it as JSON.
    """
    if flags.standalone or (nodes == 1 and flags.rdzv_backend in ("c10d", "static")):
        flags.standalone, flags.rdzv_backend = False, "c10d"
        flags.rdzv_endpoint, flags.local_addr = f"{LOOPBACK}:0", LOOPBACK
        if flags.rdzv_id == "none":  # torch's default: one name for all jobs
            flags.rdzv_id = str(uuid.uuid4())
    if creator := {"c10d": _c10d, "etcd-v2": _etcd_v2}.get(flags.rdzv_backend):
        flags.rdzv_backend += SUFFIX
        rendezvous_handler_registry.register(flags.rdzv_backend, creator)


# ---- the state ----------------------------------------------------------------------------------------------


class JsonBackend(RendezvousBackend):
    """Another backend, with JSON in it. The handler, on this side of it, unpickles only what this process has made."""

    def __init__(self, backend: RendezvousBackend):
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name + SUFFIX

    def get_state(self) -> tuple[bytes, Token] | None:
        with _one_of_ours():
            found = self._backend.get_state()
            return found and (_checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with _one_of_ours():
            found = self._backend.set_state(encode(pickle.loads(state)), token)
            return found and (_checked(found[0]), *found[1:])


def _checked(data: bytes) -> bytes:
    """The pickle that torch's handler reads, of the JSON that another agent wrote."""
    return pickle.dumps(decode(data))


@contextmanager
def _one_of_ours() -> Iterator[None]:
    """RendezvousStateError that says what to do, where a state is not what `encode` makes."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError, RendezvousStateError) as error:
        raise RendezvousStateError(
            f"the rendezvous holds what no extras.launch has written ({one_line(error)[:80]}): start every node "
            "with `python -m extras.launch`, and let nobody else reach its port"
        ) from None


def encode(state: RendezvousState) -> bytes:
    """The state as JSON."""
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "deadline": state.deadline and _of_time(state.deadline),
            "participants": [[_of_node(node), rank] for node, rank in state.participants.items()],
            "wait_list": [_of_node(node) for node in state.wait_list],
            "redundancy_list": [_of_node(node) for node in state.redundancy_list],
            "last_heartbeats": [[_of_node(node), _of_time(at)] for node, at in state.last_heartbeats.items()],
        }
    ).encode()


def decode(data: bytes) -> RendezvousState:
    """The state that `encode` made this of. ValueError, TypeError, OverflowError or RecursionError for all else."""
    if data[:1] == pickle.PROTO:
        raise ValueError("a pickle, as torchrun itself writes it")
    if len(data) > LARGEST:
        raise ValueError(f"{len(data)} bytes")
    found, state = json.loads(data), RendezvousState()
    if _of(dict, found).keys() != vars(state).keys():
        raise ValueError("the keys of something else")
    state.round, state.complete = _number(found["round"]), _of(bool, found["complete"])
    state.closed = _of(bool, found["closed"])
    state.deadline = None if found["deadline"] is None else _time(found["deadline"])
    state.participants = {_node(node): _number(rank) for node, rank in _of(list, found["participants"])}
    state.wait_list = {_node(node) for node in _of(list, found["wait_list"])}
    state.redundancy_list = {_node(node) for node in _of(list, found["redundancy_list"])}
    state.last_heartbeats = {_node(node): _time(at) for node, at in _of(list, found["last_heartbeats"])}
    return state


def _of_node(node: NodeDesc) -> list:
    return [node.addr, node.pid, node.local_id]


def _node(value) -> NodeDesc:
    address, pid, local_id = _of(list, value)
    return NodeDesc(_of(str, address), _number(pid), _number(local_id))


def _of(kind: type, value):
    if type(value) is not kind:  # True is no number
        raise TypeError(f"a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _number(value) -> int:
    if not 0 <= _of(int, value) < 1 << 63:
        raise ValueError(f"the number {value}")
    return value


def _of_time(time: datetime) -> str:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def _time(value) -> datetime:
    """In UTC, with its zone where this torch compares it with such times (earlier ones took `datetime.utcnow`)."""
    time = datetime.fromisoformat(_of(str, value))
    if time.tzinfo is None:
        raise ValueError("a time without its zone")
    time = time.astimezone(UTC)
    return time if rendezvous_has_time_zones() else time.replace(tzinfo=None)


# ---- handlers -----------------------------------------------------------------------------------------------


def _c10d(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    if params.get("store_type", "tcp") == "tcp" and is_loopback(host):
        store = _store_on_loopback(params, host, port)
        return _handler(store, C10dRendezvousBackend(store, params.run_id), params)
    backend, store = create_backend(params)
    return _handler(store, backend, params)


def _etcd_v2(params: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend as create_etcd_backend

    backend, store = create_etcd_backend(params)
    return _handler(store, backend, params)


def _handler(store: dist.Store, backend: RendezvousBackend, params: RendezvousParameters) -> RendezvousHandler:
    handler = create_handler(store, JsonBackend(backend), params)
    # The store that the first node's agent serves for the ranks, at its --local_addr.
    set_tcp_store_factory(handler, lambda host, port: serve_store(host, port, multi_tenant=True))
    return handler


def _store_on_loopback(params: RendezvousParameters, host: str, port: int) -> dist.TCPStore:
    """As torch's backend makes it: the first agent there serves it, unless `is_host` says who does."""
    timeout = timedelta(seconds=params.get_as_int("read_timeout", READ_TIMEOUT_S))
    is_host = params.get_as_bool("is_host")
    try:
        if is_host is not False:
            return serve_store(host, port, multi_tenant=True, timeout=timeout)
    except dist.DistNetworkError:
        if is_host:
            raise
    return join_store(host, port, timeout=timeout)
