"""torchrun's rendezvous with JSON instead of pickle: its store answers anyone who reaches the port.

With torch's pickles, whoever writes there runs code in every agent. Here the store's content is JSON of the right
types, or the job ends; every node has to be started with extras.launch.
"""

from __future__ import annotations

import json
import pickle
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
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
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.cli import one_line
from common.compat import NodeDesc, RendezvousState, rendezvous_has_time_zones, set_tcp_store_factory
from common.distributed.process_group import LOOPBACK, is_loopback, join_store, serve_store

LARGEST = 1 << 24  # bytes of JSON: some 100,000 nodes
SUFFIX = "-json"  # of the names of these backends
READ_TIMEOUT_S = 60  # torch's default


def use_json_backend(flags: Namespace, nodes: int) -> None:
    """Change torchrun's parsed flags to a backend of this module; on one node it listens on loopback.

    nodes: their maximum. The static rendezvous has no state; the older etcd backend has JSON already.
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
    """Wraps a backend to store JSON. The handler that uses it unpickles only what this process has pickled."""

    def __init__(self, backend: RendezvousBackend):
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name + SUFFIX

    def get_state(self) -> tuple[bytes, Token] | None:
        with _ours_or_error():
            result = self._backend.get_state()
            return result and (_repickled(result[0]), result[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with _ours_or_error():
            result = self._backend.set_state(encode(pickle.loads(state)), token)
            return result and (_repickled(result[0]), *result[1:])


def _repickled(data: bytes) -> bytes:
    """The pickle that torch's handler expects, from the JSON that another agent wrote."""
    return pickle.dumps(decode(data))


@contextmanager
def _ours_or_error() -> Iterator[None]:
    """RendezvousStateError with advice if a state is not what `encode` makes."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError, RendezvousStateError) as error:
        raise RendezvousStateError(
            f"the rendezvous state was not written by extras.launch ({one_line(error)[:80]}): start every node "
            "with `python -m extras.launch`, and block other access to its port"
        ) from None


def encode(state: RendezvousState) -> bytes:
    """The state as JSON: nodes as lists, times as text, sets as lists, dicts as lists of pairs."""

    def as_json(value):
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
        return astuple(value) if isinstance(value, NodeDesc) else list(value)

    fields = {name: list(v.items()) if isinstance(v, dict) else v for name, v in vars(state).items()}
    return json.dumps(fields, default=as_json).encode()


def decode(data: bytes) -> RendezvousState:
    """Inverse of `encode`. ValueError, TypeError, OverflowError or RecursionError for any other data."""
    if data[:1] == pickle.PROTO:
        raise ValueError("a pickle, as torchrun itself writes it")
    if len(data) > LARGEST:
        raise ValueError(f"{len(data)} bytes")
    values, state = json.loads(data), RendezvousState()
    if _typed(dict, values).keys() != vars(state).keys():
        raise ValueError("unknown keys")
    state.round, state.complete = _number(values["round"]), _typed(bool, values["complete"])
    state.closed = _typed(bool, values["closed"])
    state.deadline = None if values["deadline"] is None else _time(values["deadline"])
    state.participants = {_node(node): _number(rank) for node, rank in _typed(list, values["participants"])}
    state.wait_list = {_node(node) for node in _typed(list, values["wait_list"])}
    state.redundancy_list = {_node(node) for node in _typed(list, values["redundancy_list"])}
    state.last_heartbeats = {_node(node): _time(seen) for node, seen in _typed(list, values["last_heartbeats"])}
    return state


def _node(value) -> NodeDesc:
    address, pid, local_id = _typed(list, value)
    return NodeDesc(_typed(str, address), _number(pid), _number(local_id))


def _typed(kind: type, value):
    if type(value) is not kind:  # not isinstance: True is an int
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _number(value) -> int:
    if not 0 <= _typed(int, value) < 1 << 63:
        raise ValueError(f"the number {value}")
    return value


def _time(value) -> datetime:
    """In UTC, with a time zone if this torch compares with such times (earlier ones took `datetime.utcnow`)."""
    time = datetime.fromisoformat(_typed(str, value))
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
    # How the first node's agent serves the ranks' store, at its --local_addr.
    set_tcp_store_factory(handler, lambda host, port: serve_store(host, port, multi_tenant=True))
    return handler


def _store_on_loopback(params: RendezvousParameters, host: str, port: int) -> dist.TCPStore:
    """Serve or join the store by torch's rule: the first agent there serves it, unless `is_host` says which."""
    timeout = timedelta(seconds=params.get_as_int("read_timeout") or READ_TIMEOUT_S)
    is_host = params.get_as_bool("is_host")
    try:
        if is_host is not False:
            return serve_store(host, port, multi_tenant=True, timeout=timeout)
    except dist.DistNetworkError:
        if is_host:
            raise
    return join_store(host, port, timeout=timeout)
