"""A throw-away Slurm cluster of a head and three nodes on this machine: the real daemons, for tests.

Each host has its own network, host name, process and mount namespace, so killing a node kills everything on it, as
pulling its plug would. Nothing outside the cluster's temporary directory is touched; all of it ends with this process,
however this process ends (setpriv --pdeathsig, unshare --kill-child).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.patience import run, wait_until
from tests.warm_python import at_work

NODES = {"head": "10.231.77.1", "n1": "10.231.77.11", "n2": "10.231.77.12", "n3": "10.231.77.13"}
GPUS = 2  # a node, made of null devices: Slurm counts them, torch sees none; n3, in partition `plain`, has none
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
SBIN = "/usr/sbin:/sbin"

# Waits of seconds in place of minutes; no cgroups, no MPI. Node sizes are taken as written.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=head({head})
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld
SlurmdLogFile={directory}/log/slurmd.%n
PlugStackConfig={directory}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu,nic
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=10
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,bf_window=60
NodeName=n1 NodeAddr={n1} CPUs=16 RealMemory=1000 Gres=gpu:a10g:{gpus},nic:1
NodeName=n2 NodeAddr={n2} CPUs=16 RealMemory=1000 Gres=gpu:{gpus}
NodeName=n3 NodeAddr={n3} CPUs=16 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=plain Nodes=n3 MaxTime=INFINITE State=UP
"""

# Process 1 of a host: waits for its network, then starts the daemons. `--kill-child` ends it, and the host with it.
HOST = """\
set -eu
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
until ip -4 addr show scope global | grep -q inet; do sleep 0.02; done
if [ "$1" = head ]; then
  munged --foreground --force --key-file="$2/munge/key" --socket="$2/munge/socket" --pid-file="$2/munge/pid" \\
    --log-file="$2/log/munged" --seed-file="$2/munge/seed" &
  until [ -S "$2/munge/socket" ]; do sleep 0.02; done
  slurmctld -D -f "$2/slurm.conf" &
else
  slurmd -D -N "$1" -f "$2/slurm.conf" &
fi
while :; do wait || true; sleep 0.2; done
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of network namespaces needs root"
    absent = [tool for tool in TOOLS if not shutil.which(tool, path=f"{os.environ['PATH']}:{SBIN}")]
    return f"not installed: {', '.join(absent)} (tests/ops/install_packages.sh)" if absent else ""


class SlurmCluster:
    """A context manager. Commands run on the head, in `checkout`, with `environment` added to the process' own."""

    def __init__(self, checkout: Path, environment: dict[str, str]):
        self.checkout = checkout
        # A short path: that of a socket has at most 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.environment = os.environ | environment | {"SLURM_CONF": str(self.directory / "slurm.conf")}
        self.environment["PATH"] += f":{SBIN}"
        self.hosts: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            for name in NODES:
                self.up(name)
            self.until(lambda: self.on_head("sinfo -h -N -t idle -o %N").split() == [*NODES][1:], "no idle nodes", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in [*self.hosts]:
            self.kill(name)
        shutil.rmtree(self.directory)

    def _configure(self) -> None:
        directory = self.directory
        directory.chmod(0o755)
        for name in ("munge", "state", *(f"spool/{name}" for name in NODES), "log", "devices"):
            (directory / name).mkdir(parents=True)
        (directory / "munge" / "key").write_bytes(os.urandom(1024))
        (directory / "munge" / "key").chmod(0o600)
        for number in range(GPUS):
            os.mknod(directory / "devices" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        files = {
            "slurm.conf": CONFIGURATION.format(directory=directory, gpus=GPUS, **NODES),
            "gres.conf": f"NodeName=n1 Name=gpu Type=a10g File={directory}/devices/gpu[0-{GPUS - 1}]\n"
            f"NodeName=n1 Name=nic Count=1\nNodeName=n2 Name=gpu File={directory}/devices/gpu[0-{GPUS - 1}]\n",
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # found without mounting anything
            "plugstack.conf": "",
            "hosts": "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NODES.items()),
            "host.sh": HOST,
        }
        for name, text in files.items():
            (directory / name).write_text(text)

    def up(self, name: str) -> None:
        """Start a host; nodes are plugged into the head's switch."""
        with open(self.directory / "log" / f"{name}.out", "a") as log:
            unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
            command = ["setpriv", "--pdeathsig", "KILL", *unshare, "bash", self.directory / "host.sh"]
            self.hosts[name] = subprocess.Popen(
                [*command, name, self.directory],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self.until(lambda: self._process_1(name), f"{name} does not start", 10)
        address = f"{NODES[name]}/24"
        if name == "head":
            commands = ["link set lo up", "link add switch type bridge", f"addr add {address} dev switch"]
            self._ip("head", *commands, "link set switch up")
            return
        # Of a node that was killed, the kernel takes its end of the cable away soon after.
        self.until(lambda: f"to-{name}" not in self._ip("head", "-o link"), f"{name}'s cable stays", 20)
        # A host that comes back has the hardware address that the others remember.
        hardware = f"02:00:00:00:00:{NODES[name].rsplit('.', 1)[1]}"
        self._ip(
            "head", f"link add to-{name} type veth peer name eth0 address {hardware} netns {self._process_1(name)}"
        )
        self._ip("head", f"link set to-{name} master switch up")
        self._ip(name, "link set lo up", f"addr add {address} dev eth0", "link set eth0 up")

    def kill(self, name: str) -> None:
        """The host loses its power."""
        host = self.hosts.pop(name)
        host.kill()
        host.wait()

    def cut(self, name: str, other: str, but_port: int) -> None:
        """All connections between two hosts break, once; but those to that port."""
        command = f"ss -K dst {NODES[other]} and not dport = :{but_port}"
        inside = ["nsenter", "-t", str(self._process_1(name)), "--net", *command.split()]
        done = subprocess.run(inside, check=True, capture_output=True, text=True, env=self.environment)
        assert "ESTAB" in done.stdout, f"{command}: nothing cut: {done.stdout}{done.stderr}"

    def _process_1(self, name: str) -> int | None:
        unshare = self.hosts[name].pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        namespaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in children]
        return int(children[0]) if namespaces and namespaces[0] != os.readlink("/proc/self/ns/net") else None

    def _ip(self, host: str, *commands: str) -> str:
        found = ""
        for command in commands:
            inside = ["nsenter", "-t", str(self._process_1(host)), "--net", "ip", *command.split()]
            found = subprocess.run(inside, check=True, capture_output=True, text=True, env=self.environment).stdout
        return found

    def on_head(self, command: str, check: bool = True, **environment: str) -> str:
        """Run a shell command on the head; what it printed on both outputs. Asserts that it worked, unless told."""
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", f"--wd={self.checkout}"]
        inside = ["nsenter", "-t", str(self._process_1("head")), *namespaces, "--", "bash", "-c", command]
        done = run(inside, 120, stderr=subprocess.STDOUT, env=self.environment | environment)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}"
        return done.stdout.strip()

    def submit(self, options: str, **environment: str) -> int:
        """The new job's number."""
        return int(self.on_head(f"sbatch --parsable {options}", **environment))

    def job(self, number: int) -> dict[str, str]:
        """What scontrol shows of a job; it takes several processes to ask."""
        words = self.on_head(f"scontrol --oneliner show job {number}").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def end(self, number: int, seconds: float = 300) -> str:
        """The state a job ends in. A job that was put back into the queue starts at once, not after two minutes."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

        def ended() -> bool:
            self.start_now(number)
            return self.job(number)["JobState"] in final

        self.until(ended, f"job {number} does not end", seconds, 0.5)
        return self.job(number)["JobState"]

    def start_now(self, number: int) -> None:
        job = self.job(number)
        if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
            time.sleep(3)  # its old credential is revoked, to the second: a new one of the same second would be, too
            self.on_head(f"scontrol update JobId={number} StartTime=now", check=False)

    def _processes(self, number: int) -> Iterator[tuple[Path, set[bytes]]]:
        """Of a job, outside the hosts: where /proc shows each, and its variables."""
        mine = {f"SLURM_JOB_ID={number}".encode(), f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()}
        for entry in Path("/proc").iterdir():
            try:
                variables = set((entry / "environ").read_bytes().split(b"\0")) if entry.name.isdigit() else set()
            except OSError:
                continue  # has just ended
            if mine <= variables:
                yield entry, variables

    def ranks(self, number: int) -> list[int]:
        """Process ids, outside the hosts, of a job's ranks."""
        found = []
        for entry, variables in self._processes(number):
            pid = int(entry.name)
            with suppress(OSError):  # has just ended
                forked = (entry / "comm").read_text().startswith("rank-") and os.getsid(pid) == pid
                if forked or any(name.startswith(b"LOCAL_RANK=") for name in variables):
                    found.append(at_work(pid))
        return found

    def rendezvous(self, number: int) -> tuple[int, str]:
        """Port and id of the rendezvous that a job's launchers are in now."""
        found = set()
        for entry, variables in self._processes(number):
            with suppress(OSError):  # has just ended
                port = re.search(rb"--rdzv_endpoint=[^\0:]+:(\d+)", (entry / "cmdline").read_bytes())
                if port and b"srun" not in (entry / "comm").read_bytes():
                    (name,) = [each for each in variables if each.startswith(b"PET_RDZV_ID=")]
                    found.add((int(port[1]), name.decode().partition("=")[2]))
        ((port, name),) = found
        return port, name

    def signal_ranks(self, number: int, which: signal.Signals) -> None:
        for pid in self.ranks(number):
            os.kill(pid, which)

    def until(self, happened: Callable[[], object], otherwise: str, seconds: float = 300, poll: float = 0.05) -> None:
        wait_until(happened, poll=poll, said=lambda: f"{otherwise}\n{self.said()}", seconds=seconds)

    def said(self) -> str:
        """The ends of all logs: the cluster's and the jobs'."""
        logs = [*(self.directory / "log").iterdir(), *self.checkout.glob("*.out")]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
