"""The held-out bound: of models whose likelihood is known, by a plain loop, and of any batch size."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.data.crops import Pack
from common.data.training_data import PreparedData
from common.distributed.world import World
from common.hooks import extra
from common.models.esm2.alphabet import ESM2_TOKENS, MASK
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.training.protein_losses import mean_and_error
from extras.families.diffusion.bound import (
    STRATA,
    ProteinBounds,
    StratumCollator,
    given_masks,
    protein_bounds,
    summary,
)
from tests.training_fixtures import NUM_VALIDATION, arguments

ALONE = World(0, 0, 1, torch.device("cpu"))


class KnownModel(nn.Module):
    """Predicts the same distribution everywhere. log_p: float64 [33]."""

    def __init__(self, log_p: np.ndarray):
        super().__init__()
        self.log_p = torch.from_numpy(log_p)

    def forward(self, labels: torch.Tensor, **inputs: object) -> SimpleNamespace:
        losses = torch.where(labels >= 0, -self.log_p[labels.clamp(min=0)], 0.0)
        return SimpleNamespace(loss_sum=losses.sum(), correct=losses.sum(), token_losses=losses)


def frequencies(dataset) -> np.ndarray:
    """log of the residues' frequencies in the validation split, float64 [33]."""
    store = PreparedData(arguments(dataset).data, ESM2_TOKENS).held_out("validation")
    every = np.arange(len(store))
    ids, _ = store.gather(every, np.zeros_like(every), store.lengths(every))
    counts = np.bincount(ids, minlength=33)[4:29].astype(np.float64)
    log_p = np.full(33, -50.0)
    log_p[4:29] = np.log(np.maximum(counts, 1e-9) / counts.sum())
    return log_p


def bounds_of(model: nn.Module, dataset, log_frequencies: np.ndarray | None = None, **flags) -> ProteinBounds:
    data = arguments(dataset, **flags).data
    store = PreparedData(data, ESM2_TOKENS).held_out("validation")
    log_frequencies = frequencies(dataset) if log_frequencies is None else log_frequencies
    found = protein_bounds(model, store, ESM2_TOKENS, data, ALONE, log_frequencies)
    assert found is not None
    return found


def test_bound_of_a_guess_is_exact_and_of_frequencies_their_entropy(dataset):
    uniform = bounds_of(KnownModel(np.full(33, -math.log(20))), dataset, max_seq_length=1024)
    assert len(uniform.bound) == NUM_VALIDATION
    np.testing.assert_allclose(uniform.bound / uniform.residues, math.log(20), rtol=1e-9)
    log_p = frequencies(dataset)
    entropy = -(np.exp(log_p) * log_p).sum()
    known = bounds_of(KnownModel(log_p), dataset, max_seq_length=1024)
    assert known.unigram.sum() / known.residues.sum() == pytest.approx(entropy, rel=1e-9)
    mean, error = mean_and_error(known.bound, known.residues)
    assert error < 0.02
    assert mean == pytest.approx(entropy, abs=4 * error)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Far from uniform predictions."""
    model = build_model(esm2_config(2, 32, 2, token_dropout=False), seed=5).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model.eval()


def test_bound_equals_a_plain_loop(dataset, model):
    """Protein by protein and stratum by stratum, with the masks of the collator alone."""
    flags = arguments(dataset).data
    store = PreparedData(flags, ESM2_TOKENS).held_out("validation")
    found = bounds_of(model, dataset, max_seq_length=1024)
    for protein in range(5):
        one = np.array([protein])
        length = store.lengths(one)
        ids, _ = store.gather(one, np.zeros_like(one), length)
        total, guess, times = 0.0, math.log(20), []
        for stratum in range(STRATA):
            collator = StratumCollator(ESM2_TOKENS, stratum)
            pack = Pack(one, np.zeros_like(one), length, epoch=0)
            [t] = collator.times(pack)
            times.append(t)
            batch = collator(pack, ids)
            labels = batch["labels"]
            assert set(batch["input_ids"][labels >= 0].tolist()) <= {MASK}
            logits = model(batch["input_ids"][None]).logits[0]
            losses = F.cross_entropy(logits.double(), labels, reduction="none", ignore_index=-100)
            total += float((losses - guess)[labels >= 0].sum()) / t / STRATA
        assert np.diff(times) == pytest.approx(1 / STRATA)
        assert found.residues[protein] == length[0] - 2
        assert found.bound[protein] == pytest.approx(total + guess * (length[0] - 2), rel=1e-5)


def test_bound_depends_on_no_batch_size_and_no_workers(dataset, model):
    expected = bounds_of(model, dataset)
    for flags in ({"per_device_eval_batch_size": 3}, {"pad_to_max_length": True}, {"dataloader_num_workers": 1}):
        found = bounds_of(model, dataset, **flags)
        np.testing.assert_allclose(found.bound, expected.bound, rtol=1e-5)
        assert found.residues.tolist() == expected.residues.tolist()


def test_saprot_is_compared_with_frequencies_given_the_structure():
    """Two structures, two residues: P(A | d) = 0.3 / 0.4, P(A | v) = 0.1 / 0.6."""
    tokens = extra().alphabet("saprot", "")
    names = {"Ad": 0.3, "Cd": 0.1, "Av": 0.1, "Cv": 0.5}
    log_p = np.full(tokens.vocab_size, -50.0)
    log_p[[tokens.letters.index(name) for name in names]] = np.log(list(names.values()))
    found = given_masks(log_p, tokens)[[tokens.letters.index(name) for name in names]]
    np.testing.assert_allclose(np.exp(found), [0.75, 0.25, 1 / 6, 5 / 6])
    said = summary({"eval_nelbo": 2.0, "eval_unigram_nelbo": 2.5}, 10, "eval", tokens)
    assert said.endswith("2.5000); given what masks show; no other alphabet's compares")
