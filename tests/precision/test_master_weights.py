"""--fp8_params: fp32 masters of weights that the model holds in another format, and what it is refused with.

FP8 itself needs a GPU (tests/gpu). Here the other format is bf16: autocast rounds fp32 weights to it in every matmul,
so a run that stores rounded ones, if it loses nothing on the way, is the same run bit for bit.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from common.cli import UserError
from common.distributed.strategy import replicate
from common.models.esm2.config import esm2_config
from common.precision import PrecisionFlags
from common.training.load_model import load_model
from common.training.loop import train
from extras.formats.build import choose_plan
from extras.formats.master_weights import Masters
from tests.data_fixtures import load_script
from tests.training.checkpoint_fixtures import exported, files_of
from tests.training.test_bad_input import refused
from tests.training.test_skipped_steps import poison_steps, poisoned
from tests.training_fixtures import (
    checkpoint_state,
    final_weights,
    flags_of,
    losses,
    on_ranks,
    rows,
    same_bits,
)
from tests.training_fixtures import train as train_plain

FLAGS = {"bf16": True, "max_steps": 12, "save_steps": 6, "do_eval": True, "weight_decay": 0.1}
# Clipping would multiply stored gradients in bf16, masters' in fp32.
FLAGS |= {"max_grad_norm": 0, "warmup_steps": 0, "lr_scheduler_type": "linear"}


def _train_with_masters(argv: list[str], poison: tuple | None) -> None:
    """train_ddp.py, its encoder's matrices stored in bf16."""
    if poison:
        poison_steps(*poison)
    script = load_script("train_ddp.py")
    sys.argv = ["train_ddp.py", *argv]
    args = script.parse_run("", script.DdpFlags)

    def build(args, world, previous):
        built = load_model(args, world, previous)
        model = built.model
        matrices = [name for name, p in model.encoder.named_parameters(prefix="encoder") if p.dim() > 1]
        masters = Masters(model, dict.fromkeys(matrices, torch.Tensor.bfloat16))
        assert len(matrices) == len([p for p in model.parameters() if p.dtype == torch.bfloat16]) == 2 * 4
        assert all(p.dtype == torch.float32 for p in masters.weights.parameters())
        built = replace(built, precision=replace(built.precision, masters=masters))
        return replicate(built.model, world, args.strategy, init_sync=built.precision.masters is None), built

    train(args, build)


def train_with_masters(dataset, output_dir, nproc: int = 1, poison: tuple | None = None, **flags) -> None:
    codes, said = on_ranks(nproc, _train_with_masters, flags_of(dataset, output_dir, **flags), poison)
    assert codes == [0] * nproc, "\n".join(said)


@pytest.fixture(scope="module")
def plain(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    train_plain(dataset, out, **FLAGS)
    return out


def test_master_weights_are_trained_saved_and_exported(dataset, tmp_path, plain):
    """Same bits as the run whose parameters are the masters: losses, evaluation, checkpoint, export."""
    out = tmp_path / "out"
    train_with_masters(dataset, out, **FLAGS)
    assert losses(out) == losses(plain)
    evaluations = [json.loads((where / "eval_results.json").read_text())["eval_loss"] for where in (out, plain)]
    assert evaluations[0] == evaluations[1]
    norms = [[row["grad_norm"] for row in rows(where)] for where in (out, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)  # a norm in bf16
    assert same_bits(final_weights(out), final_weights(plain))
    again, final = files_of(exported(out / "checkpoint-12", tmp_path / "again")), files_of(out / "final_model")
    del again["README.md"], final["README.md"]  # a checkpoint knows no results
    assert again == final
    ours, theirs = (checkpoint_state(where / "checkpoint-12", tmp_path) for where in (out, plain))
    assert same_bits(ours["model"], theirs["model"])
    assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()


@pytest.mark.parametrize("first", ["masters", "plain"])
def test_master_weights_resume_from_plain_checkpoint_and_back(dataset, tmp_path, plain, first):
    half, whole = (train_with_masters, train_plain) if first == "masters" else (train_plain, train_with_masters)
    half(dataset, tmp_path, stop_at_step=6, **FLAGS)
    whole(dataset, tmp_path, **FLAGS)
    assert losses(tmp_path) == losses(plain)
    assert same_bits(final_weights(tmp_path), final_weights(plain))


def test_master_weights_of_two_replicas_equal_one(dataset, tmp_path):
    """Gradients are averaged, added up and clipped in the stored format: bf16 here (FP8 weights have fp32 ones)."""
    flags = FLAGS | {"packs_per_step": 4, "save_steps": 100, "max_grad_norm": 0.5}
    train_plain(dataset, tmp_path / "plain", **flags)
    train_with_masters(dataset, tmp_path / "two", 2, **flags)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)


def test_master_weights_skipped_step_leaves_no_gradient(dataset, tmp_path):
    poison = {5: "gradient"}, 0, 1
    train_with_masters(dataset, tmp_path / "masters", poison=poison, **FLAGS)
    poisoned(dataset, tmp_path / "plain", 1, poison[0], **FLAGS | {"save_final_model": True})
    assert rows(tmp_path / "masters")[-1]["skipped_steps"] == 1
    assert same_bits(final_weights(tmp_path / "masters"), final_weights(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("train_fsdp2.py", {}, "--fp8_params: sharded weights cannot be FP8: Transformer Engine 2.20 updates"),
        ("train_ddp.py", {"quant_stats": True}, "--quant_stats: with --fp8_params there are no weights"),
        ("train_ddp.py", {}, "--fp8: FP8, delayed scaling needs a GPU"),
    ],
)
def test_master_weights_refuse_unsupported_flags(dataset, tmp_path, script, flags, said):
    out = tmp_path / "out"
    flags = {"fp8": True, "fp8_params": True, "bf16": True} | flags
    assert said in refused(dataset, out, script=script, **flags)
    assert not out.exists()


@pytest.mark.parametrize(
    ("recipe", "shards"),
    [
        ("delayed", "equal shards only"),
        ("current", "equal shards only"),
        ("block", "equal shards of whole blocks of 128 rows only"),
        ("mxfp8", "equal shards of whole blocks of 32 rows only"),
    ],
)
def test_fp8_params_say_what_sharding_lacks(recipe, shards):
    flags = PrecisionFlags(bf16=True, fp8=True, fp8_params=True, fp8_recipe=recipe)
    with pytest.raises(UserError, match=f"FusedAdam only, and gathers {shards}: use train_ddp.py"):
        choose_plan(flags, esm2_config(2, 128, 4), torch.device("cpu"), "te", "", sharded=True)
