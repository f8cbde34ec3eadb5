"""Preflight's checks of a node's network settings: interfaces, host names, EFA."""

from __future__ import annotations

import ctypes.util
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extras.preflight.report import ERROR, OK, WARN, Finding

AMAZON = "0x1d0f"  # PCI vendor; EFA's device numbers begin with 0xefa
PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
PLUGIN_FOLDERS = ("/opt/amazon/ofi-nccl/lib", "/opt/aws-ofi-nccl/lib", "/usr/local/lib", "/usr/lib")
FI_INFO = "/opt/amazon/efa/bin/fi_info"


# ---- interfaces ---------------------------------------------------------------------------------------------


def interfaces_left(setting: str, interfaces: list[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME selects: prefixes; with `^` all others; with `=` exact names."""
    excluding = setting.startswith("^")
    setting = setting.removeprefix("^")
    exact = setting.startswith("=")
    names = [name for name in setting.removeprefix("=").split(",") if name]
    if not names:
        return interfaces

    def named(interface: str) -> bool:
        return interface in names if exact else interface.startswith(tuple(names))

    return [interface for interface in interfaces if named(interface) != excluding]


def check_interfaces(
    environment: Mapping[str, str], nccl_is_used: bool, num_nodes: int, interfaces: list[str] | None = None
) -> Finding:
    """Whether the variables that select network interfaces leave one. interfaces: instead of this machine's."""
    interfaces = _interfaces() if interfaces is None else interfaces
    detail = f"interfaces {', '.join(interfaces) or 'none'}"
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    if missing := [name for name in gloo.split(",") if name and name not in interfaces]:
        todo = f"unset it, or name one of {', '.join(interfaces)}"
        return Finding("interfaces", ERROR, f"GLOO_SOCKET_IFNAME={gloo}: there is no {', '.join(missing)}", todo)
    setting = environment.get("NCCL_SOCKET_IFNAME")
    if not setting:
        return Finding("interfaces", OK, detail)
    left = interfaces_left(setting, interfaces)
    if not left or (num_nodes > 1 and left == ["lo"]):
        what = (
            f"NCCL_SOCKET_IFNAME={setting} leaves {'only lo' if left else 'no interface'} of {', '.join(interfaces)}"
        )
        todo = "take eth out of it (a pod has nothing but eth0): NCCL_SOCKET_IFNAME=^docker,lo,veth"
        return Finding("interfaces", ERROR if nccl_is_used else WARN, what, todo)
    return Finding("interfaces", OK, f"NCCL_SOCKET_IFNAME={setting} leaves {', '.join(left)}")


def _interfaces(sysfs: Path = Path("/sys/class/net")) -> list[str]:
    """Names of the interfaces that are up; all if the system does not say."""
    states = {name: sysfs / name / "operstate" for _, name in socket.if_nameindex()}
    return [name for name, file in states.items() if not file.exists() or file.read_text().strip() != "down"]


# ---- host names ---------------------------------------------------------------------------------------------


def check_hostnames(own: str, others: list[str], master: str | None) -> list[Finding]:
    """Whether this node resolves its own name, the other nodes' and MASTER_ADDR; all concurrently."""
    names = list(dict.fromkeys([own, *others, *([master] if master else [])]))
    with ThreadPoolExecutor(32) as pool:
        addresses = dict(zip(names, pool.map(_resolve, names), strict=True))
    lost = [name for name in names if not addresses[name]]
    findings = []
    several = len({own, *others}) > 1
    if own in lost:
        todo = "add it to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME to the interface between the nodes"
        level = ERROR if several and not os.environ.get("GLOO_SOCKET_IFNAME") else WARN
        findings.append(Finding("hostnames", level, f"its own name {own} does not resolve", todo))
    elif several and not os.environ.get("GLOO_SOCKET_IFNAME") and all(map(_is_loopback, addresses[own])):
        what = f"its own name {own} resolves to {', '.join(addresses[own])}, where other nodes cannot reach it"
        todo = "mend /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface between the nodes"
        findings.append(Finding("hostnames", WARN, what, todo))
    if master in lost:
        findings.append(
            Finding("hostnames", ERROR, f"MASTER_ADDR {master} does not resolve", "mend DNS or the address")
        )
    if strangers := [name for name in lost if name not in (own, master)]:
        shown = ", ".join(strangers[:8]) + (", ..." if len(strangers) > 8 else "")
        what = f"{len(strangers)} of the other nodes' names do not resolve: {shown}"
        findings.append(Finding("hostnames", WARN, what, "add them to DNS or /etc/hosts"))
    return findings or [Finding("hostnames", OK, f"{len(names)} resolve")]


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


# ---- EFA ----------------------------------------------------------------------------------------------------


def efa_devices(sysfs: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of the EFA devices among the RDMA devices the kernel lists."""

    def text(file: Path) -> str:
        return file.read_text().strip().lower() if file.exists() else ""

    pci = [(path.name, path / "device") for path in sorted(sysfs.glob("*"))]
    return [name for name, dev in pci if text(dev / "vendor") == AMAZON and text(dev / "device").startswith("0xefa")]


def check_efa(
    environment: Mapping[str, str],
    use_gpu: bool,
    sysfs: Path = Path("/sys/class/infiniband"),
    verbs: Path = Path("/dev/infiniband"),
) -> list[Finding]:
    """With FI_PROVIDER=efa: device, device files, libfabric's provider, NCCL's plugin, locked memory."""
    if environment.get("FI_PROVIDER") != "efa":
        return []
    devices = efa_devices(sysfs)
    if not devices:
        what = f"FI_PROVIDER=efa, but there is no EFA device in {sysfs}: NCCL would silently fall back to TCP"
        todo = "ask for vpc.amazonaws.com/efa (Kubernetes), an instance type with EFA, or unset FI_PROVIDER"
        return [Finding("efa", ERROR, what, todo)]
    findings = []
    open_files = [file for file in verbs.glob("uverbs*") if os.access(file, os.R_OK | os.W_OK)]
    if not open_files:
        todo = "hand the devices to the container (--device=/dev/infiniband/..., the EFA device plugin)"
        findings.append(Finding("efa", ERROR, f"no {verbs}/uverbs* that this user can open", todo))
    fi_info = shutil.which("fi_info") or (FI_INFO if os.path.exists(FI_INFO) else None)
    if fi_info:
        done = subprocess.run([fi_info, "-p", "efa"], capture_output=True, text=True, timeout=8)
        if not re.search(r"^provider:\s*efa\s*$", done.stdout, re.MULTILINE):
            output = " ".join((done.stdout + done.stderr).split())[:80]
            todo = "install the EFA software in the image, and give it the devices"
            findings.append(Finding("efa", ERROR, f"fi_info -p efa finds no provider ({output})", todo))
    else:
        findings.append(Finding("efa", WARN, "fi_info is not installed: libfabric was not checked", "install it"))
    plugin = _plugin(environment)
    if plugin is None and use_gpu:
        todo = "install aws-ofi-nccl and put its lib directory into LD_LIBRARY_PATH"
        findings.append(Finding("efa", ERROR, "NCCL's plugin for EFA is not found: NCCL would use TCP", todo))
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        todo = "LimitMEMLOCK=infinity for what starts the job (containerd, slurmd); docker: --ulimit memlock=-1"
        findings.append(Finding("efa", ERROR, "locked memory is limited (ulimit -l), and RDMA locks its own", todo))
    if all(finding.level != ERROR for finding in findings):
        findings.append(Finding("efa", OK, f"{len(devices)} devices, plugin {plugin or 'not checked'}"))
    return findings


def _plugin(environment: Mapping[str, str]) -> str | None:
    """Where NCCL would find its network plugin."""
    folders = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    names = PLUGINS
    if named := environment.get("NCCL_NET_PLUGIN"):
        names = (named, f"lib{named}.so", f"libnccl-net-{named}.so")
    for folder in (*folders, *PLUGIN_FOLDERS, *(f"{each}/x86_64-linux-gnu" for each in PLUGIN_FOLDERS)):
        for name in names:
            if (Path(folder) / name).exists():
                return str(Path(folder) / name)
    return ctypes.util.find_library("nccl-net")


def check_nccl_log(log: str) -> Finding:
    """Whether NCCL uses EFA, by its log (NCCL_DEBUG=INFO)."""
    network = re.findall(r"Using network (.+?)\s*$", log, re.MULTILINE)[-1:]  # "Libfabric", "Socket"
    provider = re.findall(r"NET/OFI Selected [Pp]rovider is (\w+)", log)[-1:]
    if not network and not provider:
        todo = "look for 'NET/' with NCCL_DEBUG=INFO"
        return Finding("efa", WARN, "NCCL's log does not say which network it uses", todo)
    if provider == ["efa"] and network != ["Socket"]:
        return Finding("efa", OK, f"NCCL: Selected Provider is efa ({[*network, 'network not named'][0]})")
    todo = "see the NET/OFI lines above it with NCCL_DEBUG=INFO: plugin, libfabric and devices must all be there"
    return Finding("efa", ERROR, f"NCCL uses {[*network, *provider][0]}, not EFA", todo)
