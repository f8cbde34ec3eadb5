"""What holds for the runs of every encoder family: tests of a family call these with its own model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from extras.after.downstream.mutations import read_table
from extras.after.inference.correlation import spearman
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.mutation_scores import score
from extras.export import choose, export
from tests.live_runs import LiveRun, assert_same_run, newest_step
from tests.training_fixtures import final_weights, losses, relative_difference, rows, same_bits, train

RUN = {"max_steps": 6, "packs_per_step": 4, "tokens_per_pack": 256, "save_steps": 3}
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("train_ddp.py", {"gradient_checkpointing": True}),
    ("train_fsdp2.py", {"activation_checkpointing": "selective"}),
    ("train_mfsdp.py", {}),
    ("train_ddp_cp.py", {"cp_comm_type": "all_gather"}),
]


def every_strategy(slow: set[str]) -> pytest.MarkDecorator:
    """Parametrise a test by the train scripts and flags of each; slow: the scripts whose test is."""
    marks = {script: [pytest.mark.slow] if script in slow else [] for script, _ in STRATEGIES}
    rows = [pytest.param(script, flags, marks=marks[script]) for script, flags in STRATEGIES]
    return pytest.mark.parametrize(("script", "flags"), rows)


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "all_results.json").read_text())


def assert_two_ranks_equal_one(dataset: Path, alone: Path, out: Path, script: str, flags: dict[str, Any]) -> None:
    """alone: what one process trained with the same flags."""
    if script == "train_mfsdp.py":
        pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    train(dataset, out, 2, script=script, **flags)
    assert losses(out) == pytest.approx(losses(alone), rel=1e-5)
    assert [row["grad_norm"] for row in rows(out)] == pytest.approx(
        [row["grad_norm"] for row in rows(alone) if "loss" in row], rel=1e-4
    )
    assert relative_difference(final_weights(out), final_weights(alone)) < 1e-5


def assert_resumes(dataset: Path, alone: Path, out: Path, flags: dict[str, Any]) -> None:
    for stop in (3, flags["max_steps"]):
        train(dataset, out, do_eval=True, stop_at_step=stop, **flags)
    assert losses(out) == losses(alone)
    assert same_bits(final_weights(out), final_weights(alone))


def assert_resumes_after_kill(dataset: Path | None, out: Path, flags: dict[str, Any]) -> None:
    """A run that is killed and started again is the run that nothing happened to."""
    killed, whole, flags = out / "killed", out / "whole", flags | {"max_steps": 200, "save_steps": 1}
    with LiveRun(dataset, killed, out / "logs", **flags) as run:
        run.until(lambda: newest_step(killed) >= 4)
        run.signal(signal.SIGKILL)
        assert run.end() == [-signal.SIGKILL]
    end = newest_step(killed) + 3
    for directory in (killed, whole):
        train(dataset, directory, **flags, stop_at_step=end)
    assert_same_run(killed, whole, end, out)


def assert_export_is_the_model(dataset: Path, alone: Path, out: Path, gym: Path) -> None:
    """final_model has the run's losses and scores, and a checkpoint exports it. gym: the run's --eval_mutations."""
    found = results(alone)
    again = {"model_name_or_path": alone / "final_model", "do_train": False, "do_eval": True}
    train(dataset, out / "again", **again)
    assert results(out / "again")["eval_loss"] == found["eval_loss"]
    encoder = Encoder(EncoderFlags(str(alone / "final_model")), torch.device("cpu"))
    table = read_table(gym)
    expected = spearman(score(encoder, table.variants, True), table.measured)
    assert found["eval_mutations_gym_masked"] == pytest.approx(expected, abs=1e-6)
    export(choose(alone / "checkpoint-6"), out / "model")
    assert same_bits(load_file(out / "model" / "model.safetensors"), final_weights(alone))


def assert_muon_on_two_ranks_equals_one(dataset: Path, out: Path, flags: dict[str, Any]) -> None:
    flags = flags | {"optim": "muon", "max_steps": 3, "save_steps": 3}
    train(dataset, out / "alone", **flags)
    train(dataset, out / "fsdp2", 2, script="train_fsdp2.py", **flags)
    assert losses(out / "fsdp2") == pytest.approx(losses(out / "alone"), rel=1e-5)
    assert relative_difference(final_weights(out / "fsdp2"), final_weights(out / "alone")) < 1e-5
