"""A guide's commands typed one after the other into one shell, with stand-ins that record what they are asked.

The checkout is a copy. docker, aws, kubectl, sbatch, srun and the like are recorded; envsubst, the shell and our own
scripts are the real ones. Paths below /fsx/ are in a temporary directory.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.ops.manifests import documents
from tests.patience import run

ROOT = Path(__file__).resolve().parent.parent.parent
# Says no more than a script needs to go on. `sbatch` runs a copy of the job script, as Slurm's first node would, and
# `srun` says that it knows containers. GRES: what sinfo says of the nodes' GPUs.
STAND_IN = r"""#!/usr/bin/env bash
name=${0##*/}
[ "$name" != kc ] || name=kubectl # the guide's alias
printf '%s\0' "$PWD" "$name" "$@" $'\x1e' >>"$RECORD/calls"
case "$name $*" in
  "aws ec2 describe-availability-zones"*) echo us-west-1 ;;
  "aws sts get-caller-identity"*) echo 123456789012 ;;
  "aws ecr describe-repositories"*--repository-names*) echo "RepositoryNotFoundException" >&2; exit 254 ;;
  "aws ecr describe-repositories"*) echo '{"repositories": []}' ;;
  "aws ecr create-repository"*) echo MUTABLE ;;
  "aws ecr batch-get-image"*) printf 'None\tNone\n' ;;
  "aws ecr get-login-password"*) echo password ;;
  "docker build "*)
    file=${@: -1}/Dockerfile
    while [ $# -gt 0 ]; do case $1 in -f | --file) file=$2 ;; esac; shift; done
    [ -f "$file" ] || { echo "ERROR: failed to read dockerfile: open $file: no such file or directory" >&2; exit 1; }
    ;;
  "docker image inspect"*) echo sha256:0 ;;
  "docker push"* | "docker image push"*) echo "aws: digest: sha256:0123456789abcdef size: 1" ;;
  "enroot import "*) echo squashfs >"$3" ;;
  "kubectl apply -f -") cat >"$RECORD/manifest" ;;
  "kubectl apply -f "*) cp "$3" "$RECORD/manifest" ;;
  "kubectl delete -f "*) cp "$3" "$RECORD/deleted" ;;
  "nvidia-smi "*) echo "GPU 0: NVIDIA A10G (UUID: GPU-1)" ;;
  "scontrol "*"show job"*) echo "JobId=7 NumNodes=$SLURM_JOB_NUM_NODES OverSubscribe=NO Contiguous=0" ;;
  "scontrol show hostname"*) echo n1 ;;
  "sinfo "*) echo "${GRES:-(null)}" ;;
  "srun --help") echo "  --container-image=PATH" ;;
  "sbatch "*)
    cp "$1" "$RECORD/slurm_script"
    of() { sed -n "s/^#SBATCH --$1=//p" "$RECORD/slurm_script"; }
    export SLURM_JOB_ID=7 SLURM_JOB_NAME SLURM_JOB_NUM_NODES SLURM_JOB_NODELIST=n1 SLURM_SUBMIT_DIR=$PWD
    SLURM_JOB_NAME=$(of job-name) SLURM_JOB_NUM_NODES=$(of nodes) log=$(of output)
    log=${log//%x/$SLURM_JOB_NAME} log=${log//%j/$SLURM_JOB_ID}
    echo "$log" >"$RECORD/log"
    bash "$RECORD/slurm_script" "${@:2}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    cp "$log" "$RECORD/said"
    echo "Submitted batch job $SLURM_JOB_ID"
    ;;
esac
"""
PROGRAMS = (
    "aws",
    "docker",
    "enroot",
    "hf",
    "kc",
    "kubectl",
    "nvidia-smi",
    "sbatch",
    "scontrol",
    "sinfo",
    "squeue",
    "srun",
)
# The end of one command: its status; what the next one records.
TYPED = """\
export RECORD={record}
{{
{command}
}} >"$RECORD/out" 2>"$RECORD/err" </dev/null
echo $? >"$RECORD/status"
"""


@dataclass(frozen=True)
class Call:
    """A program that was asked for something: from where, and with which arguments."""

    cwd: str
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.program, *self.words))


@dataclass(frozen=True)
class Typed:
    """What came of one command."""

    record: Path
    checkout: Path
    status: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", int(self.text("status")))

    def text(self, name: str) -> str:
        path = self.record / name
        return path.read_text() if path.exists() else ""

    @property
    def calls(self) -> list[Call]:
        calls = [call.split("\0")[:-1] for call in self.text("calls").split("\x1e\0")[:-1]]
        return [Call(cwd, program, tuple(words)) for cwd, program, *words in calls]

    @property
    def manifest(self) -> list[dict]:
        """What kubectl was given."""
        return [document for document in documents(self.text("manifest")) if document]

    def of(self, program: str) -> list[Call]:
        return [call for call in self.calls if call.program == program]


def checkout_in(directory: Path) -> Path:
    """A copy where commands may write: scripts of the cloud as files, the rest as links."""
    directory.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("kubernetes", "slurm", "docker"):
            shutil.copytree(path, directory / path.name)
        elif path.suffix == ".sh" or path.name.startswith(("Dockerfile", ".dockerignore")):
            shutil.copy(path, directory)
        elif not path.name.startswith("."):
            (directory / path.name).symlink_to(path)
    (directory / ".venv" / "bin").mkdir(parents=True)
    return directory


def stand_ins(directory: Path, *more: str) -> str:
    """A PATH with the recording programs first."""
    directory.mkdir(exist_ok=True)
    for name in (*PROGRAMS, *more):
        (directory / name).write_text(STAND_IN)
        (directory / name).chmod(0o755)
    return f"{directory}:/usr/local/bin:/usr/bin:/bin"


def type_commands(commands: dict[str, str], directory: Path) -> dict[str, Typed]:
    """Type the commands ({name: command}, in this order) into one shell; what came of each."""
    checkout = checkout_in(directory / "checkout")
    (directory / "fsx").mkdir()
    venv = checkout / ".venv" / "bin" / "python"
    venv.write_text(STAND_IN)
    venv.chmod(0o755)
    script = []
    for name, command in commands.items():
        record = directory / name
        record.mkdir()
        here = re.sub(r"(?<![\w./])/fsx/", f"{directory}/fsx/", command)
        script.append(TYPED.format(record=record, command=here))
    environment = {"PATH": stand_ins(directory / "bin"), "HOME": str(directory), "LANG": "C.UTF-8"}
    run(["bash", "-c", "".join(script)], 120, cwd=checkout, env=environment)
    return {name: Typed(directory / name, checkout) for name in commands if (directory / name / "status").exists()}


def run_in_pod(script: list[str], variables: dict[str, str], directory: Path) -> tuple[list[Call], str]:
    """Run a container's command with programs that record; what it started, and what it printed."""
    directory.mkdir(exist_ok=True)
    path = stand_ins(directory / "bin", "python3", "torchrun", "hyperpodrun")
    record = directory / "record"
    record.mkdir(exist_ok=True)
    environment = variables | {"PATH": path, "RECORD": str(record), "HOME": str(directory)}
    words = [word.replace("cd /workspace\n", "") for word in script]
    done = run(words, 60, cwd=directory, env=environment)
    assert done.returncode == 0, done.stderr
    calls = [call.split("\0")[:-1] for call in (record / "calls").read_text().split("\x1e\0")[:-1]]
    return [Call(cwd, program, tuple(words)) for cwd, program, *words in calls], done.stdout


def has_envsubst() -> bool:
    return shutil.which("envsubst", path=os.defpath + ":/usr/local/bin:/usr/bin") is not None
