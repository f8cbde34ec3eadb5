"""The Kubernetes templates as the tests see them: rendered by render.sh, and the pods that come of them."""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.patience import run

ROOT = Path(__file__).resolve().parent.parent.parent
KUBERNETES = ROOT / "kubernetes"
# The FSDP guide's nine, made of train-clm-template.yaml (docs/make_guide_jobs.py): for plain envsubst, no switches.
GUIDE_JOBS = sorted(path.name for path in KUBERNETES.glob("*-fsdp.yaml"))
TEMPLATES = sorted({path.name for path in KUBERNETES.glob("*.yaml")} - {*GUIDE_JOBS})
TRAINING = [name for name in TEMPLATES if name.startswith("train")]
SWITCHES = ("elastic", "hyperpod", "instance", "kueue", "metrics", "open", "preflight", "uid")
# Section 1 of the guide for EKS, what env_vars.sh adds, and what the file system's template and the switches add.
EKS_GUIDE = {
    "TARGET_PATH": "/fsx-shared/esm",
    "DOCKER_IMAGE_NAME": "esm",
    "TAG": "aws",
    "MODEL": "facebook/esm2_t36_3B_UR50D",
    "AWS_REGION": "us-east-1",
    "ACCOUNT": "123456789012",
    "REGISTRY": "123456789012.dkr.ecr.us-east-1.amazonaws.com/",
    "GPU_PER_NODE": "8",
    "EFA_PER_NODE": "32",
    "NUM_NODES": "2",
    "OUTPUT_DIR": "/fsx-shared",
}
GUIDE = EKS_GUIDE | {"CP_SIZE": "2", "JOB_NAME": "esm2", "NAMESPACE": "default", "MEMORY": "34Gi"}
FILE_SYSTEM = {"FSX_ID": "fs-0123456789abcdef0", "FSX_MOUNT_NAME": "fsx"}
FSDP_GUIDE = {
    "IMAGE_URI": "123456789012.dkr.ecr.us-east-1.amazonaws.com/esm:aws",
    "INSTANCE_TYPE": "p5.48xlarge",
    "NUM_NODES": "4",
    "GPU_PER_NODE": "8",
    "EFA_PER_NODE": "32",
    "FI_PROVIDER": "efa",
    "HF_TOKEN": "hf_token_of_the_user",
}
SWITCHED = {"QUEUE_NAME": "team", "INSTANCE_TYPE": "p5.48xlarge", "MIN_NODES": "1"}
CPU_ONLY = {"GPU_PER_NODE": "0", "EFA_PER_NODE": "0"}
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/esm:aws"


def run_shell(command: str, variables: dict, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """bash with these variables and no others but PATH."""
    environment = {"PATH": os.environ["PATH"]} | {name: str(value) for name, value in variables.items()}
    return run(["bash", "-euo", "pipefail", "-c", command], 60, cwd=cwd, env=environment)


@functools.cache  # a tenth of a second each
def render(template: str, *switches: str, **variables) -> str:
    """What render.sh prints, with the guide's variables unless told otherwise."""
    flags = f"--with {','.join(switches)} " if switches else ""
    done = run_shell(f"kubernetes/render.sh {flags}{template}", GUIDE | FILE_SYSTEM | SWITCHED | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def substitute(guide_job: str, **variables) -> str:
    """One of GUIDE_JOBS as the guide has it: `source env_vars; envsubst < NAME-fsdp.yaml`."""
    return gettext_envsubst(guide_job, FSDP_GUIDE | variables)


def gettext_envsubst(template: str, variables: dict) -> str:
    """`envsubst < TEMPLATE`, with these variables and no others."""
    done = run_shell(f"envsubst < kubernetes/{template}", variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def go_envsubst(template: str, variables: dict) -> str:
    """The same by the rules of a8m/envsubst, which the FSDP guide links to, with its -no-unset: $NAME is a variable
    too, $$ is a $, and what is not set is a KeyError."""
    text = (KUBERNETES / template).read_text()
    return re.sub(
        r"\$(?:(\$)|(?!_\b)(\w+)|\{(\w+)\})", lambda found: found[1] or str(variables[found[2] or found[3]]), text
    )


ENVSUBSTS = {"gettext": gettext_envsubst, "go": go_envsubst}


def documents(text: str) -> list[dict]:
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def switches_of(template: str) -> list[str]:
    text = (KUBERNETES / template).read_text()
    return [switch for switch in SWITCHES if f"# [{switch}] " in text or f"# [not {switch}]\n" in text]


def job_of(text: str) -> dict:
    """The training job among the documents of a manifest."""
    (job,) = [
        document
        for document in documents(text)
        if document["kind"] in ("PyTorchJob", "HyperPodPyTorchJob", "TrainJob")
    ]
    return job


def pods(document: dict) -> list[dict]:
    """The pods that will run, each as a document of kind Pod: what the controllers make of the rest is left out."""
    kind, name, spec = document["kind"], document["metadata"]["name"], document.get("spec", {})
    if kind == "Pod":
        templates = [document]
    elif kind in ("Job", "Deployment"):
        templates = [spec["template"]]
    elif kind == "PyTorchJob":
        templates = [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    elif kind == "HyperPodPyTorchJob":
        templates = [replica["template"] for replica in spec["replicaSpecs"]]
    elif kind == "TrainJob":
        templates = [_train_job_pod(spec)]
    else:
        templates = []
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name} | template.get("metadata", {}),
            "spec": template["spec"],
        }
        for template in copy.deepcopy(templates)
    ]


def _train_job_pod(spec: dict) -> dict:
    """The runtime's pod, patched: its container `node` is what `trainer` and the patches say."""
    jobs = [job for patch in spec["runtimePatches"] for job in _jobs(patch)]
    (job,) = [job for job in jobs if job["name"] == "node"]
    pod = copy.deepcopy(job["template"]["spec"]["template"])
    (container,) = pod["spec"]["containers"]
    trainer = spec["trainer"]
    container |= {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
    container["resources"] = trainer.get("resourcesPerNode", {})
    return pod


def _jobs(patch: dict) -> list[dict]:
    return patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]


def containers(document: dict) -> Iterator[dict]:
    for pod in pods(document):
        yield from pod["spec"].get("initContainers", [])
        yield from pod["spec"]["containers"]


def values(container: dict) -> dict[str, str]:
    """Its plain environment variables."""
    return {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}


def holders(node, key: str) -> Iterator[dict]:
    """Every mapping below `node` that has the key."""
    if isinstance(node, dict):
        if key in node:
            yield node
        for value in list(node.values()):
            yield from holders(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from holders(value, key)
