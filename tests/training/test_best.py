"""The best model of a run: beside transformers' rules, kept, loaded, exported, and the same after an interruption."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace

import pytest
from safetensors.numpy import load_file
from transformers import EarlyStoppingCallback, TrainerControl, TrainingArguments
from transformers import TrainerState as StockState

from common.cli import UserError
from common.distributed.stopping import PREEMPTED
from common.training.arguments import BestFlags
from common.training.best import Best
from common.training.evaluation import Evaluator
from common.training.trainer_state import TrainerState
from extras.compare.losses_file import read_losses
from tests.training_fixtures import _main, flags_of, on_ranks, rows, run_training, train

KNOWN = ["eval_loss_masked", "eval_loss", "eval_accuracy", "eval_glossary_accuracy"]
# Falls, rises, falls again a little, stays, is no number.
VALUES = [3.0, 2.5, 2.6, 2.49, 2.495, 2.49, 2.2, 2.3, math.nan, 2.3]


def results_of(directory) -> dict:
    return json.loads((directory / "all_results.json").read_text())


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_early_stopping_ends_where_transformers_does(patience, tmp_path):
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    arguments = TrainingArguments(
        str(tmp_path), metric_for_best_model="loss", greater_is_better=False, load_best_model_at_end=True, **steps
    )
    callback, stock = EarlyStoppingCallback(patience), StockState()
    flags = BestFlags(load_best_model_at_end=True, early_stopping_patience=patience)
    best, state = Best(flags, KNOWN), TrainerState()
    for step, value in enumerate(VALUES, 1):
        control = TrainerControl()
        callback.on_evaluate(arguments, stock, control, metrics={"eval_loss": value})
        if stock.best_metric is None or value < stock.best_metric:  # as the Trainer does after its callbacks
            stock.best_metric = value
        state.step = step
        best.observe(state, {"eval_loss_masked": value})
        assert best.ends(state) == control.should_training_stop
        assert state.best_metric == stock.best_metric
    assert (state.best_metric, state.best_global_step) == (2.2, 7)


@pytest.mark.parametrize(
    ("metric", "values", "best_step"),
    [
        (None, [3.0, 2.0, 2.5], 2),
        ("eval_glossary_accuracy", [0.1, 0.3, 0.2], 2),
        ("accuracy", [0.1, 0.3, 0.2], 2),
        ("loss", [3.0, math.nan, 2.9], 3),
    ],
)
def test_best_is_the_least_loss_or_the_greatest_of_others(metric, values, best_step):
    best = Best(BestFlags(True, metric), KNOWN)
    state = TrainerState()
    assert not best.observe(state, {best.metric: 0.0}), "before the first step"
    for step, value in enumerate(values, 1):
        state.step = step
        best.observe(state, {best.metric: value})
    assert state.best_global_step == best_step
    state = replace(state, step=9, skipped_lately=["step 9"])
    assert not best.observe(state, {best.metric: -best.sign * math.inf}), "its weights may be spoilt"


def test_unknown_metric_is_refused_before_training(dataset, tmp_path):
    with pytest.raises(UserError, match="--metric_for_best_model lloss: no result of this run's evaluations: eval_l"):
        Best(BestFlags(True, "lloss"), KNOWN)
    contacts = BestFlags(True, "eval_contacts_long_p_at_l")
    Best(contacts, KNOWN, ["--eval_contacts"])
    with pytest.raises(UserError, match="--metric_for_best_model eval_contacts_long_p_at_l: no result"):
        Best(contacts, KNOWN, ["--eval_probe"])
    flags = {"do_eval": True, "eval_steps": 2, "load_best_model_at_end": True}
    said = train(dataset, tmp_path / "out", expect=2, metric_for_best_model="eval_lss", **flags)
    assert said.startswith("error: --metric_for_best_model eval_lss: no result")
    assert not (tmp_path / "out").exists()


BEST = {  # a rate at which the loss soon rises
    "do_eval": True, "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.5, "max_steps": 12,
    "lr_scheduler_type": "constant", "warmup_steps": 3, "max_skipped_steps": 100, "save_total_limit": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def best_run(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("best")
    train(dataset, out, **BEST)
    return out


def test_results_and_model_are_those_of_the_best_step(best_run, dataset, tmp_path):
    results, evaluated = results_of(best_run), [row for row in rows(best_run) if "eval_loss_masked" in row]
    assert [row["step"] for row in evaluated] == [2, 4, 6, 8, 10, 12]
    best = min(evaluated, key=lambda row: row["eval_loss_masked"])
    assert best["step"] < 12, "the last one is no better: else this shows nothing"
    assert results["best_global_step"] == best["step"]
    assert results["eval_loss_masked"] == pytest.approx(best["eval_loss_masked"], rel=1e-6)
    state = json.loads((best_run / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["step"]) == (best["step"], 12)
    kept = sorted(path.name for path in best_run.glob("checkpoint-*"))
    assert kept == sorted({f"checkpoint-{best['step']}", "checkpoint-12"}), "--save_total_limit 1 and the best"
    assert read_losses(best_run / "eval_losses.parquet")[1] == best["step"]
    assert read_losses(best_run / "eval_losses_best.parquet")[1] == best["step"]
    train(dataset, tmp_path, **BEST | {"stop_at_step": best["step"], "save_final_model": True})
    ours, alone = (load_file(out / "final_model" / "model.safetensors") for out in (best_run, tmp_path))
    assert all((ours[name] == alone[name]).all() for name in alone)


def test_interrupted_run_has_the_same_best_model(best_run, dataset, tmp_path):
    train(dataset, tmp_path, **BEST | {"stop_at_step": 7, "save_final_model": False})
    train(dataset, tmp_path, **BEST)
    assert [row.get("eval_loss_masked") for row in rows(tmp_path)] == [
        row.get("eval_loss_masked") for row in rows(best_run)
    ]
    assert results_of(tmp_path)["best_global_step"] == results_of(best_run)["best_global_step"]
    ours, whole = (load_file(out / "final_model" / "model.safetensors") for out in (tmp_path, best_run))
    assert all((ours[name] == whole[name]).all() for name in whole)


def test_best_model_of_a_sharded_optimiser(dataset, tmp_path):
    """In which each rank has the state of the parameters that it has rows of."""
    train(dataset, tmp_path, 2, script="train_mfsdp.py", **BEST)
    results, evaluated = results_of(tmp_path), {row["step"]: row for row in rows(tmp_path) if "eval_loss" in row}
    assert results["best_global_step"] < 12
    assert results["eval_loss"] == pytest.approx(evaluated[results["best_global_step"]]["eval_loss"], rel=1e-6)


def test_best_by_other_flags_is_forgotten(dataset, tmp_path):
    """A loss says nothing of an accuracy, nor of other proteins."""
    train(dataset, tmp_path, **BEST | {"stop_at_step": 6})
    own = {"metric_for_best_model": "accuracy", "eval_dataset": [str(dataset / "test")]}
    said = train(dataset, tmp_path, **BEST | own)
    changed = f"eval_dataset None -> {dataset / 'test'}, metric_for_best_model None -> accuracy"
    assert all(each in said for each in changed.split(", "))
    evaluated = [row for row in rows(tmp_path) if row["step"] > 6 and "eval_accuracy" in row]
    best = max(evaluated, key=lambda row: row["eval_accuracy"])  # the first of equal ones
    assert results_of(tmp_path)["best_global_step"] == best["step"]


def test_run_without_a_value_of_the_metric_says_so(dataset, tmp_path):
    (tmp_path / "two.fasta").write_text(">P1\nMA\n")
    said = train(dataset, tmp_path / "out", **BEST | {"eval_dataset": [str(tmp_path / "two.fasta")], "max_steps": 2})
    assert "No evaluation has compared eval_loss_masked: the last model stays" in said


def test_early_stopping_ends_the_run_for_good(best_run, dataset, tmp_path):
    flags = BEST | {"early_stopping_patience": 2}
    said = train(dataset, tmp_path, **flags)
    best = results_of(best_run)["best_global_step"]
    assert f"Ending at step {best + 4}: 2 evaluations in a row without a better eval_loss_masked" in said
    assert rows(tmp_path)[-1]["step"] == best + 4 < 12
    assert (tmp_path / "final_model").exists()
    again = train(dataset, tmp_path, **flags)
    assert f"Step {best + 4} of {best + 4} is done already: nothing to train" in again


def test_early_stopping_by_an_interrupted_evaluation(best_run, dataset, tmp_path):
    flags = BEST | {"early_stopping_patience": 2}
    last = results_of(best_run)["best_global_step"] + 4
    codes, _ = on_ranks(1, _signalled_in_evaluation, flags_of(dataset, tmp_path, **flags), last)
    assert codes == [PREEMPTED]
    assert f"Ending at step {last}: 2 evaluations" in train(dataset, tmp_path, **flags)
    assert rows(tmp_path)[-1]["step"] == last


def _signalled_in_evaluation(argv: list[str], at: int) -> None:
    """A run that gets SIGTERM in the evaluation after `at` steps."""
    whole = Evaluator.evaluate_split

    def evaluate_split(self, step, *arguments):
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, step, *arguments)

    Evaluator.evaluate_split = evaluate_split
    _main(argv)


def test_comparing_needs_evaluations(dataset, tmp_path):
    done = run_training(dataset, tmp_path / "out", early_stopping_patience=2, do_eval=True)
    assert done.returncode == 2
    assert "--early_stopping_patience compares evaluations" in done.stderr
    assert "--eval_steps" in done.stderr
