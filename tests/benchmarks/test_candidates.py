"""benchmarks.candidates: each change does to a run what its paper says; a run that has it still trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import candidates
from common.cli import UserError
from common.models.esm2 import model as esm2
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.residual import Block
from common.training import evaluation, load_model, task
from extras.speed.muon import Muon, OwnedBlock
from tests.forked import run_script
from tests.training_fixtures import environment, flags_of, rows


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """The changes replace these; they are put back after a test."""
    for place, name in (
        (task, "build_optimizer"),
        (load_model, "initialise"),
        (esm2, "F"),
        (evaluation.Evaluator, "evaluate"),
        (Muon, "_updates"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))


def sgd(monkeypatch, weights: torch.Tensor, **options) -> torch.optim.Optimizer:
    """An optimiser whose update is the gradient, built as a run builds its own after the change."""
    monkeypatch.setattr(task, "build_optimizer", lambda: torch.optim.SGD([weights], **options))
    return lambda: task.build_optimizer()


def test_normuon_evens_the_rows_and_keeps_the_norm(monkeypatch):
    monkeypatch.setattr(Muon, "_updates", lambda self, blocks, rows: rows)
    candidates.apply("normuon=0.9")
    block = OwnedBlock(0, Block(rows=8, groups=2, parts=2), 5, 0, 0, (8,), slice(0, 8))
    of_part = [[0, 1, 4, 5], [2, 3, 6, 7]]  # two matrices, whose rows take turns in pairs
    generator = np.random.default_rng(1)
    average = np.zeros(8)
    for _ in range(3):
        update = generator.normal(size=(8, 5)) * generator.uniform(0.1, 3, size=(8, 1))
        (found,) = Muon._updates(None, [block], [torch.tensor(update)])
        average = 0.9 * average + 0.1 * (update**2).mean(1)
        expected = update / np.sqrt(average)[:, None]
        for part in of_part:
            expected[part] *= np.linalg.norm(update[part]) / np.linalg.norm(expected[part])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_cautious_decay_spares_weights_that_grow(monkeypatch):
    weights = torch.nn.Parameter(torch.tensor([1.0, 1.0, -1.0, -1.0]))
    build = sgd(monkeypatch, weights, lr=0.1, weight_decay=0.5)
    candidates.apply("cautious_decay")
    optimizer = build()
    weights.grad = torch.tensor([2.0, -2.0, 2.0, -2.0])  # of those the first and the last fall in size
    optimizer.step()
    plain = np.array([1, 1, -1, -1]) - 0.1 * np.array([2, -2, 2, -2])
    decay = 0.1 * 0.5 * np.array([1, 0, 0, -1])
    np.testing.assert_allclose(weights.detach(), plain - decay, rtol=1e-6)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_ema_evaluates_the_average_and_trains_on(monkeypatch):
    weights = torch.nn.Parameter(torch.zeros(2))
    build = sgd(monkeypatch, weights, lr=1.0)
    seen = []
    monkeypatch.setattr(evaluation.Evaluator, "evaluate", lambda self: seen.append(weights.detach().clone()))
    candidates.apply("ema=0.6")
    optimizer = build()
    values = []
    for step in range(6):
        weights.grad = torch.tensor([-1.0, float(step)])
        optimizer.step()
        values.append(weights.detach().clone().numpy())
    evaluation.Evaluator.evaluate(None)
    expected = np.mean(values[:2], axis=0)  # 1 - 1/n is below 0.6 until then
    for value in values[2:]:
        expected = 0.6 * expected + 0.4 * value
    np.testing.assert_allclose(seen[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(weights.detach(), values[-1])


def tiny_model(seed: int = 1):
    return build_model(esm2_config(2, 32, 2), seed)


BATCH = {
    "input_ids": torch.tensor([0, 32, 5, 6, 32, 7, 8, 2]),
    "cu_seqlens": torch.tensor([0, 8], dtype=torch.int32),
    "max_seqlen": 8,
}
LABELS = torch.tensor([-100, 4, -100, -100, 9, -100, -100, -100])


def test_z_loss_is_of_training_alone():
    model = tiny_model()
    logits = model(**BATCH).logits.detach().double()
    plain = model(**BATCH, labels=LABELS).loss_sum.item()
    candidates.apply("z_loss=0.01")
    with_z = model(**BATCH, labels=LABELS).loss_sum.item()
    z = np.log(np.exp(logits.numpy()[[1, 4]]).sum(-1))
    assert with_z - plain == pytest.approx(0.01 * (z**2).sum(), rel=1e-4)
    with torch.no_grad():
        assert model(**BATCH, labels=LABELS).loss_sum.item() == plain


def test_zero_init_makes_layers_the_identity():
    candidates.apply("zero_init")
    model = tiny_model()
    load_model.initialise(model, 1, 0.02)
    embedded = model.embeddings(BATCH["input_ids"], BATCH["cu_seqlens"])
    hidden = model(**BATCH, output_hidden=True).hidden
    expected = F.layer_norm(embedded, (32,), eps=1e-5)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("muonclip", "muonclip: choose of normuon, cautious_decay, ema, z_loss, zero_init"),
        ("ema=x", "ema=x: expected NAME or NAME=NUMBER"),
        ("zero_init=2", "zero_init=2: expected NAME or NAME=NUMBER"),
    ],
)
def test_changes_that_are_wrong(change, message):
    with pytest.raises(UserError, match=message):
        candidates.apply(change)


@pytest.mark.slow
def test_changes_together_train(dataset, tmp_path):
    flags = flags_of(dataset, tmp_path, optim="muon", max_steps=2, do_eval=True, eval_steps=1, max_eval_samples=8)
    changes = ",".join(candidates.CHANGES)
    done = run_script("benchmarks.candidates", changes, "train_ddp.py", *flags, env=environment())
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row] == [1, 2]
