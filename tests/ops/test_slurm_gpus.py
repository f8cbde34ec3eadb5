"""How slurm/common.sh counts the GPUs of a node: requested, else sinfo's %G, else nvidia-smi. Stand-ins for these."""

from __future__ import annotations

import pytest

from tests.ops.manifests import ROOT, run_shell

GRES = {
    "(null)": 0,
    "": 0,
    "gpu:8": 8,
    "gpu:a10g:1": 1,
    "gpu:a100:8(S:0-1)": 8,
    "gpu:a100:4(S:0,2),nic:4": 4,
    "nic:4,gpu:v100:2(S:0),gpu:a100:4(S:1)": 6,
    "gpu:1g.10gb:7": 7,
    "gpu:a100_3g.39gb:2(S:0),gpu:a100:3(S:0-1)": 5,
    "mps:800,shard:16,gpumem:80G": 0,
    "gpu:tesla:0": 0,
    # As scontrol shows requests.
    "gres:gpu:2": 2,
    "gres:gpu:h200:8": 8,
    "gres/gpu:a100:4": 4,
    "gres:gpu": 1,
    "gres/gpu:a100": 1,
    "gres:nic:1,gres:gpu:2": 2,
}
JOB = {"SLURM_JOB_ID": 1, "SLURM_JOB_NAME": "job", "SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[1-2]"}
JOB |= {"CONTAINER_IMAGE": "registry#image", "TARGET_PATH": "/tmp"}
STAND_INS = """\
srun() { echo --container-image; }
scontrol() { echo "JobId=1 OverSubscribe=$SHARED Contiguous=0 Power=$REQUEST "; }
sinfo() { [[ " $* " == *" --nodes=n[1-2] "* ]] && printf '%b\\n' "$NODES_HAVE"; }
nvidia-smi() { for ((n = 0; n < DRIVER; n++)); do echo "GPU $n: NVIDIA A10G"; done; }
cd $REPOSITORY; . slurm/common.sh
"""
SHOW = 'count_gpus; all_there; echo "${steps[*]: -1}; ${NPROC_PER_NODE:-step} ranks; preflight ${gpus_per_node:-any}"'


def shell(command: str, **variables):
    usual = {"SHARED": "NO", "REQUEST": "", "NODES_HAVE": "(null)", "DRIVER": 0, "REPOSITORY": ROOT}
    return run_shell(STAND_INS + command, JOB | usual | variables)


def test_gpus_in_reads_every_form_of_gres():
    done = shell("".join(f"gpus_in '{text}';" for text in GRES))
    counted = done.stdout.splitlines()[-len(GRES) :]
    assert dict(zip(GRES, map(int, counted), strict=True)) == GRES, done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NODES_HAVE": "gpu:a10g:1", "DRIVER": 8}, "--gpus-per-node=1; step ranks; preflight 1"),
        ({"NODES_HAVE": "gpu:a100:8(S:0-1),nic:1\\ngpu:8"}, "--gpus-per-node=8; step ranks; preflight 8"),
        ({"NODES_HAVE": "gpu:8", "GPUS_PER_NODE": "4"}, "--gpus-per-node=4; step ranks; preflight 4"),
        ({"NODES_HAVE": "gpu:h200:8", "GPUS_PER_NODE": "h200:4"}, "--gpus-per-node=h200:4; step ranks; preflight 4"),
        ({"NODES_HAVE": "gpu:8", "REQUEST": "x TresPerNode=gres:gpu:a100:2"}, "step ranks; preflight 2"),
        ({"NODES_HAVE": "gpu:8", "REQUEST": "x TresPerJob=gres:gpu:16"}, "step ranks; preflight any"),
        ({"REQUEST": "x TresPerNode=gres/gpu:4", "SHARED": "OK"}, "step ranks; preflight 4"),
        ({"DRIVER": 2}, "2 ranks; preflight 2"),
        ({"DRIVER": 2, "GPUS_PER_NODE": 1}, "1 ranks; preflight 1"),
        ({"NODES_HAVE": "gpu:8", "NPROC_PER_NODE": 3}, "3 ranks; preflight any"),
    ],
)
def test_count_gpus_takes_the_request_then_sinfo_then_the_driver(variables, expected):
    done = shell(SHOW, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(expected)


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"NODES_HAVE": "gpu:8", "SHARED": "OK"}, "this job is not exclusive and has requested no GPUs: submit with"),
        ({"NODES_HAVE": "gpu:8\\ngpu:4"}, "different numbers of GPUs (4, 8): submit with --gpus-per-node=N"),
        ({"NODES_HAVE": "gpu:8\\n(null)"}, "different numbers of GPUs (0, 8)"),
        ({"NODES_HAVE": "gpu:a10g:1", "GPUS_PER_NODE": 8}, "GPUS_PER_NODE=8, but a node of this job has 1 GPUs"),
        ({"NODES_HAVE": "gpu:8", "GPUS_PER_NODE": "all"}, "GPUS_PER_NODE=all: a number, or nothing"),
        ({}, "set NPROC_PER_NODE to train on CPUs"),
    ],
)
def test_count_gpus_says_what_to_submit_instead(variables, error):
    done = shell(SHOW, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert error in line
