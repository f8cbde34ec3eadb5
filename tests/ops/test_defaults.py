"""The flags of the jobs of slurm/ and kubernetes/: the same defaults, and a line for the run that the guides show."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sizes import PLANS
from common.data.flags import BatchFlags
from common.data.packing import BatchPlan
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh
from common.flags import flat
from common.training.command_line import parse_run
from common.training.optim import OptimizerFlags
from tests.data_fixtures import load_script
from tests.ops.manifests import (
    EKS_GUIDE,
    ENVSUBSTS,
    GUIDE_JOBS,
    TRAINING,
    containers,
    documents,
    gettext_envsubst,
    job_of,
    render,
    run_shell,
    values,
)
from tests.ops.policy import broken_rules
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
    flags = BatchFlags(**{name: args[name] for name in ("tokens_per_step", "packs_per_step")})
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
    row = parsed(f"{plan.script}.py", *plan.command.replace("\\\n", " ").partition(".py ")[2].split())
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
        given = BatchFlags(**{name: args[name] for name in ("tokens_per_step", "packs_per_step")})
        assert packs_per_step(given, Mesh(size=2), args["tokens_per_pack"]).plain == packs


def test_slurm_trains_a_model_of_ones_own_with_the_same_batch(tmp_path):
    args = of_slurm("train_ddp.py", with_memory(tmp_path, 81559), MODEL="/my/model")
    assert (args["config_name"], args["tokens_per_pack"], args["tokens_per_step"]) == ("/my/model", 4096, 2097152)


GUIDE_RUN = {
    "config_name": "facebook/esm2_t6_8M_UR50D",
    "model_name_or_path": None,
    "max_train_samples": 100_000,
    "pad_to_max_length": True,
    "max_seq_length": 512,
    "bf16": True,
    "do_eval": True,
    "logging_steps": 16,
    "learning_rate": 5e-5,
    "warmup_steps": 0,
    "save_hf": True,
}
THEIRS = {"ddp": (8, 4, 3125), "fsdp": (4, 22, 1136)}  # proteins of a batch, batches of a step, steps


def assert_guides_run(args: dict, strategy: str) -> None:
    """Model, batches, steps, rate and optimiser of the guides' logs."""
    size, packs, steps = THEIRS[strategy]
    assert {name: args[name] for name in GUIDE_RUN | GUIDES_OPTIMISER} == GUIDE_RUN | GUIDES_OPTIMISER
    assert (args["per_device_train_batch_size"], args["packs_per_step"]) == (size, packs)
    plan = BatchPlan(lambda records: np.full(len(records), 300), 100_000, 42, 512, sequences_per_pack=size)
    in_epochs = -(-plan.packs_per_epoch() // packs) if args["num_train_epochs"] == 1 else None
    assert (args["max_steps"] if args["max_steps"] > 0 else in_epochs) == steps
    # Their log has the rate of the next step: after the 16th of 1,136 steps 4.929577464788733e-05.
    optimizer = OptimizerFlags(**{f.name: args[f.name] for f in fields(OptimizerFlags)})
    assert optimizer.schedule(1136)(16) == pytest.approx(4.929577464788733e-05, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 3, 16])
@pytest.mark.parametrize(
    ("script", "strategy"),
    [("train_ddp.py", "ddp"), ("train_ddp_cp.py", "ddp"), ("train_fsdp2.py", "fsdp"), ("train_mfsdp.py", "fsdp")],
)
def test_slurm_guide_variable_gives_the_guides_run(script, strategy, ranks, tmp_path):
    """GUIDE=1, whatever MODEL says and on any number of ranks."""
    own = {"GUIDE": 1, "SLURM_JOB_NUM_NODES": ranks, "MODEL": "facebook/esm2_t36_3B_UR50D", "CP_SIZE": 1}
    args = of_slurm(script, with_memory(tmp_path, 23028), **own)
    assert_guides_run(args, strategy)
    assert of_slurm(script, tmp_path, GUIDE=1, NPROC_PER_NODE="gpu", CP_SIZE=1) == args


def test_slurm_guide_variable_is_0_or_1(tmp_path):
    done = run_shell(f"cd {ROOT}; slurm/train_ddp.sh", SLURM | {"GUIDE": "yes", "TARGET_PATH": tmp_path})
    assert (done.returncode, "GUIDE=yes: 1 for the guides' run, else 0" in done.stderr) == (2, True)


@pytest.mark.parametrize("way", ["gettext", "go", "render.sh", "render.sh --with guide"])
@pytest.mark.parametrize(
    ("name", "script", "results"),
    [
        ("train-ddp", "train_ddp.py", "/fsx-shared/esm/output"),
        ("train-ddp-cp", "train_ddp_cp.py", "/fsx-shared/ddp-cp/guide"),
        ("train-fsdp", "train_fsdp2.py", "/fsx-shared/fsdp-output"),
        ("train-mfsdp", "train_mfsdp.py", "/fsx-shared/mfsdp/guide"),
        ("trainjob", "train_ddp.py", "/fsx-shared/trainjob/guide"),
    ],
)
def test_pods_guide_variable_gives_the_guides_run(name, script, results, way, tmp_path):
    """The guide's exports (MODEL: 3B) and GUIDE=1: its run, with results where it looks for them."""
    template = f"{name}-template.yaml"
    if way in ENVSUBSTS:
        text = ENVSUBSTS[way](template, EKS_GUIDE | {"GUIDE": "1"})
    else:
        text = render(template, "guide") if "guide" in way else render(template, GUIDE="1")
    assert all(broken_rules(document) == {} for document in documents(text))
    (container,) = containers(job_of(text))
    told = values(container) | {"TRAIN_FLAGS": "--seed=7"}
    text = f"cd {ROOT}; " + container["args"][0].replace("cd /workspace\n", "")
    args = parsed(script, *recorded(text, "python3", told, tmp_path))
    assert_guides_run(args, "fsdp" if "fsdp" in script else "ddp")
    assert (args["output_dir"], args["dataset_dir"]) == (results, "/fsx-shared/esm/processed/arrow")
    assert (args["seed"], args["cp_size"]) == (7, 2 if "cp" in script else 1)
    assert f"export TORCH_FR_DUMP_TEMP_FILE={results}/nccl_trace_rank_\n" in text
    assert f", in minutes, to {results}.\n" in template_head(template)


def template_head(template: str) -> str:
    """The first comment of a manifest, which the guide shows with `cat`."""
    return ENVSUBSTS["gettext"](template, EKS_GUIDE).partition("\nkind: ")[0]


@pytest.mark.parametrize("name", ["train-ddp", "train-fsdp", "trainjob"])
def test_pods_say_what_they_train_on_without_the_guide_variable(name, tmp_path):
    template = f"{name}-template.yaml"
    line = (
        "This job trains facebook/esm2_t36_3B_UR50D for an epoch of all proteins. The guide's run of 100,000 proteins "
    )
    (container,) = containers(job_of(ENVSUBSTS["gettext"](template, EKS_GUIDE)))
    script = container["args"][0].replace("cd /workspace\n", "")
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    done = run_shell(f"PATH={tmp_path}:$PATH\n{script}", values(container))
    assert done.stdout == f"{line}with the 8M model, in minutes: export GUIDE=1 before envsubst\n"
    assert "# Trains facebook/esm2_t36_3B_UR50D for an epoch of all proteins; where GUIDE=1" in template_head(template)


DATA = ("download-data", "preprocess", "prepare-shards", "merge-shards")


@pytest.mark.parametrize("template", [*TRAINING, *(f"{name}-template.yaml" for name in DATA), *GUIDE_JOBS[:1]])
def test_pods_without_variables_name_them_and_end_with_2(template):
    """`envsubst` in a shell that has not sourced the variables."""
    text = gettext_envsubst(template, {})
    script = re.search(r"- \|\n( +)((?:.*\n)+?)(?=\s+env:)", text)
    script = re.sub(rf"(?m)^{script[1]}", "", script[1] + script[2]).replace("cd /workspace\n", "")
    done = run_shell(script, {})
    assert done.returncode == 2
    assert re.fullmatch(r"error: empty: [A-Z_ ]+: source (kubernetes/env_vars.sh|env_vars) before .*\n", done.stderr)
    named = set(done.stderr.split(": ")[2].split())
    assert {"NUM_NODES"} <= named if template in (*TRAINING, *GUIDE_JOBS) else named == {"TARGET_PATH"}
