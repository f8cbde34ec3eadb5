"""--find_learning_rate: trials beside a loop of their own, kept over a kill, bounded in time, on any strategy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from common.cli import UserError
from common.data.packs_per_step import PacksPerStep
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.masked_lm import MaskedLM
from extras.compare.losses_file import read_losses
from extras.plan.find_learning_rate.search import (
    DIRECTORY,
    PICTURE,
    RESULTS,
    TABLE,
    find_learning_rate,
)
from extras.plan.find_learning_rate.trials import LAST_PART, losses_file
from tests.data_fixtures import load_script
from tests.decoder_fixtures import decoder_flags, write_text
from tests.training_fixtures import _main, arguments, flags_of, on_ranks

FIND = {"find_learning_rate": True, "find_steps": 12, "max_steps": 400, "tokens_per_pack": 256, "max_eval_samples": 20}
FALLING = FIND | {"mlm_probability": 0.3, "mlm_probability_end": 0.15}  # over the run, not over a trial
TOO_HIGH = 2.56  # the model diverges


def alone() -> World:
    return World(0, 0, 1, torch.device("cpu"))


def build(args, world, previous):
    built = load_model(args, world, previous)
    return Strategy(built.model), built


def results(output_dir: Path) -> dict:
    return json.loads((output_dir / DIRECTORY / RESULTS).read_text())


def plain_loop(dataset: Path, rate: float, warmup: int, steps: int) -> list[float]:
    """The losses of a loop in a few lines, with torch's own AdamW and clipping."""
    args, world = arguments(dataset, **FALLING), alone()
    built = load_model(args, world)
    task = MaskedLM(built, args, world)
    task.open(evaluates=False)
    decayed = [p for p in built.model.parameters() if p.dim() > 1]
    others = [p for p in built.model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8)
    losses = []
    for step in task.steps(PacksPerStep.of(1), 0, {}, steps, args.data.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step.step + 1) / warmup)
        [batch] = step.micro_batches
        loss = task.loss_sum(built.model, batch) / batch["num_targets"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_search_agrees_with_a_plain_loop(dataset, tmp_path):
    """From a rate at which the model diverges; without held-out proteins, so that the training loss decides."""
    only_train = tmp_path / "data"
    only_train.mkdir()
    (only_train / "train").symlink_to(dataset / "train")
    args = arguments(only_train, output_dir=str(tmp_path / "out"), learning_rate=TOO_HIGH, **FALLING)
    find_learning_rate(args, build, alone())
    trials = {trial["learning_rate"]: trial for trial in results(tmp_path / "out")["trials"]}
    assert trials[TOO_HIGH]["diverged"]
    assert len(trials[TOO_HIGH]["losses"]) < 12, "ends early"
    trained = {rate: trial["losses"] for rate, trial in trials.items() if not trial["diverged"]}
    last = round(LAST_PART * 12)
    means = {}
    for rate in [TOO_HIGH / 2**n for n in range(12)]:
        losses = plain_loop(dataset, rate, 2, 12)  # 15 % of 12 steps
        means[rate] = sum(losses[-last:]) / last
        if rate in trained:
            assert trained[rate] == pytest.approx(losses, rel=1e-4)
    best = min(means, key=means.get)
    assert best in trained
    text = (tmp_path / "out" / DIRECTORY / TABLE).read_text()
    assert f"Recommended: --learning_rate {best:g}\n" in text
    assert best / 2 in trained
    assert best * 2 in trials


def test_search_continues_after_a_kill(dataset, tmp_path):
    def at_most(builds: list, most: int):
        def counted(args, world, previous):
            if len(builds) == most:
                raise KeyboardInterrupt
            builds.append(args.optimizer.learning_rate)
            return build(args, world, previous)

        return counted

    def flags(name: str):
        return arguments(dataset, output_dir=str(tmp_path / name), learning_rate=0.02, **FIND)

    whole, first, second = [], [], []
    find_learning_rate(flags("whole"), at_most(whole, 99), alone())
    assert len(whole) > 2
    with pytest.raises(KeyboardInterrupt):
        find_learning_rate(flags("killed"), at_most(first, 2), alone())
    assert not (tmp_path / "killed" / DIRECTORY / TABLE).exists()
    find_learning_rate(flags("killed"), at_most(second, 99), alone())
    assert first + second == whole, "finished trials are not run again"
    expected = results(tmp_path / "whole")
    assert results(tmp_path / "killed") == expected
    assert len({trial["losses"][0] for trial in expected["trials"]}) == 1, "each from the same weights"
    assert expected["trials"][0]["eval_loss"] is not None
    assert expected["start"] > 3, "of random weights"
    for rate, loss in ((0.0, expected["start"]), (0.02, expected["trials"][0]["eval_loss"])):
        losses, _ = read_losses(tmp_path / "whole" / DIRECTORY / f"losses-{rate:g}.parquet")
        assert losses.loss_sum.sum() / losses.masked.sum() == pytest.approx(loss, rel=1e-9)
    for name in (TABLE, PICTURE, *(f"losses-{trial['learning_rate']:g}.parquet" for trial in expected["trials"])):
        assert (tmp_path / "killed" / DIRECTORY / name).read_bytes() == (
            tmp_path / "whole" / DIRECTORY / name
        ).read_bytes()


def test_search_ends_in_time(dataset, tmp_path, caplog):
    """The clock advances four minutes with each look at it: a trial begins after 0, 4 and 8 of 10 minutes."""
    minutes = iter(range(0, 400, 4))
    args = arguments(dataset, output_dir=str(tmp_path), learning_rate=1e-4, **FIND)
    with caplog.at_level("INFO"):
        find_learning_rate(args, build, alone(), clock=lambda: 60.0 * next(minutes))
    assert [trial["learning_rate"] for trial in results(tmp_path)["trials"]] == [1e-4, 2e-4, 4e-4]
    assert "The same command continues the search (--find_minutes)" in caplog.text
    assert "Recommended: --learning_rate 0.0004" in caplog.text


def test_search_refuses_other_flags_and_other_content(dataset, tmp_path):
    def search(**flags):
        given = FIND | {"find_steps": 2, "output_dir": str(tmp_path), "learning_rate": 1e-3} | flags
        find_learning_rate(arguments(dataset, **given), build, alone())

    search(find_minutes=1e-9)
    kept = (tmp_path / DIRECTORY / RESULTS).read_text()
    search(find_minutes=1e-9, dataloader_num_workers=1)
    with pytest.raises(UserError, match=r"its trials had --learning_rate 0.001 \(now 0.002\): give the same flags"):
        search(learning_rate=2e-3)
    with pytest.raises(UserError, match=r"--packs_per_step 1 \(now 2\)"):
        search(packs_per_step=2)
    assert (tmp_path / DIRECTORY / RESULTS).read_text() == kept
    saved = json.loads(kept)
    for name, value in (("losses", [math.nan]), ("learning_rate", "x"), ("losses", 3), ("diverged", None)):
        broken = saved | {"trials": [saved["trials"][0] | {name: value}]}
        (tmp_path / DIRECTORY / RESULTS).write_text(json.dumps(broken))
        with pytest.raises(UserError, match="not results of --find_learning_rate .*: remove it"):
            search()
    for broken in ({}, {"trials": [{"exec": 1}]}, saved | {"settings": 3}):
        (tmp_path / DIRECTORY / RESULTS).write_text(json.dumps(broken))
        with pytest.raises(UserError, match="not results of --find_learning_rate"):
            search()
    (tmp_path / DIRECTORY / RESULTS).write_text(json.dumps(saved | {"data": {"dataset": "another"}}))
    with pytest.raises(UserError, match="the data have changed since its first trials"):
        search()
    (tmp_path / DIRECTORY / RESULTS).write_text(kept)
    losses_file(tmp_path / DIRECTORY, 0.0).write_bytes(b"torn")
    with pytest.raises(UserError, match=r"losses-0.parquet: not losses of proteins .*: remove it"):
        search()


def test_search_compares_on_a_named_set_without_a_validation_split(dataset, tmp_path):
    only_train, own = tmp_path / "data", tmp_path / "own"
    only_train.mkdir()
    (only_train / "train").symlink_to(dataset / "train")
    own.symlink_to(dataset / "test")
    given = FIND | {"find_steps": 2, "output_dir": str(tmp_path), "find_minutes": 1e-9, "eval_dataset": [f"own={own}"]}
    find_learning_rate(arguments(only_train, **given), build, alone())
    found, (losses, _) = results(tmp_path), read_losses(losses_file(tmp_path / DIRECTORY, 0.0))
    assert found["start"] == pytest.approx(losses.loss_sum.sum() / losses.masked.sum(), rel=1e-9)
    assert found["baseline"] is not None
    own.unlink()
    own.symlink_to(dataset / "validation")
    with pytest.raises(UserError, match="the held-out proteins have changed since its first trials: remove it"):
        find_learning_rate(arguments(only_train, **given | {"find_minutes": 9.0}), build, alone())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learning_rate": 0.0}, "--learning_rate 0 is no rate to start from"),
        ({"do_train": False}, "drop --do_train False"),
        ({"resume_from_checkpoint": "/"}, "trials start at step 0: drop --resume_from_checkpoint /"),
    ],
)
def test_search_refuses_contradictions(dataset, tmp_path, flags, message):
    args = arguments(dataset, **FIND | {"output_dir": str(tmp_path / "out")} | flags)
    with pytest.raises(UserError, match=message):
        find_learning_rate(args, build, alone())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--find_steps=3"], "--find_learning_rate"),
        (["--find_learning_rate", "--find_steps=0"], "--find_steps 0: must be at least 1"),
        (["--find_learning_rate", "--find_minutes=0"], "--find_minutes 0.0: must be above 0"),
        (["--find_learning_rate", "--dry_run"], "--find_learning_rate and --dry_run exclude each other"),
    ],
)
def test_search_flags_are_checked(flags, message):
    argv = [*flags_of(Path("data"), Path("out")), *flags]
    with pytest.raises(UserError, match=message):
        parse_run("", load_script("train_ddp.py").DdpFlags, argv)


def search_on_two_ranks(output_dir: Path, argv: list[str], script: str) -> list[dict]:
    """The trials, in a directory that a run has written to and that stays as it was."""
    (output_dir / "checkpoint-5").mkdir(parents=True)
    (output_dir / "metrics.jsonl").write_text('{"step": 5}\n')
    codes, said = on_ranks(2, _main, argv, script)
    assert codes == [0, 0], "\n".join(said)
    assert {path.name for path in output_dir.iterdir()} == {"checkpoint-5", "metrics.jsonl", DIRECTORY}
    assert not list((output_dir / "checkpoint-5").iterdir())
    trials = results(output_dir)["trials"]
    assert len(trials) > 1
    assert len({trial["losses"][0] for trial in trials}) == 1, "each from the same weights"
    return trials


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train_ddp.py", {}),
        pytest.param("train_fsdp2.py", {"optim": "muon"}, marks=pytest.mark.slow),
        pytest.param("train_mfsdp.py", {}, marks=pytest.mark.slow),
        pytest.param("train_ddp_cp.py", {}, marks=pytest.mark.slow),
    ],
)
def test_search_on_two_ranks_is_that_of_one(dataset, tmp_path, script, more):
    flags = FIND | {"find_steps": 3, "packs_per_step": 2, "learning_rate": 0.05} | more
    find_learning_rate(arguments(dataset, output_dir=str(tmp_path / "one"), **flags), build, alone())
    cp_size = 2 if script == "train_ddp_cp.py" else None
    trials = search_on_two_ranks(
        tmp_path / "two", flags_of(dataset, tmp_path / "two", cp_size=cp_size, **flags), script
    )
    for one, two in zip(results(tmp_path / "one")["trials"], trials, strict=True):
        assert one["learning_rate"] == two["learning_rate"]
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)


@pytest.mark.slow
def test_search_of_a_decoder(tmp_path):
    argv = decoder_flags(write_text(tmp_path / "text"), tmp_path / "out", find_learning_rate=1, find_steps=3)
    trials = search_on_two_ranks(tmp_path / "out", argv, "train_fsdp2.py")
    assert all(trial["eval_loss"] is not None for trial in trials)
