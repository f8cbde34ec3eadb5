"""--packs_per_step_schedule in runs: the same on any ranks and strategy, through a resume in any stage."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from common.data.training_data import PreparedData
from common.models.esm2.alphabet import ESM2_TOKENS
from tests.data.stream_fixtures import proteins, write
from tests.decoder_fixtures import train_decoder, write_text
from tests.training_fixtures import (
    arguments,
    final_weights,
    losses,
    relative_difference,
    rows,
    same_bits,
    train,
)

RECORDS, SCHEDULE = 200, "0:2,2:4,4:6"
EPOCH = {"max_steps": -1, "num_train_epochs": 1, "max_train_samples": RECORDS, "per_device_train_batch_size": 8}
RAMP = EPOCH | {"packs_per_step_schedule": SCHEDULE, "save_steps": 1}
# Sums in another order, fp32: see test_train_ddp.py.
LOSS, WEIGHTS = 3e-6, 2e-6


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """An epoch of one process, and what it logged."""
    out = tmp_path_factory.mktemp("alone")
    return out, train(dataset, out, **RAMP)


def state_of(out) -> dict:
    return json.loads((out / "trainer_state.json").read_text())


def test_ramp_ends_with_the_epoch_and_is_in_log_and_checkpoint(dataset, alone):
    out, said = alone
    packs = PreparedData(arguments(dataset, **RAMP).data, ESM2_TOKENS).plan.packs_per_epoch()
    steps = 4 + -(-(packs - 2 * 2 - 2 * 4) // 6)
    assert steps > 5, "choose sizes that need all stages"
    state = state_of(out)
    assert (state["step"], state["sequences"], state["epoch"]) == (steps, RECORDS, 1.0)
    assert {row["total_steps"] for row in rows(out)} == {steps}
    resolved = {"packs_per_step": SCHEDULE, "accumulation": SCHEDULE, "total_steps": steps}
    assert resolved.items() <= state["resolved"].items()
    assert "accumulation; tokens) = 2,048; from step 2: 4,096; from step 4: 6,144" in said
    assert "Gradient Accumulation steps = 2; from step 2: 4; from step 4: 6" in said
    assert "Packs in a step: 2; from step 2: 4; from step 4: 6\n" in said
    tokens = [row["tokens"] for row in rows(out)]
    of_step = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert of_step[:5] == pytest.approx([n * of_step[0] / 2 for n in (2, 2, 4, 4, 6)], rel=0.1)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", {"dataloader_num_workers": 3}),
        pytest.param("train_fsdp2.py", {}, marks=pytest.mark.slow),
        pytest.param("train_mfsdp.py", {}, marks=pytest.mark.slow),
        pytest.param("train_ddp_cp.py", {"cp_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_ramp_on_two_ranks_equals_one(dataset, tmp_path, alone, script, flags):
    train(dataset, tmp_path, 2, script=script, **RAMP | flags, save_total_limit=1)
    assert losses(tmp_path) == pytest.approx(losses(alone[0]), rel=LOSS)
    assert relative_difference(final_weights(tmp_path), final_weights(alone[0])) < WEIGHTS
    for key in ("step", "tokens", "epoch", "learning_rate", "total_steps"):
        assert [row[key] for row in rows(tmp_path)] == [row[key] for row in rows(alone[0])], key


@pytest.mark.parametrize(("step", "flags"), [(1, {}), (2, {"dataloader_num_workers": 2}), (5, {})])
def test_ramp_resumes_in_every_stage_with_the_same_bits(dataset, tmp_path, alone, step, flags):
    """As after a kill: nothing is left but the checkpoint. The schedule is kept without the flag, too."""
    shutil.copytree(alone[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    given = RAMP | flags | ({"packs_per_step_schedule": None} if step == 1 else {})
    assert f"Resuming after step {step}" in train(dataset, tmp_path, **given)
    assert losses(tmp_path) == losses(alone[0])[step:]
    assert same_bits(final_weights(tmp_path), final_weights(alone[0]))
    assert state_of(tmp_path)["resolved"] == state_of(alone[0])["resolved"]


UNEVEN = EPOCH | {"packs_per_step_schedule": "0:3,3:5", "logging_steps": 1}


@pytest.fixture(scope="module")
def uneven_alone(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("uneven")
    train(dataset, out, **UNEVEN)
    return out


@pytest.mark.parametrize(
    ("script", "ranks", "flags"),
    [
        ("train_ddp.py", 2, {}),
        ("train_fsdp2.py", 2, {"dataloader_num_workers": 2}),
        ("train_mfsdp.py", 2, {}),
        ("train_ddp_cp.py", 4, {"cp_size": 2}),
    ],
)
def test_steps_that_ranks_cannot_share_equal_those_of_one(dataset, tmp_path, uneven_alone, script, ranks, flags):
    """3 packs, then 5, on 2 data-parallel ranks, and a resume on one of a run that 2 began."""
    said = train(dataset, tmp_path, ranks, script=script, **UNEVEN | flags, stop_at_step=4)
    assert said.count("does not divide among") == 1
    assert "of 3 packs does not divide among 2 data-parallel ranks (idle: 1 of 4 turns a step)" in said
    assert "Gradient Accumulation steps = 2; from step 3: 3" in said
    train(dataset, tmp_path, **UNEVEN)
    assert losses(tmp_path) == pytest.approx(losses(uneven_alone), rel=LOSS)
    assert relative_difference(final_weights(tmp_path), final_weights(uneven_alone)) < WEIGHTS
    for key in ("step", "tokens", "epoch", "learning_rate", "total_steps"):
        assert [row[key] for row in rows(tmp_path)] == [row[key] for row in rows(uneven_alone)], key


def test_ramp_of_streams_that_ranks_cannot_share_is_refused(tmp_path):
    source = write(tmp_path / "a.parquet", proteins(300), row_group=30)
    flags = {"dataset": source, "max_steps": 6, "packs_per_step_schedule": "0:2,900:5"}
    said = train(None, tmp_path / "out", 2, expect=2, **flags)
    assert "error: a global batch of 5 packs does not divide among 2" in said
    assert "from step 900 of --packs_per_step_schedule" in said
    assert not (tmp_path / "out").exists()


STEPS = {"max_steps": 6, "packs_per_step_schedule": "0:2,2:6,4:4"}


def test_ramp_of_streamed_proteins_resumes_on_other_ranks(tmp_path):
    """Another largest stage is refused: positions belong to streams, and their number follows from it."""
    source = write(tmp_path / "a.parquet", proteins(300), row_group=30)
    flags = STEPS | {"dataset": source}
    train(None, tmp_path / "whole", **flags)
    train(None, tmp_path / "moved", 2, **flags, stop_at_step=3)
    said = train(None, tmp_path / "moved", expect=2, **flags | {"packs_per_step_schedule": "0:2,4:8"})
    assert "--packs_per_step 8: the checkpoint's position is for streams of 6 packs a step" in said
    train(None, tmp_path / "moved", **flags)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=LOSS)
    assert [row["tokens"] for row in rows(tmp_path / "moved")] == [row["tokens"] for row in rows(tmp_path / "whole")]


def test_ramp_of_a_decoder_counts_samples_of_each_step(tmp_path):
    text = write_text(tmp_path / "text")
    said = train_decoder(text, tmp_path / "out", 2, **STEPS | {"packs_per_step": None, "dataset": text})
    speeds = [float(speed) for speed in re.findall(r"Speed: ([0-9.]+) samples/sec", said)]
    samples = [speed * row["step_seconds"] for speed, row in zip(speeds, rows(tmp_path / "out"), strict=True)]
    assert samples == pytest.approx([2 * packs for packs in (2, 2, 6, 6, 4, 4)], rel=0.1)
