"""A step with a NaN or infinite loss or gradient is skipped by all ranks; too many in a row end the run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from common.distributed.strategy import Strategy
from common.models.esm2.model import Esm2ForMaskedLM
from tests.live_runs import assert_same_run, outcome
from tests.training_fixtures import _main, flags_of, on_ranks, rows, train

FLAGS = {"max_steps": 6, "save_steps": 1, "save_final_model": False, "warmup_steps": 0, "lr_scheduler_type": "linear"}

FSDP2 = {"script": "train_fsdp2.py"}
HSDP = FSDP2 | {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}


def poison_steps(steps: dict[int, str], rank: int, first: int) -> None:
    """In `steps` (the first forward pass is step `first`) one rank's "loss" is infinite or "gradient" NaN."""
    passes = first - 1

    def poison(module, inputs, output):
        nonlocal passes
        if not isinstance(module, Esm2ForMaskedLM) or not module.training:
            return None
        passes += 1
        what = steps.get(passes) if torch.distributed.get_rank() == rank else None
        if what == "loss":
            return output._replace(loss_sum=output.loss_sum * math.inf)
        if what == "gradient":
            output.loss_sum.register_hook(lambda gradient: gradient * math.nan)
        return None

    torch.nn.modules.module.register_module_forward_hook(poison)


def _main_poisoned(argv: list[str], script: str, *poison) -> None:
    poison_steps(*poison)
    _main(argv, script)


def poisoned(
    dataset, out, nproc, steps: dict[int, str], rank=0, expect=0, first=1, script="train_ddp.py", **flags
) -> list[str]:
    argv = flags_of(dataset, out, **FLAGS | flags)
    codes, said = on_ranks(nproc, _main_poisoned, argv, script, steps, rank, first)
    assert codes == [expect] * nproc, "\n".join(said)
    return said


@pytest.mark.parametrize(
    ("nproc", "rank", "script"),
    [
        (1, 0, "train_ddp.py"),
        (2, 1, "train_ddp.py"),
        pytest.param(2, 1, "train_fsdp2.py", marks=pytest.mark.slow),
        pytest.param(2, 1, "train_mfsdp.py", marks=pytest.mark.slow),
    ],
)
def test_nan_step_is_skipped_and_counted(dataset, tmp_path, nproc, rank, script):
    """Of step 3 the loss, of step 5 the gradient."""
    out = tmp_path / "out"
    said = poisoned(dataset, out, nproc, {3: "loss", 5: "gradient"}, rank, script=script)
    assert said[0].count("Skipped step 3: loss") == said[0].count("Skipped step 5: loss") == 1
    history = rows(out)
    assert [row["step"] for row in history] == list(range(1, 7))
    assert [row["skipped_steps"] for row in history] == [0, 0, 1, 1, 2, 2]
    assert [row["step"] for row in history if "loss" not in row] == [3, 5]
    assert all(json.dumps(row, allow_nan=False) for row in history)
    # A skipped step is saved with the next one that is taken: steps 3 and 5 have no checkpoint of their own.
    assert sorted(int(path.name[11:]) for path in out.glob("checkpoint-*")) == [1, 2, 4, 6]
    results = json.loads((out / "train_results.json").read_text())
    taken = [row["loss"] for row in history if "loss" in row]
    assert results["train_loss"] == pytest.approx(sum(taken) / len(taken), rel=1e-9)
    # The schedule is a function of the step: linear from 1e-3 to 0.
    assert [row["learning_rate"] for row in history] == pytest.approx([1e-3 * (6 - k) / 6 for k in range(6)])
    # Up to the skipped step it is the run without it, and the next step starts from the weights before it.
    whole = tmp_path / "whole"
    train(dataset, whole, nproc, script=script, **FLAGS | {"save_steps": 10, "stop_at_step": 4})
    assert [row["tokens"] for row in history[:4]] == [row["tokens"] for row in rows(whole)]
    assert [row["loss"] for row in history[:2]] == [row["loss"] for row in rows(whole)[:2]]
    assert history[3]["loss"] != rows(whole)[3]["loss"]


def _main_with_a_rank_gone_wrong(argv: list[str], script: str, step: int, rank: int) -> None:
    """train_ddp.py; in one step the norm of one rank alone is not finite, as with a memory fault."""
    calls, clip = 0, Strategy.clip

    def found(strategy: Strategy, max_norm: float) -> torch.Tensor:
        nonlocal calls
        calls += 1
        norm = clip(strategy, max_norm)
        return norm * math.inf if calls == step and torch.distributed.get_rank() == rank else norm

    Strategy.clip = found
    _main(argv, script)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_nan_of_one_rank_is_skipped_by_all(dataset, tmp_path, rank):
    out = tmp_path / "out"
    argv = flags_of(dataset, out, **FLAGS | {"save_steps": 10})
    codes, said = on_ranks(2, _main_with_a_rank_gone_wrong, argv, "train_ddp.py", 3, rank)
    assert codes == [0, 0], said
    assert f"gradient norm {'nan' if rank else 'inf'}\n" in said[0]
    assert [row["skipped_steps"] for row in rows(out)] == [0, 0, 1, 1, 1, 1]
    # Skipped on both: replicas that had gone apart would give other losses than those of a step poisoned on both.
    poisoned(dataset, tmp_path / "both", 2, {3: "loss"}, save_steps=10)
    assert [row.get("loss") for row in rows(out)] == [row.get("loss") for row in rows(tmp_path / "both")]


@pytest.mark.parametrize(
    ("nproc", "flags"), [pytest.param(1, {}, marks=pytest.mark.slow), (2, FSDP2)], ids=["one", "fsdp2"]
)
def test_resume_after_a_skipped_step_is_bit_identical(dataset, tmp_path, nproc, flags):
    """Stopped after the first of two that are skipped in a row: what it saves then is checkpoint 3 in everything."""
    steps = {4: "loss", 5: "loss"}
    poisoned(dataset, tmp_path / "whole", nproc, steps, nproc - 1, **flags, save_steps=10)
    poisoned(dataset, tmp_path / "out", nproc, steps, nproc - 1, **flags, stop_at_step=4)
    before, after = (outcome(tmp_path / "out", step, tmp_path) for step in (3, 4))
    assert before.keys() == after.keys()
    for name in before:
        same = before[name] == after[name]
        assert bool(same.all() if isinstance(same, torch.Tensor) else same), name
    poisoned(dataset, tmp_path / "out", nproc, steps, nproc - 1, **flags, first=5)
    assert_same_run(tmp_path / "out", tmp_path / "whole", 6, tmp_path)
    assert rows(tmp_path / "out")[-1]["skipped_steps"] == 2


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, FSDP2, marks=pytest.mark.slow),
        pytest.param(4, HSDP, marks=pytest.mark.slow),
    ],
    ids=["one", "ddp", "fsdp2", "hsdp"],
)
def test_too_many_skipped_steps_end_the_run_and_keep_checkpoints(dataset, tmp_path, nproc, flags):
    """Steps 2 and 4-6; three in a row are too many, of which the first two come with nothing saved either."""
    out = tmp_path / "out"
    steps = dict.fromkeys((2, 4, 5, 6), "loss")
    said = poisoned(dataset, out, nproc, steps, nproc - 1, expect=2, max_skipped_steps=3, max_steps=8, **flags)
    errors = [line for rank in said for line in rank.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "--max_skipped_steps 3 skipped in a row (step 4: loss inf, gradient norm nan; step 5: " in errors[0]
    assert "step 6: loss inf" in errors[0]
    assert not any("Traceback" in rank for rank in said)
    assert sorted(int(path.name[11:]) for path in out.glob("checkpoint-*")) == [1, 3]


def test_divergence_by_a_huge_learning_rate_ends_the_run(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", 2, expect=2, **FLAGS | {"learning_rate": 1e38, "max_steps": 40})
    assert "the run has diverged: --max_skipped_steps 5 skipped in a row (step " in said
    assert said.count("Skipped step") == 5


def test_max_skipped_steps_0_is_refused(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", expect=2, max_skipped_steps=0)
    assert said == "error: --max_skipped_steps 0: must be at least 1\n"
