"""The flags of the jobs of slurm/ and kubernetes/: the same defaults, and a line for the run that the guides show."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sizes import PLANS
from common.data.flags import StepFlags
from common.data.packing import BatchPlan
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh
from common.flags import flat
from common.training.optim import OptimizerFlags
from common.training.registry import parse_run
from common.training.schedule import lr_schedule
from tests.data_fixtures import load_script
from tests.ops.manifests import containers, job_of, render
from tests.ops.test_init_from import SLURM, recorded
from tests.training_fixtures import ROOT

PLACES = ["--config_name=facebook/esm2_t6_8M_UR50D", "--dataset_dir=data", "--output_dir=out"]
FLAGS_OF = {"train_ddp.py": "DdpFlags", "train_ddp_cp.py": "DdpCpFlags", "train_fsdp2.py": "FsdpFlags"}
FLAGS_OF |= {"train_mfsdp.py": "MegatronFlags"}
GUIDES_OPTIMISER = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1,
}


def parsed(script: str, *flags: str) -> dict:
    return flat(parse_run(None, getattr(load_script(script), FLAGS_OF[script]), list(flags)))


NVIDIA_SMI = '#!/bin/sh\ncase $* in *csv,noheader) echo "%s MiB" ;; *) echo %s ;; esac\n'


def with_memory(directory: Path, memory: int) -> Path:
    """A PATH's directory with an nvidia-smi that tells this memory of a GPU, in MiB."""
    (directory / "nvidia-smi").write_text(NVIDIA_SMI % (memory, memory))
    (directory / "nvidia-smi").chmod(0o755)
    return directory


def of_slurm(script: str, directory: Path, **variables) -> dict:
    """The arguments that a job script gives its training script on a node with this nvidia-smi."""
    name = script.replace("fsdp2", "fsdp").replace(".py", ".sh")
    variables = SLURM | {"TARGET_PATH": directory, "HOME": directory, "DATASET_DIR": directory} | variables
    flags = recorded(f"cd {ROOT}; slurm/{name} $FLAGS", "srun", {"FLAGS": ""} | variables, directory)
    return parsed(script, *flags, *PLACES[1:])


def of_pods(name: str, script: str, directory: Path, model: str) -> dict:
    (container,) = containers(job_of(render(f"{name}-template.yaml", MODEL=model)))
    text = container["args"][0].replace("cd /workspace\n", "")
    flags = recorded(f"cd {ROOT}; {text}", "python3", {}, directory)
    return parsed(script, *flags, *PLACES[1:])


def step_tokens(args: dict, ranks: int) -> int:
    """Tokens of a global step, with the packs that the training script takes."""
    pack = args["per_device_train_batch_size"] * args["max_seq_length"]
    flags = StepFlags(**{name: args[name] for name in ("tokens_per_step", "packs_per_step")})
    return packs_per_step(flags, Mesh(size=ranks), pack).most * pack


@pytest.mark.parametrize("memory", [23028, 81559])
@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("train-ddp", "train_ddp.py"),
        ("train-ddp-cp", "train_ddp_cp.py"),
        ("train-fsdp", "train_fsdp2.py"),
        ("train-mfsdp", "train_mfsdp.py"),
        ("trainjob", "train_ddp.py"),
    ],
)
def test_slurm_and_kubernetes_train_with_the_same_defaults(name, script, memory, tmp_path):
    model = "facebook/esm2_t33_650M_UR50D"
    pods = of_pods(name, script, with_memory(tmp_path, memory), model)
    assert pods == of_slurm(script, tmp_path, MODEL=model, NPROC_PER_NODE=2)  # context parallelism is of two
    assert (pods["num_train_epochs"], pods["max_steps"], pods["save_total_limit"]) == (1, -1, 3)
    assert pods["tokens_per_pack"] == (16384 if memory > 80000 else 4096)


@pytest.mark.parametrize("memory", [23028, 81559])
@pytest.mark.parametrize("size", ["8M", "35M", "150M", "650M", "3B", "15B"])
def test_slurm_trains_each_size_with_the_batch_of_sizes_md(size, memory, tmp_path):
    """On 1, 8 and 32 GPUs: the row's tokens a step, rate and weight decay; its packs on 80 GB."""
    plan = next(plan for plan in PLANS if plan.size == size)
    args = of_slurm(f"{plan.script}.py", with_memory(tmp_path, memory), MODEL=plan.name)
    row = parsed(f"{plan.script}.py", *plan.command.partition(".py ")[2].split())
    for name in ("learning_rate", "weight_decay", "warmup_steps", "max_seq_length", "tokens_per_step", "bf16"):
        assert args[name] == row[name]
    assert args["tokens_per_pack"] == (row["tokens_per_pack"] if memory > 80000 else 4096)
    assert args.get("activation_checkpointing") == row.get("activation_checkpointing")
    for ranks in (1, 8, 32):
        assert step_tokens(args, ranks) == pytest.approx(plan.step_tokens, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "packs"),
    [
        ("", 128),
        ("--gradient_accumulation_steps=3", None),
        ("--packs_per_step=40", 40),
        ("--tokens_per_step=65536", 4),
        ("--tokens_per_pack=4096", 512),
        ("--per_device_train_batch_size=32", 64),
    ],
)
def test_slurm_flags_replace_the_batch(flags, packs, tmp_path):
    args = of_slurm("train_ddp.py", with_memory(tmp_path, 81559), MODEL="esm2_t33_650M_UR50D", FLAGS=flags)
    if packs is None:
        assert (args["tokens_per_step"], args["gradient_accumulation_steps"]) == (None, 3)
    else:
        given = StepFlags(**{name: args[name] for name in ("tokens_per_step", "packs_per_step")})
        assert packs_per_step(given, Mesh(size=2), args["tokens_per_pack"]).plain == packs


def test_slurm_trains_a_model_of_ones_own_with_the_same_batch(tmp_path):
    args = of_slurm("train_ddp.py", with_memory(tmp_path, 81559), MODEL="/my/model")
    assert (args["config_name"], args["tokens_per_pack"], args["tokens_per_step"]) == ("/my/model", 4096, 2097152)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("script", "proteins", "steps"),
    [
        ("train_ddp.py", 32, 3125),
        ("train_ddp_cp.py", 32, 3125),
        ("train_fsdp2.py", 88, 1136),
        ("train_mfsdp.py", 88, 1136),
    ],
)
def test_guide_variable_gives_the_guides_run(script, proteins, steps, ranks, tmp_path):
    """GUIDE=1: steps, batches, optimiser and directory of their logs, on any number of GPUs that can share a step."""
    own = {"GUIDE": 1, "SLURM_JOB_NUM_NODES": ranks, "MODEL": "facebook/esm2_t6_8M_UR50D", "CP_SIZE": 1}
    args = of_slurm(script, with_memory(tmp_path, 23028), **own)
    assert {name: args[name] for name in GUIDES_OPTIMISER} == GUIDES_OPTIMISER
    size, packs = args["per_device_train_batch_size"], args["packs_per_step"]
    assert size * packs == proteins
    assert packs % ranks == 0
    assert args["max_train_samples"] == 100_000
    plan = BatchPlan(lambda records: np.full(len(records), 300), 100_000, 42, 512, sequences_per_pack=size)
    assert plan.packs_per_epoch() // packs == steps
    assert args["max_steps"] == steps
    # Their log has the rate of the next step: after the 16th of 1,136 steps 4.929577464788733e-05.
    optimizer = OptimizerFlags(**{f.name: args[f.name] for f in fields(OptimizerFlags)})
    assert lr_schedule(optimizer, 1136)(16) == pytest.approx(4.929577464788733e-05, rel=1e-12)


def test_guide_variable_with_an_unknown_number_of_ranks(tmp_path):
    """`gpu`: each node counts its own; the training script says whether they can share a step."""
    own = {"GUIDE": 1, "NPROC_PER_NODE": "gpu", "MODEL": "facebook/esm2_t6_8M_UR50D"}
    args = of_slurm("train_ddp.py", with_memory(tmp_path, 23028), **own)
    assert (args["per_device_train_batch_size"], args["packs_per_step"]) == (8, 4)


def test_guide_variable_with_ranks_that_cannot_share_a_step(tmp_path):
    """3 ranks: 33 proteins, the next number above 32 that they can share."""
    own = {"GUIDE": 1, "SLURM_JOB_NUM_NODES": 3, "MODEL": "facebook/esm2_t6_8M_UR50D"}
    args = of_slurm("train_ddp.py", with_memory(tmp_path, 23028), **own)
    assert (args["per_device_train_batch_size"], args["packs_per_step"], args["max_steps"]) == (1, 33, 3030)
