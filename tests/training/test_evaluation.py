"""Held-out numbers: equal to an independent computation, the same however they are computed, and deterministic."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import load_from_disk
from transformers import EsmForMaskedLM

from common.data.collators import MaskingCollator
from common.data.token_store import open_split
from common.data.training_data import EVAL_SEED, PreparedData, held_out_batches
from common.distributed.world import World
from common.models.esm2.alphabet import ESM2_TOKENS, TOKENS
from common.models.esm2.config import load_config, override
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import build_model
from common.training import masked_lm
from common.training.run_logger import verdict
from tests.data_fixtures import write_fasta
from tests.training_fixtures import NUM_TEST, NUM_VALIDATION, TINY_MODEL, TINY_OVERRIDES, arguments, rows, train

ALONE = World(0, 0, 1, torch.device("cpu"))
SHARED = ("eval_loss", "eval_accuracy", "perplexity", "eval_masked_tokens", "eval_samples")


@pytest.fixture(scope="module")
def model():
    """Far from uniform predictions: fresh weights, ten times as large."""
    model = build_model(override(load_config(TINY_MODEL["config_name"]), TINY_OVERRIDES), seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def log_frequencies(data: PreparedData) -> np.ndarray:
    return np.log(masked_lm.residue_frequencies(data.sample(), ESM2_TOKENS))


def numbers(model, dataset, split="validation", prefix="eval", **flags) -> dict:
    args = arguments(dataset, **flags)
    found = masked_lm.evaluate(
        model, PreparedData(args.data, ESM2_TOKENS).held_out(split), ESM2_TOKENS, args.data, ALONE, prefix
    )
    return {k: v for k, v in found.items() if "runtime" not in k and "per_second" not in k}


def questions(dataset, **flags) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) of every protein of the validation split."""
    args = arguments(dataset, sequence_packing=False, **flags)
    found = []
    for batch in held_out_batches(
        args.data,
        PreparedData(args.data, ESM2_TOKENS).held_out("validation"),
        MaskingCollator(ESM2_TOKENS, EVAL_SEED),
        ALONE,
    ):
        lengths = batch["cu_seqlens"].diff().tolist()
        found += zip(batch["input_ids"].split(lengths), batch["labels"].split(lengths), strict=True)
    return found


def test_evaluation_equals_transformers_on_the_same_masks(model, dataset):
    reference = EsmForMaskedLM(model.config.to_transformers()).eval()
    reference.load_state_dict(dict(ADAPTER.to_hf(model.state_dict().__getitem__, model.config)), strict=False)
    loss, correct, masked = 0.0, 0, 0
    for ids, labels in questions(dataset):
        with torch.no_grad():
            logits = reference(ids[None]).logits[0]
        chosen = labels != -100
        loss += F.cross_entropy(logits[chosen].double(), labels[chosen], reduction="sum").item()
        correct += (logits[chosen].argmax(-1) == labels[chosen]).sum().item()
        masked += chosen.sum().item()
    found = numbers(model, dataset)
    assert found["eval_masked_tokens"] == masked > 400
    assert found["eval_accuracy"] == correct / masked
    # fp32 rounding in another order, then a sum in fp64: measured 2e-8
    assert found["eval_loss"] == pytest.approx(loss / masked, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss / masked), rel=1e-5)
    assert abs(found["eval_loss"] - math.log(33)) > 0.3, "a model whose predictions say something"


@pytest.mark.parametrize("flags", [{}, {"tokens_per_pack": 256}, {"sequence_packing": False}], ids=str)
def test_difference_to_unigram_is_paired_by_protein(model, dataset, flags):
    """Mean and standard error against a loop over proteins with transformers' model, in float64."""
    reference = EsmForMaskedLM(model.config.to_transformers()).eval()
    reference.load_state_dict(dict(ADAPTER.to_hf(model.state_dict().__getitem__, model.config)), strict=False)
    args = arguments(dataset, **flags)
    data = PreparedData(args.data, ESM2_TOKENS)
    log_p = torch.from_numpy(log_frequencies(data))
    below, counts = [], []
    for ids, labels in questions(dataset):
        chosen = labels != -100
        if not chosen.any():
            continue
        with torch.no_grad():
            logits = reference(ids[None]).logits[0][chosen].double()
        losses = F.cross_entropy(logits, labels[chosen], reduction="none")
        below.append((-log_p[labels[chosen]] - losses).sum().item())
        counts.append(chosen.sum().item())
    below, counts = np.array(below), np.array(counts)
    mean = below.sum() / counts.sum()
    error = math.sqrt(((below - mean * counts) ** 2).sum()) / counts.sum()
    found = masked_lm.evaluate(
        model, data.held_out("validation"), ESM2_TOKENS, args.data, ALONE, baseline=masked_lm.below_unigram(log_p)
    )
    assert found["eval_below_unigram"] == pytest.approx(mean, rel=1e-5)
    assert found["eval_below_unigram_stderr"] == pytest.approx(error, rel=1e-5)
    unigram = masked_lm.unigram(log_p.numpy(), data.held_out("validation"), ESM2_TOKENS, args.data, ALONE)
    assert found["eval_below_unigram"] == pytest.approx(unigram["eval_unigram_loss"] - found["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (2.5, 0.01, "better than their frequencies do, by 0.3000 ± 0.0100 nats"),
        (2.79, 0.01, "is no better than residue frequencies, but for 0.0100 ± 0.0100 nats: train longer"),
        (2.9, 0.01, "is worse than residue frequencies, by 0.1000 ± 0.0100 nats"),
        (2.5, None, "by 0.3000 nats"),
    ],
)
def test_verdict_weighs_the_difference_by_its_standard_error(loss, error, said):
    results = {"eval_loss": loss, "eval_unigram_loss": 2.8, "eval_below_unigram_stderr": error}
    assert said in verdict(results)
    assert verdict({"eval_loss": 2.0}) == ""


def test_evaluation_asks_at_a_rate_of_its_own(model, dataset):
    """The same questions whatever a run trains with, and the model's own token dropout (12 %)."""
    training = {"mlm_probability": 0.4, "mlm_probability_end": 0.2, "mask_replace_prob": 0.5, "random_replace_prob": 0}
    usual = numbers(model, dataset)
    assert numbers(model, dataset, **training) == usual
    more = numbers(model, dataset, eval_mlm_probability=0.3)
    assert more["eval_masked_tokens"] == pytest.approx(2 * usual["eval_masked_tokens"], rel=0.15)
    assert more.keys() == usual.keys()


def test_unigram_asks_what_evaluation_asks(dataset):
    def unigram(**flags):
        data = arguments(dataset, **flags).data
        opened = PreparedData(data, ESM2_TOKENS)
        return masked_lm.unigram(log_frequencies(opened), opened.held_out("validation"), ESM2_TOKENS, data, ALONE)

    assert unigram(mlm_probability=0.4) == unigram() != unigram(eval_mlm_probability=0.4)


def test_evaluation_covers_every_protein_once(model, dataset):
    stored = load_from_disk(str(dataset / "validation"))["input_ids"]
    cropped = [ids for ids in stored if len(ids) > 128]
    assert cropped
    asked = [torch.where(labels == -100, ids, labels).tolist() for ids, labels in questions(dataset)]
    assert len(asked) == len(stored) == NUM_VALIDATION
    for whole, window in zip(stored, asked, strict=True):
        text, part = bytes(whole), bytes(window)
        assert part in text
        assert len(part) == min(len(text), 128)
    counted = numbers(model, dataset)
    assert counted["eval_samples"] == NUM_VALIDATION
    # 15 % of the residues, three standard deviations
    residues = sum(len(ids) - 2 for ids in asked)
    share = counted["eval_masked_tokens"] / residues
    assert abs(share - 0.15) < 3 * math.sqrt(0.15 * 0.85 / residues)


def test_evaluation_is_independent_of_packing(model, dataset):
    expected = numbers(model, dataset)
    for flags in (
        {"per_device_eval_batch_size": 1},
        {"per_device_eval_batch_size": 40},
        {"tokens_per_pack": 2000},
        {"sequence_packing": False},
        {"sequence_packing": False, "per_device_eval_batch_size": 3},
        {"pad_to_max_length": True},
    ):
        found = numbers(model, dataset, **flags)
        # The same fp32 terms in another order: measured 3e-8.
        assert found.pop("eval_loss") == pytest.approx(expected["eval_loss"], rel=1e-6), flags
        assert found.pop("perplexity") == pytest.approx(expected["perplexity"], rel=1e-5), flags
        assert found == {k: v for k, v in expected.items() if k in found}, flags


def test_evaluation_workers_change_no_bit_and_are_joined(model, dataset, recwarn):
    others = set(multiprocessing.active_children())
    in_small = {"per_device_eval_batch_size": 1, "dataloader_num_workers": 2}
    assert numbers(model, dataset, **in_small) == numbers(model, dataset, **in_small | {"dataloader_num_workers": 0})
    assert set(multiprocessing.active_children()) == others
    args, stopped = arguments(dataset, **in_small), World(0, 0, 1, torch.device("cpu"))
    stopped.stop.requested = True
    assert (
        masked_lm.evaluate(
            model, PreparedData(args.data, ESM2_TOKENS).held_out("validation"), ESM2_TOKENS, args.data, stopped
        )
        == {}
    )
    assert set(multiprocessing.active_children()) == others
    told = [str(warning.message) for warning in recwarn if warning.category is UserWarning]
    assert not [text for text in told if not text.startswith("This DataLoader will create")]  # where there is one core


def test_evaluation_masks_do_not_depend_on_seed_or_history(model, dataset):
    expected = numbers(model, dataset)
    model.train()
    assert numbers(model, dataset, seed=1) == numbers(model, dataset, seed=2) == expected
    assert model.training, "and the model is left in the mode it was in"
    model.eval()
    assert numbers(model, dataset) == expected
    assert not model.training


def test_evaluation_ranks_share_the_split_and_agree(dataset, tmp_path):
    """40 and 20 proteins over three ranks: some have a batch more."""
    flags = {"do_train": False, "do_eval": True, "per_device_eval_batch_size": 1, "sequence_packing": False}
    results = {}
    for nproc in (1, 2, 3):
        train(dataset, tmp_path / f"{nproc}", nproc, **flags)
        results[nproc] = json.loads((tmp_path / f"{nproc}" / "all_results.json").read_text())
    keys = [k for k in results[1] if k.endswith(("loss", "accuracy", "perplexity", "masked_tokens", "samples"))]
    assert len(keys) == 16
    for nproc in (2, 3):
        # One sequence at a time on every rank: the same arithmetic, summed in fp64.
        assert [results[nproc][k] for k in keys] == pytest.approx([results[1][k] for k in keys], rel=1e-12)


def test_evaluation_of_test_split_has_its_own_keys(model, dataset):
    found = numbers(model, dataset, "test", "test")
    assert found["test_samples"] == NUM_TEST
    assert found["test_loss"] != numbers(model, dataset)["eval_loss"]
    assert found["test_perplexity"] == math.exp(found["test_loss"])


def test_unigram_equals_hand_computation(dataset):
    counts = np.bincount(np.concatenate(load_from_disk(str(dataset / "train"))["input_ids"]), minlength=33)
    counts = counts[4:31] + 1  # L to '-': every token that can be masked; one more than seen
    log_p = np.log(counts / counts.sum())
    labels = torch.cat([labels[labels != -100] for _, labels in questions(dataset)]).numpy() - 4
    assert labels.min() >= 0
    args = arguments(dataset)
    data = PreparedData(args.data, ESM2_TOKENS)
    found = masked_lm.unigram(log_frequencies(data), data.held_out("validation"), ESM2_TOKENS, args.data, ALONE)
    assert found["eval_unigram_loss"] == pytest.approx(-log_p[labels].mean(), rel=1e-12)
    assert found["eval_unigram_perplexity"] == pytest.approx(np.exp(-log_p[labels].mean()), rel=1e-12)
    assert found["eval_unigram_accuracy"] == (labels == counts.argmax()).mean()
    assert 2.7 < found["eval_unigram_loss"] < 3.0  # facts.md: 2.87 nats on UniRef
    other = arguments(dataset, seed=9, sequence_packing=False)
    again = masked_lm.unigram(log_frequencies(data), data.held_out("validation"), ESM2_TOKENS, other.data, ALONE)
    assert again == pytest.approx(found, rel=1e-12)


def test_evaluation_of_uniform_model_is_log_33(dataset):
    model = build_model(override(load_config(TINY_MODEL["config_name"]), TINY_OVERRIDES), seed=5)
    torch.nn.init.zeros_(model.embeddings.word_embeddings.weight)  # tied: all logits are the bias, zero
    found = numbers(model, dataset)
    assert found["eval_loss"] == pytest.approx(math.log(33), rel=1e-6)
    assert found["perplexity"] == pytest.approx(33, rel=1e-5)


def test_max_eval_samples_takes_the_first_proteins(model, dataset):
    some = numbers(model, dataset, max_eval_samples=7)
    assert some["eval_samples"] == 7
    first = questions(dataset)[:7]
    assert some["eval_masked_tokens"] == sum((labels != -100).sum().item() for _, labels in first)


def test_evaluations_during_training_are_rows(dataset, tmp_path):
    train(dataset, tmp_path, max_steps=6, do_eval=True, eval_on_start=True, eval_steps=3, logging_steps=4)
    history = rows(tmp_path)
    assert [row["step"] for row in history] == [0, 1, 3, 4, 6]
    assert [row["step"] for row in history if "eval_loss" in row] == [0, 3, 6]
    results = json.loads((tmp_path / "eval_results.json").read_text())
    assert {k: history[-1][k] for k in SHARED} == {k: results[k] for k in SHARED}
    assert history[0]["eval_loss"] > history[-1]["eval_loss"]


def test_evaluation_does_not_change_training(dataset, tmp_path):
    train(dataset, tmp_path / "without", max_steps=4)
    train(dataset, tmp_path / "with", max_steps=4, do_eval=True, eval_steps=1)
    exact = ("loss", "grad_norm", "tokens")
    kept = [[[row[k] for k in exact] for row in rows(tmp_path / name)] for name in ("without", "with")]
    assert kept[0] == kept[1]


def test_eval_dataset_replaces_the_validation_split(dataset, tmp_path):
    """The same proteins in a FASTA file give the same results; the test split stays that of the directory."""
    store = open_split(dataset, "validation", ESM2_TOKENS)
    ids, offsets = store.gather(np.arange(len(store)), np.zeros(len(store), int), store.lengths(np.arange(len(store))))
    proteins = ["".join(TOKENS[token] for token in part[1:-1]) for part in np.split(ids, offsets[1:-1])]
    write_fasta(tmp_path / "held_out.fasta", [(f"P{number}", text) for number, text in enumerate(proteins)])
    arrow = tmp_path / "arrow"
    for split in ("train", "test"):
        shutil.copytree(dataset / split, arrow / split)
    flags = {"do_eval": True, "max_steps": 2}
    train(dataset, tmp_path / "with", **flags)
    train(arrow, tmp_path / "beside", eval_dataset=tmp_path / "held_out.fasta", **flags)
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("with", "beside")]
    exact = (*SHARED, "eval_unigram_loss", "test_loss")
    assert {key: results[0][key] for key in exact} == {key: results[1][key] for key in exact}
    assert results[0]["eval_samples"] == len(store)
    said = train(arrow, tmp_path / "none", expect=2, eval_dataset=tmp_path / "absent.fasta", **flags)
    assert "--eval_dataset" in said
    assert not (tmp_path / "none").exists()


def test_missing_validation_split_is_an_error_before_training(dataset, tmp_path):
    arrow = tmp_path / "arrow"
    shutil.copytree(dataset / "train", arrow / "train")
    said = train(arrow, tmp_path / "out", nproc=2, expect=2, do_eval=True)
    assert said == f"error: {arrow}: no validation split to evaluate on: give --eval_dataset, or drop --do_eval\n"
    assert not (tmp_path / "out").exists()
    shutil.copytree(dataset / "validation", arrow / "validation")
    train(arrow, tmp_path / "out", do_eval=True, max_steps=1)  # without a test split: nothing is said about it
    assert (tmp_path / "out" / "eval_results.json").exists()
    assert not (tmp_path / "out" / "test_results.json").exists()
