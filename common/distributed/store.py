"""The key-value store by which ranks find each other: where it listens, and which interface a run on one node uses.

torch's TCPStore answers whoever reaches its port, and listens on all interfaces whatever address it is given. A store
at a loopback address gets a socket that listens there only, and a run on one node has all its stores there.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether the address itself says so. Other names are not looked up: what a host calls itself may be loopback
    there and another address for the other nodes."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def on_one_node() -> bool:
    """Whether all ranks are on this machine, as torchrun's variables or the address of the store have it."""
    every, local = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return every == local or is_loopback(os.environ.get("MASTER_ADDR", ""))


def store_host() -> str:
    """Where rank 0 serves a store, and the others find it."""
    return LOOPBACK if on_one_node() else os.environ["MASTER_ADDR"]


def serve_store(host: str, port: int, **options) -> dist.TCPStore:
    """TCPStore's server at a port (0: a free one); at a loopback address it listens there alone.

    options: TCPStore's. DistNetworkError where the port is taken.
    """
    options = {"wait_for_workers": False} | options
    if not is_loopback(host):
        return dist.TCPStore(host, port, is_master=True, **options)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise dist.DistNetworkError(f"EADDRINUSE: {host}:{port}: {error.strerror}") from None
        raise
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.fileno(), **options)
    listener.detach()  # the store's own from here on
    return store


def join_store(host: str, port: int, **options) -> dist.TCPStore:
    """A connection to the store there. options: TCPStore's."""
    return dist.TCPStore(host, port, is_master=False, **{"wait_for_workers": False} | options)


def use_loopback_interface() -> None:
    """On one node gloo and NCCL use the loopback interface, unless the user names another.

    They read it when a process group is made.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback and on_one_node():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
