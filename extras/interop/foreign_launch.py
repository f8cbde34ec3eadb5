"""Launchers of other programs' commands: `accelerate launch` as torchrun, etcd's rendezvous, Kubernetes' variables."""

from __future__ import annotations

import re

from extras.interop.flag_tables import ACCELERATE, TORCHRUN
from extras.interop.foreign_command import Translation, note_of, pairs

ETCD = ("etcd", "etcd-v2")


def shell_variables(word: str) -> str:
    """`$(POD_RANK)`, a variable in a Kubernetes manifest, as ${POD_RANK}: a shell would run a command POD_RANK.

    `~/x` as ${HOME}/x: after a flag's `=` no shell would replace it.
    """
    return re.sub(r"\$\(([A-Z_][A-Z0-9_]*)\)", r"${\1}", re.sub(r"^~(?=/|$)", "${HOME}", word))


def accelerate(made: Translation, options: list[str]) -> bool:
    """Options of `accelerate launch` as torchrun's, and as flags of the script. Returns whether it shards (FSDP)."""
    settings = {_key(name): value for name, value in pairs(options)}
    nodes, ranks = settings.get("num_machines") or "1", settings.get("num_processes")
    made.launcher = ["torchrun", f"--nnodes={nodes}"]
    if ranks and re.fullmatch(r"[1-9][0-9]* [1-9][0-9]*", f"{ranks} {nodes}"):
        made.launcher.append(f"--nproc_per_node={-(-int(ranks) // int(nodes))}")
        made.notes.append(f"--num_processes={ranks}, of all nodes: {made.launcher[-1]}, of one")
    elif ranks:
        made.launcher.append("--nproc_per_node=gpu")
        made.notes.append(f"--num_processes={ranks}: torchrun starts a rank on each GPU of a node")
    else:
        made.notes.append("without --num_processes: one rank a node; torchrun's --nproc_per_node=gpu: one on each GPU")
    where, port = settings.get("main_process_ip"), settings.get("main_process_port") or "29500"
    by_store = settings.get("rdzv_backend") not in (None, "static")
    for name, value in settings.items():
        ours = ACCELERATE.get(name)
        if name in ("num_processes", "num_machines"):
            continue
        if name in TORCHRUN:
            if by_store and name in ("main_process_ip", "main_process_port"):
                continue
            made.launcher.append(f"--{TORCHRUN[name]}={value}")
            if name != TORCHRUN[name] and not (by_store and name == "machine_rank"):
                made.notes.append(f"--{name}: torchrun's --{TORCHRUN[name]}")
        elif ours is None:
            made.notes.append(f"--{name}: not known of accelerate launch: left out")
        else:
            words = ours.words("true" if value is None else value)
            made.flags += words
            made.notes.append(note_of(f"--{name}" + (f"={value}" if value is not None else ""), ours, words))
    if by_store and where:
        made.launcher.append(f"--rdzv_endpoint={where}:{port}")
        made.notes.append("--main_process_ip, --main_process_port: torchrun's --rdzv_endpoint")
    return "use_fsdp" in settings or any(name.startswith("fsdp_") for name in settings)


def rendezvous(made: Translation) -> None:
    """torchrun's options as they work here: c10d for etcd, and with c10d no number of the node."""
    settings = {_key(name): value or "" for name, value in pairs(made.launcher[1:])}
    backend, changed = settings.get("rdzv_backend"), {}
    if backend in ETCD:
        host, advice = "localhost", ""
        if settings.get("nnodes", "1") != "1":
            host, advice = "${MASTER_ADDR}", ": set MASTER_ADDR to its name on each node (esm2-worker-0 in the guide)"
        port = re.search(r":(\d+)$", settings.get("rdzv_endpoint", ""))
        changed = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{host}:{port[1] if port else 29500}"}
        made.notes.append(f"--rdzv_backend={backend}: c10d, without a server: nodes meet at the first of them{advice}")
    if backend in (*ETCD, "c10d") and "node_rank" in settings:
        changed["node_rank"] = ""
        made.notes.append("the node's rank (--machine_rank, --node_rank): none: a c10d rendezvous gives it")
    if changed:
        remaining = [(name, value) for name, value in pairs(made.launcher[1:]) if _key(name) not in changed]
        remaining += [(f"--{name}", value) for name, value in changed.items() if value]
        made.launcher[1:] = [name if value is None else f"{name}={value}" for name, value in remaining]


def _key(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
