"""The flags of the jobs of slurm/ and kubernetes/: the same defaults, and a line for the run that the guides show."""

from __future__ import annotations

import re

import numpy as np
import pytest

from common.data.packing import BatchPlan
from common.flags import flat, parse_arguments
from common.training.masked_lm import TrainArguments
from common.training.optim import lr_schedule
from common.training.registry import parse_run
from tests.data_fixtures import load_script
from tests.training_fixtures import ROOT

PLACES = ["--config_name=facebook/esm2_t6_8M_UR50D", "--dataset_dir=data", "--output_dir=out"]
SLURM = (ROOT / "docs" / "slurm.md").read_text()
GUIDES_OPTIMISER = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1,
}


def parsed(script: str, *flags: str) -> dict:
    kinds = {"train_ddp.py": "DdpFlags", "train_ddp_cp.py": "DdpCpFlags", "train_fsdp2.py": "FsdpFlags"}
    kinds |= {"train_mfsdp.py": "MegatronFlags"}
    kind = kinds[script]
    return flat(parse_run(None, getattr(load_script(script), kind), [*PLACES, *flags]))


def of_slurm() -> list[str]:
    """What slurm/common.sh puts before a job's own flags."""
    (text,) = re.findall(r"^defaults=\((.*?)^\)", (ROOT / "slurm" / "common.sh").read_text(), re.M | re.S)
    return text.split()


@pytest.mark.parametrize("name", ["train-ddp", "train-ddp-cp", "train-fsdp", "train-mfsdp", "trainjob"])
def test_slurm_and_kubernetes_train_with_the_same_defaults(name):
    text = (ROOT / "kubernetes" / f"{name}-template.yaml").read_text()
    ((script, flags),) = re.findall(
        r"exec python3 -m extras\.launch (train_\w+\.py) (.*?)\$\(printenv TRAIN_FLAGS\)", text, re.S
    )
    given = [flag for flag in re.findall(r"--\w+=\S+", flags) if "${" not in flag]
    assert len(given) >= 8
    assert parsed(script, *given) == parsed(script, *of_slurm())


def test_the_defaults_are_one_epoch_of_512_with_three_checkpoints():
    args = parsed("train_fsdp2.py", *of_slurm())
    assert (args["num_train_epochs"], args["max_seq_length"], args["save_total_limit"]) == (1, 512, 3)


@pytest.mark.parametrize(("script", "proteins", "steps"), [("train_ddp.py", 32, 3125), ("train_fsdp2.py", 88, 1136)])
def test_the_documented_line_is_the_guides_run(script, proteins, steps):
    """Steps, batches and optimiser of their logs."""
    (section,) = re.findall(r"## The guides' run\n(.*?)\n## ", SLURM, re.S)
    (line,) = re.findall(r"train_ddp\.sh \\\n(.*?)```", section, re.S)
    if script == "train_fsdp2.py":
        (instead, of) = re.findall(r"`(--per_device.*?)` in place of `(.*?)`", section)[0]
        line = line.replace(of, instead)
    flags = re.findall(r"--\S+", line)
    args = parsed(script, *of_slurm(), *flags)
    assert {name: args[name] for name in GUIDES_OPTIMISER} == GUIDES_OPTIMISER
    assert args["per_device_train_batch_size"] * args["packs_per_step"] == proteins
    count, size = args["max_train_samples"], args["per_device_train_batch_size"]
    plan = BatchPlan(lambda records: np.full(len(records), 300), count, 42, 512, sequences_per_pack=size)
    packs = plan.packs_per_epoch()
    assert (count, packs // args["packs_per_step"]) == (100_000, steps)
    assert args["max_steps"] in (-1, steps)
    args = parse_arguments(None, TrainArguments, argv=[*PLACES, *of_slurm(), *flags])
    # Their log has the rate of the next step: after the 16th of 1,136 steps 4.929577464788733e-05.
    assert lr_schedule(args.optimizer, 1136)(16) == pytest.approx(4.929577464788733e-05, rel=1e-12)
