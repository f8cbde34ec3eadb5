"""One epoch reads each record once: the last step takes the remaining packs, on any number of ranks.

Ranks without packs run as many empty packs as the others run packs, which must not change the result.
"""

from __future__ import annotations

import json

import pytest
import torch

from common.data.training_data import PreparedData
from common.models.esm2.alphabet import ESM2_TOKENS
from tests.training_fixtures import (
    arguments,
    checkpoint_state,
    final_weights,
    losses,
    relative_difference,
    rows,
    same_bits,
    train,
)

RECORDS, PACKS = 200, 6
EPOCH = {"max_steps": -1, "num_train_epochs": 1, "max_train_samples": RECORDS, "packs_per_step": PACKS}
MODES = {
    "padded": {"sequence_packing": False, "per_device_train_batch_size": 10},
    "packed": {"per_device_train_batch_size": 12},
}
FSDP = {"script": "train_fsdp2.py"}
# Sums in another order, fp32: see test_train_ddp.py. A rank that counts twice or not at all is off by a percent.
LOSS, WEIGHTS = 3e-6, 2e-6


def packs_of(dataset, **flags) -> int:
    plan = PreparedData(arguments(dataset, **EPOCH | flags).data, ESM2_TOKENS).plan
    return plan.packs_per_epoch()


PACKED = pytest.mark.parametrize("epoch", ["packed"], indirect=True)
PADDED = pytest.mark.parametrize("epoch", ["padded"], indirect=True)


@pytest.fixture(scope="module", params=MODES)
def epoch(request, dataset, tmp_path_factory):
    """One epoch of one process, and its flags; of the mode of a parameter, by default of each."""
    flags, out = EPOCH | MODES[request.param], tmp_path_factory.mktemp("epoch")
    train(dataset, out, **flags)
    return out, flags


def state_of(out) -> dict:
    return json.loads((out / "trainer_state.json").read_text())


def assert_same(out, alone) -> None:
    assert losses(out) == pytest.approx(losses(alone), rel=LOSS)
    assert relative_difference(final_weights(out), final_weights(alone)) < WEIGHTS
    for key in ("step", "tokens", "epoch", "learning_rate", "total_steps"):
        assert [row[key] for row in rows(out)] == [row[key] for row in rows(alone)], key
    assert state_of(out)["sequences"] == RECORDS


def test_epoch_covers_each_record_once(dataset, epoch):
    out, flags = epoch
    packs = packs_of(dataset, **flags)
    assert packs % PACKS in (2, 5), "choose sizes that leave one of two, and of three, ranks with fewer packs"
    state, results = state_of(out), json.loads((out / "train_results.json").read_text())
    assert (state["step"], state["sequences"], state["epoch"]) == (-(-packs // PACKS), RECORDS, 1.0)
    assert (results["train_samples"], results["epoch"]) == (RECORDS, 1.0)
    tokens = [row["tokens"] for row in rows(out)]
    assert 0 < tokens[-1] - tokens[-2] < 0.9 * tokens[0]
    assert rows(out)[-1]["epoch"] == 1.0
    assert (out / "final_model").exists()


@pytest.mark.parametrize(
    ("epoch", "nproc", "flags"),
    [
        ("padded", 2, {}),
        ("packed", 3, {}),
        pytest.param("padded", 3, FSDP, marks=pytest.mark.slow),
        pytest.param("packed", 2, {"dataloader_num_workers": 3} | FSDP, marks=pytest.mark.slow),
    ],
    indirect=["epoch"],
)
def test_last_step_is_independent_of_ranks_and_workers(dataset, tmp_path, epoch, nproc, flags):
    alone, epochs = epoch
    train(dataset, tmp_path, nproc, **epochs, **flags)
    assert_same(tmp_path, alone)


@pytest.mark.slow
@PACKED
def test_resume_on_other_ranks_ends_at_the_same_step(dataset, tmp_path, epoch):
    alone, flags = epoch
    last = rows(alone)[-1]["step"]
    train(dataset, tmp_path, 2, **flags, stop_at_step=1)
    train(dataset, tmp_path, 3, **flags, stop_at_step=last - 1, **FSDP)
    assert not (tmp_path / "final_model").exists()
    train(dataset, tmp_path, 3, **flags)
    assert_same(tmp_path, alone)
    weights = final_weights(tmp_path)
    said = train(dataset, tmp_path, 1, **flags)
    assert f"Step {last} of {last} is done already" in said
    assert same_bits(final_weights(tmp_path), weights)


@PADDED
def test_resume_before_the_last_step_is_bit_identical(dataset, tmp_path, epoch):
    alone, flags = epoch
    train(dataset, tmp_path, **flags, stop_at_step=rows(alone)[-1]["step"] - 1)
    train(dataset, tmp_path, **flags, dataloader_num_workers=2)
    assert losses(tmp_path) == losses(alone)
    assert same_bits(final_weights(tmp_path), final_weights(alone))


@PACKED
def test_resume_with_other_packs_per_step_ends_with_the_data(dataset, tmp_path, epoch):
    _, flags = epoch
    train(dataset, tmp_path, **flags, stop_at_step=2)
    train(dataset, tmp_path, **flags | {"packs_per_step": 5})
    steps = 2 + -(-(packs_of(dataset, **flags) - 2 * PACKS) // 5)
    state = state_of(tmp_path)
    assert (state["step"], state["resolved"]["total_steps"]) == (steps, steps)
    assert (state["sequences"], state["epoch"]) == (RECORDS, 1.0)


def test_epochs_are_contiguous(dataset, tmp_path):
    flags = EPOCH | MODES["padded"] | {"num_train_epochs": 3}
    train(dataset, tmp_path, 2, **flags)
    state = state_of(tmp_path)
    assert (state["step"], state["sequences"], state["epoch"]) == (-(-3 * 20 // PACKS), 3 * RECORDS, 3.0)
    assert rows(tmp_path)[3]["epoch"] == pytest.approx(24 / 20)


ONE_STEP = {"max_steps": -1, "num_train_epochs": 1, "max_train_samples": 21, "packs_per_step": 64}
ONE_STEP |= {"sequence_packing": False, "per_device_train_batch_size": 10, "save_steps": 1}
EMULATED = {"emulate_precision": True, "quant_stats": True, "quant_stats_freq": 1}


@pytest.mark.parametrize(
    ("flags", "layout", "tolerance"),
    [
        ({"bf16": True}, {"gradient_checkpointing": True}, 1e-3),
        pytest.param({"bf16": True}, FSDP | {"activation_checkpointing": "selective"}, 1e-3, marks=pytest.mark.slow),
        pytest.param(
            {},
            FSDP | {"activation_checkpointing": "full", "offload_activations": True, "sync_each_batch": True},
            0,
            marks=pytest.mark.slow,
        ),
        pytest.param({"fp8": True} | EMULATED, FSDP, 0, marks=pytest.mark.slow),
        ({"fp8": True, "fp8_recipe": "mxfp8", "fp8_layers": "1", "fp4": True, "bf16": True} | EMULATED, {}, 1e-3),
    ],
    ids=["bf16", "bf16, recomputed", "recomputed", "FP8", "MXFP8 and NVFP4"],
)
def test_empty_pack_adds_no_gradient(dataset, tmp_path, flags, layout, tolerance):
    """Three packs where a step may take 64: of two ranks that run two, one has an empty one."""
    train(dataset, tmp_path / "one", **ONE_STEP | flags)
    train(dataset, tmp_path / "two", 2, **ONE_STEP | flags, **layout)
    one, two = (checkpoint_state(tmp_path / name / "checkpoint-1", tmp_path) for name in ("one", "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=LOSS + tolerance)
    assert rows(tmp_path / "two")[0]["grad_norm"] == pytest.approx(
        rows(tmp_path / "one")[0]["grad_norm"], rel=1e-5 + 5 * tolerance
    )
    assert all(torch.isfinite(weight).all() for weight in two["model"].values())
    for name, scale in one.get("scales", {}).items():
        assert torch.allclose(two["scales"][name], scale, rtol=1e-5), name
    if flags.get("quant_stats"):
        stats = [(tmp_path / name / "quant_stats.jsonl").read_text().splitlines() for name in ("one", "two")]
        assert len(stats[0]) == len(stats[1]) > 10
        for ours, theirs in zip(*(map(json.loads, of) for of in stats), strict=True):
            assert (ours["tensor"], ours["gemms"]) == (theirs["tensor"], theirs["gemms"])
            if ours["tensor"] in ("activation", "gradient"):
                for key in ("underflows%", "mse", "l1_norm", "numel"):
                    if key in ours and not tolerance:
                        assert theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-6), (ours, theirs)
