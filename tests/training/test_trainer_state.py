"""The run around its steps: flags stay as they were given, and what they leave open is settled once and shown."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict

import pytest

from common.cli import UserError
from common.data.loader import StepCounts
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import open_data
from common.distributed.world import World
from common.flags import flat
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training.log_row import StepResult
from common.training.loop import train as train_model
from common.training.results import training_results
from common.training.same_run import check_same_data
from common.training.trainer_state import RunPlan, TrainerState, plan_run
from tests.data_fixtures import load_script
from tests.training_fixtures import arguments, flags_of, on_ranks, rows, train

PLAN = RunPlan(PacksPerStep.of(4), PacksPerStep.of(2), 10, 1, 10, 0, 0, 5)
IMPLEMENTATION = {"backend": "torch", "gelu": "exact", "formats": {}}


def _train_and_compare_flags(argv: list[str]) -> None:
    script = load_script("train_ddp.py")
    sys.argv = ["train_ddp.py", *argv]
    args = script.parse_run("", script.DdpFlags)
    before = flat(args)
    train_model(args, script.build)
    assert flat(args) == before


def test_train_leaves_the_flags_unchanged(dataset, tmp_path):
    flags = {"max_steps": 3, "fp8": True, "emulate_precision": True, "do_eval": True, "gradient_accumulation_steps": 2}
    codes, said = on_ranks(1, _train_and_compare_flags, flags_of(dataset, tmp_path, **flags))
    assert codes == [0], said


def test_run_plan_is_in_log_results_and_checkpoint(dataset, tmp_path):
    flags = {"max_steps": 4, "save_steps": 0.5, "do_eval": True, "eval_steps": 2, "packs_per_step": 4}
    said = train(dataset, tmp_path, 2, fp8=True, fp8_layers="2", emulate_precision=True, **flags)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    expected = {
        "backend": "torch",
        "gelu": "exact",
        "bf16_residual": False,
        "formats": {"1": "FP32", "2": "FP8, delayed scaling, hybrid"},
        "packs_per_step": 4,
        "accumulation": 2,
        "total_steps": 4,
        "warmup_steps": 0,
        "last_step": 4,
        "eval_every": 2,
        "downstream_every": 0,
        "save_every": 2,
    }
    assert state["resolved"] == expected
    results = json.loads((tmp_path / "train_results.json").read_text())
    assert (results["backend"], results["gelu"]) == ("torch", "exact")
    for line in (
        "Gradient Accumulation steps = 2",
        "Accumulation is 2, to keep 4 packs",
        "2       FP8, delayed scaling",
    ):
        assert line in said, line
    assert "Flags differ" not in train(dataset, tmp_path, 2, fp8=True, fp8_layers="2", emulate_precision=True, **flags)


def test_trainer_state_of_earlier_version_resumes_without_warning(caplog):
    """Checkpoints of earlier versions hold backend and GELU, as resolved, among the arguments, and no `resolved`."""
    saved = asdict(TrainerState(step=5, arguments={"backend": "torch", "gelu": "exact", "save_steps": 7}))
    del saved["resolved"]
    state = TrainerState(**saved)
    state.start(PLAN, IMPLEMENTATION, {}, {"backend": "auto", "gelu": None, "save_steps": 7}, 1)
    assert not caplog.records
    assert state.arguments == {"backend": "torch", "gelu": "exact", "save_steps": 7}
    assert state.resolved == IMPLEMENTATION | asdict(PLAN) | {"packs_per_step": 4, "accumulation": 2}
    state.start(PLAN, IMPLEMENTATION, {}, {"backend": "auto", "gelu": "tanh", "save_steps": 9}, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "Flags differ from those of the checkpoint: save_steps 7 -> 9"
    ]


@pytest.mark.parametrize(
    ("given", "saved", "expected"),
    [
        (None, {}, 37),  # a new run: 15 %
        (None, {"step": 5, "resolved": {"warmup_steps": 37}}, 37),
        (None, {"step": 5, "resolved": {"warmup_steps": 50}}, 50),  # begun as a run of another length
        (None, {"step": 5, "arguments": {"warmup_steps": 3}, "resolved": {"warmup_steps": 3}}, 37),  # flag dropped
        (0.1, {"step": 5, "resolved": {"warmup_steps": 12}}, 0.1),
        (0, {"step": 5, "resolved": {}}, 0),
    ],
)
def test_trainer_state_keeps_default_warmup(given, saved, expected):
    assert TrainerState(**saved).warmup_steps(given, 250) == expected


@pytest.mark.parametrize("value", ["many", -1, math.nan, math.inf])
def test_trainer_state_refuses_impossible_warmup(value):
    with pytest.raises(UserError, match=r"refused: resolved: warmup_steps is ('many'|-1|nan|inf)"):
        TrainerState.read({"resolved": {"warmup_steps": value}}, "somewhere")


def test_trainer_state_keeps_total_steps_of_a_run_of_epochs(dataset):
    """And one of an earlier version, which counted steps, takes no more of them than it was to take."""
    flags = arguments(dataset, max_steps=-1, num_train_epochs=2)
    now = {"arguments": {"num_train_epochs": 2, "max_steps": -1}, "packs_per_step": 4}
    begun = TrainerState(**now, resolved={"total_steps": 31, "last_step": None})
    before = TrainerState(**now, resolved={"total_steps": 31, "last_step": 31})
    assert begun.saved_steps(flags.data, PacksPerStep.of(4)) == (31, None)
    assert before.saved_steps(flags.data, PacksPerStep.of(4)) == (31, 31)
    for state in (begun, before):
        for other, packs in (({"num_train_epochs": 3}, 4), ({"max_steps": 50}, 4), ({}, 2)):
            others = arguments(dataset, **{"max_steps": -1, "num_train_epochs": 2} | other)
            assert state.saved_steps(others.data, PacksPerStep.of(packs)) == (None, None)
    assert TrainerState().saved_steps(flags.data, PacksPerStep.of(4)) == (None, None)
    stopped = TrainerState(**now | {"arguments": now["arguments"] | {"stop_at_step": 7}}, resolved={"last_step": 7})
    assert stopped.saved_steps(flags.data, PacksPerStep.of(4)) == (None, None)


@pytest.mark.parametrize(
    ("flags", "saved", "packs"),
    [
        ({"tokens_per_step": 2048}, {}, 4),
        (
            {"tokens_per_step": 2048},
            {"arguments": {"tokens_per_step": 2048}, "packs_per_step": 6},
            6,
        ),
        ({"tokens_per_step": 2048}, {"arguments": {"tokens_per_step": 1024}, "packs_per_step": 2}, 4),
        ({"tokens_per_step": 2048}, {"arguments": {}, "packs_per_step": 2}, 4),
        ({}, {"arguments": {"tokens_per_step": 2048}, "packs_per_step": 4}, 4),
        ({}, {"packs_per_step": "0:4,8:6"}, "0:4,8:6"),
        ({"packs_per_step": 3}, {"packs_per_step": "0:4,8:6"}, 3),
        ({"tokens_per_step": 2048}, {"packs_per_step": "0:4,8:6"}, 4),
        ({"packs_per_step_schedule": "0:2,9:5"}, {"packs_per_step": "0:4,8:6"}, "0:2,9:5"),
        ({"packs_per_step_schedule": "0:2,9:5"}, {"packs_per_step": 4}, "0:2,9:5"),
    ],
)
def test_plan_run_keeps_packs_unless_flags_change_them(dataset, flags, saved, packs):
    args, world = arguments(dataset, **flags), World.from_environment(use_cpu=True)
    data = open_data(args.data, ESM2_TOKENS, world, False)
    assert args.pack_tokens == 512
    assert plan_run(args, data, TrainerState(**saved), world).packs_per_step.plain == packs


def test_trainer_state_with_a_ramp_that_is_none_is_refused():
    assert TrainerState.read({"packs_per_step": "0:4,8:6"}, "state").packs_per_step == "0:4,8:6"
    for packs, message in (
        ("0:4,8:", "expected at most 100 step:packs pairs"),
        (-1, "below 0"),
        ([4], "expected int . str"),
    ):
        with pytest.raises(UserError, match=f"^state: refused: .*{message}"):
            TrainerState.read({"packs_per_step": packs}, "state")


def test_trainer_state_raises_after_too_many_skipped_steps_in_a_row(caplog):
    state, counts = TrainerState(), StepCounts(3, 10, 100, 2, 0, 0, 64)
    bad, good = (StepResult(loss, 1.0, loss != 2.0, 0.1, 0.1, []) for loss in (float("inf"), 2.0))
    for result in (bad, good, bad, bad):
        state.advance({"epoch": 1}, 1.5, counts, 7.0, 0.5, result)
    assert (state.step, state.skipped_steps, state.loss_total) == (4, 3, 2.0)
    assert (state.tokens, state.sequences, state.total_flos, state.seconds) == (40, 8, 28.0, 2.0)
    assert (state.position, state.epoch) == ({"epoch": 1}, 1.5)
    state.check_divergence(3)
    with pytest.raises(
        UserError, match="--max_skipped_steps 2 skipped in a row .step 3: loss inf.*; step 4: loss inf"
    ):
        state.check_divergence(2)


def test_trainer_state_counts_unknown_characters_and_warns_once(caplog):
    state, result = TrainerState(), StepResult(2.0, 1.0, False, 0.1, 0.1, [])
    for unknown in (0, 3, 4):
        state.advance({}, 0.0, StepCounts(3, 10, 100, 2, unknown, 0, 64), 7.0, 0.5, result)
    assert state.unknown == 7
    assert [record.getMessage() for record in caplog.records] == [
        "Step 2: characters that are no residues: <unk>; they are counted"
    ]
    assert TrainerState(step=3).unknown == 0  # a checkpoint of before they were counted
    assert training_results(state, IMPLEMENTATION, None)["train_unknown_characters"] == 7


def test_check_same_data_names_what_differs():
    now = {"dataset": "a" * 64 + "-240", "sample_clusters": "0123", "seed": 1}
    check_same_data(now, now)
    with pytest.raises(UserError, match=r"order of batches: seed 2 \(now 1\)"):
        check_same_data(now | {"seed": 2}, now)
    with pytest.raises(UserError, match=r"data have changed since the checkpoint \(.* was b{12}, 240 records; now a"):
        check_same_data(now | {"dataset": "b" * 64 + "-240"}, now)


def test_steps_without_a_target_have_no_loss(dataset, tmp_path):
    """Packs of 128 tokens, of which one in 500 is selected: most have none."""
    flags = {"mlm_probability": 0.002, "tokens_per_pack": 128, "max_steps": 12, "save_steps": 5}
    train(dataset, tmp_path / "whole", **flags)
    train(dataset, tmp_path / "parts", **flags, stop_at_step=7)
    train(dataset, tmp_path / "parts", **flags)
    for out in (tmp_path / "whole", tmp_path / "parts"):
        history = rows(out)
        losses = [row["step_loss"] for row in history if "step_loss" in row]
        assert [row["step"] for row in history] == list(range(1, 13))
        assert 1 <= len(losses) <= 6
        assert min(losses) > 1, "of random weights, not zero"
        assert [row["loss"] for row in history if "loss" in row] == losses
        results = json.loads((out / "train_results.json").read_text())
        assert results["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)
