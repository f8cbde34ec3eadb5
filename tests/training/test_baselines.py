"""The baselines of masked language modelling: what is shown, what is best to predict from it, on which residues."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from transformers import EsmForMaskedLM

from common.data import TokenSet
from common.data.collators import ESM2_MASK_RATES, MaskingCollator, MaskRates, mask_tokens
from common.data.training_data import EVAL_SEED, PreparedData, held_out_masks
from common.distributed.world import World
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training.baselines import Baselines, given_shown
from common.training.protein_losses import mean_and_error
from extras.compare.losses_file import read_losses
from tests.training.test_evaluation import by_loop, questions
from tests.training_fixtures import NUM_VALIDATION, arguments, train

ALONE = World(0, 0, 1, torch.device("cpu"))
TOKENS = TokenSet(8, pad=1, mask=7, unknown=0, residues=(2, 6), replacements=(2, 3, 4))  # 5 and 6: never put in
FREQUENCIES = np.array([1e-300, 1e-300, 0.5, 0.2, 0.15, 0.1, 0.05, 1e-300])
RATES = [ESM2_MASK_RATES, MaskRates(0.15, 0.5, 0.5), MaskRates(0.3, 0.2, 0.0), MaskRates(0.15, 1.0, 0.0)]


@pytest.mark.parametrize("rates", RATES, ids=lambda rates: f"{rates.mask_replace_prob}-{rates.random_replace_prob}")
def test_unigram_is_the_optimum_given_what_is_shown(rates):
    """Against a search: the table of logits with the least expected loss over the joint distribution, which is counted
    from the definition of masking. A descent in float64, from zero."""
    residues = range(2, 7)
    joint = np.zeros((8, 8))  # shown, true
    kept = 1 - rates.mask_replace_prob - rates.random_replace_prob
    for true in residues:
        joint[7, true] += FREQUENCIES[true] * rates.mask_replace_prob
        joint[true, true] += FREQUENCIES[true] * kept
        for shown in TOKENS.replacements:
            joint[shown, true] += FREQUENCIES[true] * rates.random_replace_prob / 3
    assert joint.sum() == pytest.approx(1)
    asked = torch.tensor(joint[:, 2:7])
    logits = torch.zeros(8, 5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = -(asked * logits.log_softmax(1)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    best = loss().item()
    with np.errstate(invalid="ignore"):
        ours = -np.nansum(np.where(joint > 0, joint * given_shown(FREQUENCIES, TOKENS, rates), 0))
    assert ours == pytest.approx(best, abs=1e-6)
    blind = -(FREQUENCIES[2:7] * np.log(FREQUENCIES[2:7])).sum()
    assert (ours < blind - 0.01) == (kept > 0), "to see residues helps, where some stay"
    probabilities = np.exp(given_shown(FREQUENCIES, TOKENS, rates))
    assert probabilities.sum(1) == pytest.approx(np.ones(8))


def test_unigram_reaches_its_expected_loss_on_masked_text():
    """On a million residues drawn from the frequencies and masked by the project's own masks."""
    rng = np.random.default_rng(0)
    ids = rng.choice(8, 1_000_000, p=FREQUENCIES / FREQUENCIES.sum()).astype(np.uint8)
    one = np.array([0]), np.array([0]), np.array([len(ids)])
    shown, labels = mask_tokens(ids, *one, TOKENS, seed=0, epoch=0)
    asked = labels >= 0
    table = given_shown(FREQUENCIES, TOKENS, ESM2_MASK_RATES)
    losses = -table[shown[asked], labels[asked]]
    counts = np.zeros((8, 8))
    np.add.at(counts, (shown[asked], labels[asked]), 1)
    joint = counts / counts.sum(1, keepdims=True).clip(1)
    empirical = -(counts * np.log(np.where(counts > 0, joint, 1))).sum() / counts.sum()  # fitted to the text itself
    assert 0 <= losses.mean() - empirical < 5e-4


def test_unigram_equals_hand_computation(dataset):
    counts = np.bincount(np.concatenate(load_from_disk(str(dataset / "train"))["input_ids"]), minlength=33)
    f = np.zeros(33)
    f[4:31] = (counts[4:31] + 1) / (counts[4:31] + 1).sum()  # L to '-': every token that can be masked
    losses, hidden, right = [], [], []
    for ids, labels in questions(dataset):
        for shown, true in zip(ids.tolist(), labels.tolist(), strict=True):
            if true < 0:
                continue
            p = f.copy()
            if shown != 32:  # seen: 10 % of all residues stay, a 200th becomes each amino acid
                p = f * (0.1 * (np.arange(33) == shown) + 0.1 / 20 * (4 <= shown < 24))
                p /= p.sum()
            losses.append(-math.log(p[true]))
            hidden.append(shown == 32)
            right.append(p.argmax() == true)
    losses, hidden, right = np.array(losses), np.array(hidden), np.array(right)
    data = arguments(dataset).data
    opened = PreparedData(data, ESM2_TOKENS)
    baselines = Baselines(opened.sample(), ESM2_TOKENS)
    found = baselines.losses(opened.held_out("validation"), data, held_out_masks(data, ESM2_TOKENS), ALONE)
    for of, which in (("", slice(None)), ("_masked", hidden)):
        assert found.results[f"eval_unigram_loss{of}"] == pytest.approx(losses[which].mean(), rel=1e-12)
        assert found.results[f"eval_unigram_perplexity{of}"] == pytest.approx(np.exp(losses[which].mean()), rel=1e-12)
        assert found.results[f"eval_unigram_accuracy{of}"] == pytest.approx(right[which].mean(), rel=1e-12)
    assert 2.7 < found.results["eval_unigram_loss_masked"] < 3.0  # facts.md: 2.87 nats on UniRef
    assert found.results["eval_unigram_loss"] < found.results["eval_unigram_loss_masked"] - 0.1
    assert found.proteins["unigram"].sum() == pytest.approx(losses[hidden].sum(), rel=1e-12)
    other = arguments(dataset, seed=9, sequence_packing=False, mlm_probability=0.4).data
    again = baselines.losses(opened.held_out("validation"), other, held_out_masks(other, ESM2_TOKENS), ALONE)
    assert again.results == pytest.approx(found.results, rel=1e-12)
    assert again.questions == found.questions
    more = arguments(dataset, eval_mlm_probability=0.4).data
    changed = baselines.losses(opened.held_out("validation"), more, held_out_masks(more, ESM2_TOKENS), ALONE)
    assert changed.questions != found.questions


def test_questions_are_of_what_is_asked(dataset):
    """Another protein, mask or label gives another hash."""
    data = arguments(dataset).data
    store = PreparedData(data, ESM2_TOKENS).held_out("validation")
    baselines = Baselines(store, ESM2_TOKENS)

    def asked(seed=EVAL_SEED, **flags):
        flags = arguments(dataset, **flags).data
        held_out = PreparedData(flags, ESM2_TOKENS).held_out("validation")
        return baselines.losses(held_out, flags, MaskingCollator(ESM2_TOKENS, seed), ALONE).questions

    hashes = [asked(), asked(seed=1), asked(max_eval_samples=19), asked(max_seq_length=100)]
    assert len(set(hashes)) == 4
    assert len(hashes[0]) == 64


def test_run_reports_differences_that_are_paired_by_protein(dataset, tmp_path):
    """Means and standard errors of a run against a loop over its proteins with transformers' model, in float64."""
    train(dataset, tmp_path, max_steps=4, do_eval=True)
    results = json.loads((tmp_path / "eval_results.json").read_text())
    expected = by_loop(EsmForMaskedLM.from_pretrained(tmp_path / "final_model").eval(), dataset)
    loss, number = expected["loss"][:, 0], expected["number"][:, 0]
    data = arguments(dataset).data
    opened = PreparedData(data, ESM2_TOKENS)
    asked = opened.held_out("validation"), data, held_out_masks(data, ESM2_TOKENS), ALONE
    unigram = Baselines(opened.sample(), ESM2_TOKENS).losses(*asked)
    below = unigram.proteins["unigram"] - loss
    mean = below.sum() / number.sum()
    some = number > 0
    error = math.sqrt(some.sum() / (some.sum() - 1) * ((below - mean * number) ** 2).sum()) / number.sum()
    assert results["eval_below_unigram_masked"] == pytest.approx(mean, rel=1e-4)
    assert results["eval_below_unigram_masked_stderr"] == pytest.approx(error, rel=1e-4)
    difference = results["eval_unigram_loss_masked"] - results["eval_loss_masked"]
    assert results["eval_below_unigram_masked"] == pytest.approx(difference, rel=1e-5)
    kept, step = read_losses(tmp_path / "eval_losses.parquet")
    assert (kept.questions, step) == (unigram.questions, 4)
    assert kept.loss_sum == pytest.approx(loss, rel=1e-5)
    assert kept.masked.tolist() == number.tolist()


def test_errors_are_over_clusters_where_the_data_have_them(dataset, tmp_path):
    """The index that step 1 writes with --cluster: four proteins each."""
    arrow = tmp_path / "arrow"
    shutil.copytree(dataset, arrow)
    (arrow / "validation" / "clusters").mkdir()
    for name, values in (("offsets", range(0, NUM_VALIDATION + 1, 4)), ("members", range(NUM_VALIDATION))):
        np.save(arrow / "validation" / "clusters" / f"{name}.npy", np.array(values, np.uint32))
    train(arrow, tmp_path / "out", max_steps=2, do_eval=True)
    train(dataset, tmp_path / "alone", max_steps=2, do_eval=True)
    results, alone = (json.loads((tmp_path / out / "eval_results.json").read_text()) for out in ("out", "alone"))
    losses, _ = read_losses(tmp_path / "out" / "eval_losses.parquet")
    assert losses.clusters.tolist() == [number // 4 for number in range(NUM_VALIDATION)]
    assert results["eval_clusters"] == NUM_VALIDATION // 4
    assert "eval_clusters" not in alone
    data = arguments(dataset).data
    opened = PreparedData(data, ESM2_TOKENS)
    asked = opened.held_out("validation"), data, held_out_masks(data, ESM2_TOKENS), ALONE
    theirs = Baselines(opened.sample(), ESM2_TOKENS).losses(*asked).proteins
    for name in ("unigram", "neighbours"):
        mean, error = mean_and_error(theirs[name] - losses.loss_sum, losses.masked, losses.clusters)
        assert results[f"eval_below_{name}_masked"] == pytest.approx(mean, rel=1e-9)
        assert results[f"eval_below_{name}_masked_stderr"] == pytest.approx(error, rel=1e-9)
        assert error != pytest.approx(alone[f"eval_below_{name}_masked_stderr"], rel=1e-3)
