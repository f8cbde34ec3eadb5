"""A pod's container as processes on this machine: its very command and environment, and what the operator adds.

Left out are image, resources and user; the volume /fsx-shared is a temporary directory, /workspace this checkout.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

from tests.live_runs import ranks_of
from tests.ops.manifests import ROOT, containers, documents, render, substitute, values
from tests.patience import wait_until
from tests.warm_python import programs

# Seconds instead of minutes until a node counts as gone; names need not resolve.
PATIENCE = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
TEST_MACHINE = {
    "KUBERNETES_SERVICE_HOST": "10.100.0.1",  # as in every pod
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "PET_MONITOR_INTERVAL": "0.3",
}


def local_job(template: str, volume: Path, *switches: str, **variables) -> dict:
    """The job of a template with its paths on this machine."""
    made = documents(_here(render(template, *switches, **variables), volume))
    return made[-1]


def local_guide_job(file: str, volume: Path, flags: str, **variables) -> dict:
    """The same of one of the FSDP guide's, with further flags for its script; the pods are told the Secret's token."""
    text = _here(substitute(file, **variables), volume)
    secret, _, job = documents(text)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["args"] = [container["args"][0].rstrip() + f" {flags}\n"]
    (token,) = [entry for entry in container["env"] if entry["name"] == "HF_TOKEN"]
    token["value"] = secret["stringData"][token.pop("valueFrom")["secretKeyRef"]["key"]]
    return job


def _here(text: str, volume: Path) -> str:
    return text.replace("/fsx-shared", str(volume)).replace("/workspace", str(ROOT))


def started(container: dict, more: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command line and variables of a container as the kubelet starts it: $(NAME) is a variable's value, $$ a $."""

    def expand(text: str) -> str:
        return re.sub(r"\$(?:\$|\((\w+)\))", lambda found: told.get(found[1], found[0]) if found[1] else "$", text)

    told: dict[str, str] = {}
    for name, value in values(container).items():
        told[name] = expand(value)
    told |= more
    return [expand(word) for word in [*container["command"], *container.get("args", [])]], told


def operator_variables(job: dict, index: int, port: int) -> dict[str, str]:
    """What the controller of the job's kind tells the pod of that index; the pods here share one host."""
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        elastic = spec["elasticPolicy"]
        return {
            "PET_NPROC_PER_NODE": spec["nprocPerNode"],
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_RDZV_BACKEND": elastic["rdzvBackend"],
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_RDZV_ID": elastic["rdzvId"],
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
            "PET_RDZV_CONF": PATIENCE,
            "PYTHONUNBUFFERED": "0",
        }
    if job["kind"] == "TrainJob":
        return {
            "PET_NPROC_PER_NODE": "auto",
            "PET_NNODES": str(spec["trainer"]["numNodes"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
    return {"JOB_COMPLETION_INDEX": str(index)} if "completionMode" in spec else {}


class Pod:
    """The container of a job's pod, started."""

    def __init__(self, job: dict, log: Path, index: int = 0, port: int = 0):
        (container,) = containers(job)
        command, told = started(container, operator_variables(job, index, port))
        path = f"{programs()}:{os.environ['PATH']}"
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=container.get("workingDir"),
                env={"PATH": path, "HOME": str(log.parent)} | TEST_MACHINE | told,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def alive(self) -> bool:
        return self.process.poll() is None

    def delete(self) -> None:
        """As the kubelet does: SIGTERM to process 1, then the time to save."""
        self.process.terminate()

    def end(self) -> int:
        wait_until(lambda: not self.alive(), said=self.said)
        return self.process.returncode

    def kill(self) -> None:
        """Whatever is left of it, the ranks too, which have sessions of their own."""
        ranks = ranks_of(self.process.pid).values() if self.alive() else ()
        for pid in (*ranks, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
