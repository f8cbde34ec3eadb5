"""The scripts of slurm/, submitted to a real cluster of three nodes: gloo on CPUs, a tiny model, real faults."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from extras.prepare.sample import write_sample
from tests.live_runs import assert_same_run, newest_step
from tests.ops.slurm_cluster import SlurmCluster, missing
from tests.training_fixtures import ROOT, TINY_MODEL, TINY_OVERRIDES, _main, flags_of, losses, on_ranks, rows, train
from tests.warm_python import programs

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

STEPS = 150
FLAGS = {"max_steps": STEPS, "save_steps": 5, "bf16": True, "save_final_model": False}
TWO_NODES = "--nodes=2 --gpus-per-node=1"  # one rank on each


def flags(**more) -> str:
    """What comes after the script: those flags of a tiny run that no variable gives."""
    usual = {"config_name": None, "config_overrides": TINY_OVERRIDES, "gradient_accumulation_steps": 1}
    return " ".join(flags_of(None, None, **usual | more))


def make_checkout(directory: Path) -> Path:
    """Without a .venv."""
    directory.mkdir()
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".sh", ".txt") or path.name in ("common", "configs", "extras"):
            (directory / path.name).symlink_to(path)
    shutil.copytree(ROOT / "slurm", directory / "slurm")  # where a user may be, with the checkout above
    return directory


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The nodes, and a checkout where jobs are submitted: their logs stay there."""
    checkout = make_checkout(tmp_path_factory.mktemp("slurm") / "checkout")
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "bin").symlink_to(programs())
    variables = {"MODEL": TINY_MODEL["config_name"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with SlurmCluster(checkout, variables) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory) -> Path:
    """The run of FLAGS on two ranks, never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    train(dataset, out, 2, **FLAGS)
    return out


# A controller that is away when it is asked for the first time.
BUSY = """\
#!/bin/sh
[ -e {asked} ] || {{ touch {asked}; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }}
exec {program} "$@"
"""


def start(cluster, dataset: Path, target: Path, **variables: str) -> int:
    """Submit a job that does the run of FLAGS; it is under way."""
    job = cluster.submit(
        f"{TWO_NODES} slurm/train_ddp.sh {flags(**FLAGS)}",
        TARGET_PATH=str(target),
        DATASET_DIR=str(dataset),
        PREFLIGHT="off",
        **variables,
    )
    cluster.until(lambda: len(rows(target / "out-ddp")) > 6, "no step was done")
    return job


def seldom(ask: Callable, seconds: float = 0.5) -> Callable:
    """What it said last, if that is not longer ago: the cluster has better things to do than to answer."""
    last, answer = -math.inf, None

    def asked():
        nonlocal last, answer
        if time.monotonic() > last + seconds:
            answer, last = ask(), time.monotonic()
        return answer

    return asked


def is_told(rank: int) -> bool:
    """Whether SIGUSR1 is pending for the process."""
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{rank}/status").read_text())[1]
    return bool(int(pending, 16) >> (signal.SIGUSR1 - 1) & 1)


def said(cluster, job: int) -> str:
    (log,) = cluster.checkout.glob(f"*_{job}.out")
    return log.read_text()


def test_slurm_runs_the_readmes_commands(cluster, tmp_path):
    """The README's commands on two nodes and a few proteins: three jobs, each of which waits for the one before.

    Training gets no number of GPUs: it takes those that Slurm has, gpu:a10g:2 on one node and gpu:2 on the other.
    """
    target = tmp_path / "target"
    write_sample(tmp_path / "my.fasta", num_proteins=150, seed=1)
    commands = re.search(r"### Slurm\n.*?```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    smaller = {
        r"^\. slurm/create_venv\.sh.*$": ":",
        r"(?<=TARGET_PATH=)\S+": str(target),
        r"(?<=MODEL=)\S+": TINY_MODEL["config_name"],
        r"submit_data\.sh": f"submit_data.sh --source {tmp_path}/my.fasta -- --validation_size 10 --test_size 5",
        r"--nodes=4": "--nodes=2",
        r"train_fsdp\.sh": f"train_fsdp.sh {flags(max_steps=6)}",
        r"^tail -F": "tail -n 0",
    }
    for pattern, replacement in smaller.items():
        commands, count = re.subn(pattern, replacement, commands, flags=re.MULTILINE)
        assert count == 1, pattern
    # The cluster's GPUs are character devices: Slurm counts them, torch does not see them.
    submitted = cluster.on_head(commands, check=False, PREFLIGHT_FLAGS="--gpus_per_node=0")
    job = int(re.search(r"Submitted batch job (\d+)", submitted)[1])
    assert cluster.job(job)["JobState"] == "PENDING"
    assert cluster.end(job) == "COMPLETED", cluster.said()
    out = target / "out-fsdp"
    assert json.loads((out / "all_results.json").read_text())["eval_samples"] == 10
    train(target / "processed" / "arrow", tmp_path / "one", 4, script="train_fsdp2.py", bf16=True, max_steps=6)
    assert losses(out) == losses(tmp_path / "one")
    logs = [*(cluster.checkout / "logs" / f"esm2-fsdp_{job}" / "0").glob("n[12]/*/attempt_0/[01]/stderr.log")]
    assert len(logs) == 2 * 4  # of the preflight, and of training
    assert sum("***** Running training *****" in log.read_text() for log in logs) == 1
    assert "***** Running training *****" in said(cluster, job)


def test_slurm_job_resumes_until_cancelled(cluster, dataset, whole, tmp_path):
    """A rank is killed, a collective fails, a node reboots within seconds, the walltime comes near, a node stays away.

    The job resumes each time, in itself or from the queue. scancel ends it, another one resumes: at last it is the run
    that nothing happened to, to the bit.
    """
    path = stand_ins(tmp_path / "bin", squeue=BUSY.format(program=shutil.which("squeue"), asked=tmp_path / "asked"))
    patience = {"GRACE_SECONDS": "20", "CONTROLLER_PAUSE": "0.1"}
    out, job = tmp_path / "out-ddp", start(cluster, dataset, tmp_path, PATH=path, **patience)

    requeued = seldom(lambda: int(cluster.job(job)["Restarts"]))
    start_now = seldom(lambda: cluster.start_now(job))

    def restarted() -> tuple[int, int]:
        return said(cluster, job).count("starting it again in this job"), requeued()

    def gets_on(cause: str) -> None:
        step = newest_step(out)
        cluster.until(lambda: start_now() or newest_step(out) > step, f"{cause}: does not get on")

    os.kill(cluster.ranks(job)[0], signal.SIGKILL)
    cluster.until(lambda: restarted() == (1, 0), "a killed rank: not started again")
    gets_on("a killed rank")
    port, secret = cluster.rendezvous(job)
    assert len(secret) == 32
    assert secret not in said(cluster, job)
    cluster.cut("n2", "n1", but_port=port)
    cluster.until(lambda: restarted() == (2, 0), "a failed collective: not started again")
    gets_on("a failed collective")
    assert cluster.rendezvous(job)[1] != secret
    cluster.kill("n2")
    cluster.up("n2")
    cluster.until(lambda: sum(restarted()) == 3, "a node that rebooted: not started again")
    gets_on("a node that rebooted")
    # Slurm looks at walltimes every half minute. The run is held so long, so that it needs not be a long one.
    cluster.signal_ranks(job, signal.SIGSTOP)
    cluster.on_head(f"scontrol update JobId={job} TimeLimit=5")
    cluster.until(lambda: "SIGUSR1: the job's time is nearly over" in said(cluster, job), "no warning")
    requeues = restarted()[1]
    cluster.until(lambda: sum(map(is_told, cluster.ranks(job))) == 2, "the ranks are not told", 60)
    cluster.signal_ranks(job, signal.SIGCONT)
    cluster.until(lambda: restarted()[1] > requeues, "the walltime: not requeued")
    assert "Stopped by a signal, checkpoint saved" in said(cluster, job)
    assert "squeue does not answer (1 of 20)" in said(cluster, job)
    cluster.on_head(f"scontrol update JobId={job} TimeLimit=10")
    gets_on("the walltime")
    cluster.kill("n2")
    cluster.until(lambda: restarted()[1] > requeues + 1, "a node that stays away: not requeued")
    cluster.up("n2")
    gets_on("a node that stays away")

    cluster.on_head(f"scancel {job}")
    assert cluster.end(job) == "CANCELLED"
    cluster.until(lambda: "not requeueing" in said(cluster, job), "the script did not end")
    assert not cluster.ranks(job)
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    assert restarted()[1] == requeues + 2
    assert cluster.end(start(cluster, dataset, tmp_path)) == "COMPLETED", cluster.said()
    assert_same_run(out, whole, STEPS, tmp_path)


def test_slurm_guide_job_trains_a_decoder_and_resumes(cluster, tmp_path):
    """`sbatch NAME-training.sbatch` in slurm/, the model made tiny: an exclusive job's steps ask for GPUS_PER_NODE.

    A rank is killed; at last it is the run of two ranks here, which nothing happened to.
    """
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"ab" * n} {n * n}"}}\n' for n in range(2, 400)))
    steps, name = 40, "llama3_2_1b"
    tiny = {"vocab_size": 320, "hidden_width": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    tiny |= {"num_key_value_heads": 1, "max_context_width": 32, "tokenizer": "bytes", "dataset_config_name": ""}
    tiny |= {"dataset": tmp_path / "text.jsonl", "val_split": "train", "validation_batches": 1, "max_steps": steps}
    tiny |= {"checkpoint_freq": 5, "validation_freq": steps, "dataloader_num_workers": 0, "packs_per_step": 2}
    words = [f"--{flag}={value}" for flag, value in tiny.items()]
    # The preflight gets the smallest model: the tests' disk may be too small for the guide's.
    looked_at = f"--gpus_per_node=0 --config_name={TINY_MODEL['config_name']}"
    variables = {"GPUS_PER_NODE": "1", "FI_PROVIDER": "", "PREFLIGHT_FLAGS": looked_at}
    submitted = cluster.on_head(
        f"cd slurm && sbatch --parsable --nodes=2 {name}-training.sbatch {' '.join(words)}", **variables
    )
    job, out = int(submitted), cluster.checkout / "checkpoints" / name
    log = cluster.checkout / "slurm" / f"{name}-FSDP_{job}.out"
    assert cluster.job(job)["JobName"] == f"{name}-FSDP"
    cluster.until(lambda: newest_step(out) >= 5, "no step was done")
    os.kill(cluster.ranks(job)[0], signal.SIGKILL)
    assert cluster.end(job) == "COMPLETED", cluster.said()
    said = log.read_text()
    assert "starting it again in this job" in said
    assert "Device = cpu x 2" in said
    whole = ["--model=llama3_2_1b", *words, f"--output_dir={tmp_path / 'whole'}", "--train_batch_size=1"]
    codes, also = on_ranks(2, _main, whole, "train_fsdp2.py")
    assert codes == [0, 0], "\n".join(also)
    assert len(losses(out)) == steps
    assert losses(out) == losses(tmp_path / "whole")


# What n3 has besides Slurm's own: a driver that lists two GPUs, one of them divided; and a srun that knows containers,
# and runs what is to be in one where it is.
NVIDIA_SMI = """\
#!/bin/sh
echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"
echo "  MIG 1g.18gb     Device  0: (UUID: MIG-1)"
echo "GPU 1: NVIDIA H200 (UUID: GPU-2)"
"""
PYXIS = """\
#!/bin/bash
if [ "$1" = --help ]; then {srun} --help; echo "  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit; fi
arguments=()
for argument; do
  case $argument in
    --container-* | --no-container-*) echo "$argument" >>{log} ;;
    *) arguments+=("$argument") ;;
  esac
done
exec {srun} "${{arguments[@]}}"
"""


def stand_ins(directory: Path, **texts: str) -> str:
    """A PATH with these programs first."""
    directory.mkdir()
    for name, text in texts.items():
        (directory / name.replace("_", "-")).write_text(text)
        (directory / name.replace("_", "-")).chmod(0o755)
    return f"{directory}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"


def test_slurm_trains_in_an_image_on_unmanaged_gpus(cluster, dataset, tmp_path):
    """The guides' `sbatch train_ddp.sh`, with nothing more; the run is one epoch, as the templates have it."""
    target, log = tmp_path / "target", tmp_path / "pyxis"
    target.mkdir()
    (target / "esm-slurm.sqsh").touch()
    path = stand_ins(tmp_path / "bin", nvidia_smi=NVIDIA_SMI, srun=PYXIS.format(srun=shutil.which("srun"), log=log))
    path = path.replace(str(Path(sys.prefix) / "bin"), str(programs()), 1)  # the image's Python
    variables = {"TARGET_PATH": str(target), "DATASET_DIR": str(dataset), "DOCKER_IMAGE_NAME": "esm-slurm"}
    variables["CONTAINER_MOUNTS"] = f"{dataset}:{dataset}"
    tiny = f"--config_overrides={TINY_OVERRIDES} --disable_tqdm=True"
    submitted = cluster.on_head(
        f"cd slurm && sbatch --parsable --partition=plain --nodes=1 train_ddp.sh {tiny}",
        **variables | {"PATH": path, "PREFLIGHT": "off"},
    )
    assert cluster.end(int(submitted)) == "COMPLETED", cluster.said()
    said = (cluster.checkout / "slurm" / f"esm2-ddp_{submitted}.out").read_text()
    assert "Slurm manages no GPUs here; nvidia-smi -L lists 2 on n3" in said
    assert "Device = cpu x 2" in said
    assert f"Steps run in the container {target}/esm-slurm.sqsh" in said
    mounts = f"--container-mounts={cluster.checkout}:{cluster.checkout},{target}:{target},{dataset}:{dataset}"
    image = f"--container-image={target}/esm-slurm.sqsh"
    told = [image, mounts, f"--container-workdir={cluster.checkout}", "--no-container-remap-root"]
    assert log.read_text().splitlines() == told
    assert json.loads((target / "out-ddp" / "all_results.json").read_text())["epoch"] == 1.0
    assert (cluster.checkout / "logs" / f"esm2-ddp_{submitted}").is_dir()


WRONG = {
    "TARGET_PATH is not set … no .venv in … MODEL is not set … has requested no GPUs": (
        "--chdir={no_venv} slurm/train_fsdp.sh",
        {"TARGET_PATH": "", "MODEL": "", "DATASET_DIR": None},
    ),
    "MODEL is not set: say llama3_1_8b … has requested no GPUs": ("slurm/train_clm.sh", {"MODEL": ""}),
    "unknown flag --frobnicate=1": (
        "slurm/llama3_1_8b-training.sbatch --frobnicate=1",
        {"NPROC_PER_NODE": "1", "FI_PROVIDER": ""},
    ),
    "(n3): none, 1 required": (
        "--partition=plain slurm/train_ddp.sh",
        {"GPUS_PER_NODE": "1", "PREFLIGHT": "error"},
    ),
    "MODEL is not set … DATASET_DIR=/no/data: no such directory on n3": (
        "--partition=plain slurm/train_ddp.sh",
        {"MODEL": "", "DATASET_DIR": "/no/data", "PATH": "{nvidia_smi}"},
    ),
    "no GPUs on n3: set NPROC_PER_NODE": ("--partition=plain slurm/train_ddp.sh", {}),
    "(n3): none, 2 required": (
        "--partition=plain slurm/train_ddp.sh",
        {"PATH": "{nvidia_smi}", "PREFLIGHT": "error"},
    ),
    "/esm-slurm.sqsh, but this Slurm has no pyxis": (
        "slurm/preprocess.sh",
        {"TARGET_PATH": "{images}", "DOCKER_IMAGE_NAME": "esm-slurm"},
    ),
    "TARGET_PATH is not set": ("slurm/download_data.sh", {"TARGET_PATH": ""}),
    "MODEL is not set … --cp_size 2 does not divide": ("slurm/train_ddp_cp.sh", {"MODEL": "", "NPROC_PER_NODE": "3"}),
    "--cp_size 4 does not divide this job's 2 ranks (nodes: 1, ranks a node: 2)": (
        "--gpus-per-node=2 slurm/train_ddp_cp.sh --cp_size=2 --cp_size 4",
        {"CP_SIZE": "two"},
    ),
    "--cp_size two: a number": ("slurm/train_ddp_cp.sh", {"CP_SIZE": "two", "NPROC_PER_NODE": "1"}),
    "no such directory on n": ("slurm/train_ddp.sh", {"DATASET_DIR": "/no/data"}),
    "submit with --exclusive or --gpus-per-node=N, or set NPROC_PER_NODE": ("slurm/train_fsdp.sh", {}),
    "CONTAINER_IMAGE=/no/image.sqsh: no such file": ("slurm/train_ddp.sh", {"CONTAINER_IMAGE": "/no/image.sqsh"}),
    "this Slurm has no pyxis": ("slurm/preprocess.sh", {"CONTAINER_IMAGE": "registry#image:1"}),
    "no .venv in": ("--chdir={no_venv} slurm/preprocess.sh", {}),
    "no repository in": ("--chdir={empty} slurm/train_ddp.sh", {}),
    "/no/fasta": ("slurm/download_data.sh --source /no/fasta", {}),
    "3 starts of this job in a row made no new checkpoint": (
        "--chdir={broken} slurm/train_ddp.sh",
        {"NPROC_PER_NODE": "1"},
    ),
    "MIN_NODES=2: submit an array": ("slurm/train_ddp.sh", {"MIN_NODES": "2", "NPROC_PER_NODE": "1"}),
    "none, 2 required": ("--gpus-per-node=2 slurm/train_ddp.sh", {"PREFLIGHT": "error"}),
    "train_mfsdp.py needs an NVIDIA GPU": (f"slurm/train_mfsdp.sh {flags()}", {"NPROC_PER_NODE": "1"}),
    "unknown flag --frobnicate": (f"slurm/train_ddp_cp.sh --frobnicate {flags()}", {"NPROC_PER_NODE": "2"}),
}


def test_slurm_reports_errors_within_seconds(cluster, dataset, tmp_path):
    """All at once, on nodes that they share; none comes back."""
    directories = {"empty": (), "no_venv": ("slurm",), "broken": ("slurm", "common", "extras"), "images": ()}
    for name, has in directories.items():
        (tmp_path / name).mkdir()
        for part in has:
            (tmp_path / name / part).symlink_to(ROOT / part)
    (tmp_path / "broken" / ".venv").symlink_to(sys.prefix)
    (tmp_path / "broken" / "train_ddp.py").write_text("raise SystemExit(1)\n")
    (tmp_path / "images" / "esm-slurm.sqsh").touch()
    places = {name: tmp_path / name for name in directories}
    places["nvidia_smi"] = stand_ins(tmp_path / "bin", nvidia_smi=NVIDIA_SMI)
    logs = {}
    usual = {"TARGET_PATH": str(tmp_path), "DATASET_DIR": str(dataset), "PREFLIGHT": "off"}
    for number, (message, (script, variables)) in enumerate(WRONG.items()):
        log = tmp_path / f"{number}.out"
        script = script.format(**places)
        told = {name: value and value.format(**places) for name, value in (usual | variables).items()}
        told = {name: value for name, value in told.items() if value is not None}
        job = cluster.submit(f"--nodes=1 --oversubscribe --mem=1 --output={log} {script}", **told)
        logs[job] = log, message
    for job, (log, message) in logs.items():
        assert cluster.end(job) == "FAILED", message
        errors = [line for line in log.read_text().splitlines() if "error: " in line and "srun: error" not in line]
        assert len(errors) == 1, log.read_text()
        assert re.search(".*".join(map(re.escape, message.split(" … "))), errors[0]), errors[0]
        assert cluster.job(job)["ExitCode"] == "2:0", message


def test_submit_data_refuses_what_cannot_work(cluster):
    assert cluster.on_head("slurm/submit_data.sh", check=False).startswith("error: TARGET_PATH is not set")
    assert cluster.on_head("squeue -h --name=esm2-download") == ""


def test_submit_data_cancels_the_next_job_after_a_failed_download(cluster, tmp_path):
    last = cluster.on_head("slurm/submit_data.sh --source /no/fasta 2>/dev/null", TARGET_PATH=str(tmp_path))
    assert cluster.end(int(last)) == "CANCELLED"


@pytest.mark.skipif(not (Path(sys.prefix) / "installed-1").exists(), reason="this environment is not install.sh's")
def test_create_venv_leaves_the_shell_that_sources_it_as_it_is(cluster, tmp_path):
    directory = make_checkout(tmp_path / "checkout")
    (directory / ".venv").symlink_to(sys.prefix)
    source = f'cd {directory}; before=$-$(shopt -p)$(set +o)$PWD; . slurm/create_venv.sh; echo "status $?"'
    same = '[ "$before" = "$-$(shopt -p)$(set +o)$PWD" ] && echo same; realpath "$VIRTUAL_ENV"'
    for _ in range(2):
        found = cluster.on_head(f"{source}; {same}", TORCH_BUILD="cpu").splitlines()
        assert found[-3:] == ["status 0", "same", str(Path(sys.prefix).resolve())]
    found = cluster.on_head(f"{source}; {same}", TORCH_BUILD="tpu", check=False).splitlines()
    assert found[:3] == ["error: TORCH_BUILD=tpu: cuda or cpu", "status 2", "same"]
