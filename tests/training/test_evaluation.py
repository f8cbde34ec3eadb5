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

from common.cli import UserError
from common.data.collators import MaskingCollator
from common.data.token_store import open_split
from common.data.training_data import EVAL_SEED, PreparedData, held_out_batches, open_data
from common.distributed.world import World
from common.models.esm2.alphabet import ESM2_TOKENS, TOKENS
from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import build_model
from common.models.layers.config_base import override
from common.training import masked_lm
from common.training.masked_lm import MaskedLM
from common.training.verdict import verdict, verdicts
from extras.compare.losses_file import read_losses
from extras.prepare.sources.streamed_data import find_source
from tests.data_fixtures import write_fasta
from tests.training_fixtures import NUM_TEST, NUM_VALIDATION, TINY_MODEL, TINY_OVERRIDES, arguments, rows, train

ALONE = World(0, 0, 1, torch.device("cpu"))
SHARED = (
    *("eval_loss", "eval_accuracy", "perplexity", "eval_selected_tokens", "eval_samples"),
    *(f"eval_loss_{shown}" for shown in masked_lm.SHOWN),
    *("eval_accuracy_masked", "eval_perplexity_masked"),
)


@pytest.fixture(scope="module")
def model():
    """Far from uniform predictions: fresh weights, ten times as large."""
    model = build_model(override(load_config(TINY_MODEL["config_name"]), TINY_OVERRIDES), seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def numbers(model, dataset, split="validation", prefix="eval", **flags) -> dict:
    args = arguments(dataset, **flags)
    found = masked_lm.evaluate(
        model, PreparedData(args.data, ESM2_TOKENS).held_out(split), ESM2_TOKENS, args.data, ALONE, prefix
    ).results
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


def stock(model) -> EsmForMaskedLM:
    reference = EsmForMaskedLM(model.config.to_transformers()).eval()
    reference.load_state_dict(dict(ADAPTER.to_hf(model.state_dict().__getitem__, model.config)), strict=False)
    return reference


def by_loop(reference: EsmForMaskedLM, dataset, **flags) -> dict[str, np.ndarray]:
    """A protein at a time, in float64: {"loss", "correct", "number": [proteins, shown]}, the second axis as
    masked_lm.SHOWN."""
    rows = {"loss": [], "correct": [], "number": []}
    for ids, labels in questions(dataset, **flags):
        with torch.no_grad():
            logits = reference(ids[None]).logits[0].double()
        chosen = labels != -100
        losses = F.cross_entropy(logits[chosen], labels[chosen], reduction="none")
        kinds = ids[chosen] == 32, ids[chosen] == labels[chosen], (ids[chosen] != 32) & (ids[chosen] != labels[chosen])
        right = logits[chosen].argmax(-1) == labels[chosen]
        rows["loss"].append([losses[kind].sum().item() for kind in kinds])
        rows["correct"].append([right[kind].sum().item() for kind in kinds])
        rows["number"].append([kind.sum().item() for kind in kinds])
    return {name: np.array(values) for name, values in rows.items()}


def test_evaluation_equals_transformers_on_the_same_masks(model, dataset):
    """The loss of all selected residues, and of those that are hidden, kept and replaced."""
    expected, found = by_loop(stock(model), dataset), numbers(model, dataset)
    loss, correct, number = (expected[name].sum(0) for name in ("loss", "correct", "number"))
    selected = number.sum()
    assert found["eval_selected_tokens"] == selected > 400
    assert found["eval_accuracy"] == correct.sum() / selected
    # fp32 rounding in another order, then a sum in fp64: measured 2e-8
    assert found["eval_loss"] == pytest.approx(loss.sum() / selected, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss.sum() / selected), rel=1e-5)
    assert abs(found["eval_loss"] - math.log(33)) > 0.3, "a model whose predictions say something"
    assert [found[f"eval_{name}_tokens"] for name in masked_lm.SHOWN] == number.tolist()
    assert min(number) > 20
    for name, its_loss, its_number in zip(masked_lm.SHOWN, loss, number, strict=True):
        assert found[f"eval_loss_{name}"] == pytest.approx(its_loss / its_number, rel=1e-5)
    assert found["eval_accuracy_masked"] == correct[0] / number[0]
    assert found["eval_perplexity_masked"] == pytest.approx(math.exp(loss[0] / number[0]), rel=1e-5)
    # 80 % hidden, 10 % kept and a twentieth of the 10 % replaced; three standard deviations
    for share, its_number in zip((0.8, 0.105, 0.095), number, strict=True):
        assert abs(its_number / selected - share) < 3 * math.sqrt(share * (1 - share) / selected)


@pytest.mark.parametrize(
    "flags", [{}, {"per_device_eval_batch_size": 1}, {"sequence_packing": False, "dataloader_num_workers": 2}], ids=str
)
def test_losses_of_proteins_equal_transformers(model, dataset, flags):
    expected = by_loop(stock(model), dataset)
    args = arguments(dataset, **flags)
    store = PreparedData(args.data, ESM2_TOKENS).held_out("validation")
    losses = masked_lm.evaluate(model, store, ESM2_TOKENS, args.data, ALONE).losses
    assert losses.masked.tolist() == expected["number"][:, 0].tolist()
    assert losses.loss_sum == pytest.approx(expected["loss"][:, 0], rel=1e-5)


def test_all_selected_residues_can_be_hidden(model, dataset):
    usual, hidden = numbers(model, dataset), numbers(model, dataset, eval_mask_replace_prob=1)
    assert hidden["eval_selected_tokens"] == usual["eval_selected_tokens"] == hidden["eval_masked_tokens"]
    assert hidden["eval_kept_tokens"] == hidden["eval_random_tokens"] == 0
    assert hidden["eval_loss"] == pytest.approx(hidden["eval_loss_masked"], rel=1e-6)
    assert not {"eval_loss_kept", "eval_loss_random"} & hidden.keys(), "no residue, no loss"


def test_no_residue_is_no_loss(model, dataset, tmp_path, caplog):
    """Of one protein of two residues none is selected."""
    write_fasta(tmp_path / "short.fasta", [("P1", "MA")])
    args = arguments(dataset, eval_dataset=[str(tmp_path / "short.fasta")])
    store = open_data(args.data, ESM2_TOKENS, ALONE, evaluate=True).held_out("validation")
    results, losses = masked_lm.evaluate(model, store, ESM2_TOKENS, args.data, ALONE)
    assert results["eval_selected_tokens"] == results["eval_masked_tokens"] == 0
    assert results["eval_samples"] == 1
    assert not [name for name in results if "loss" in name or "accuracy" in name or "perplexity" in name]
    assert "none of 1 sequences has a token to predict: no loss" in caplog.text
    assert losses.masked.tolist() == [0]
    assert MaskedLM.summary(results) == "No hidden residue in 1 held-out proteins: no loss"
    assert verdict(results) == ""
    said = train(dataset, tmp_path / "out", max_steps=1, do_eval=True, eval_dataset=tmp_path / "short.fasta")
    assert "eval_loss" not in json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert "no loss" in said


@pytest.mark.parametrize(
    ("below", "error", "said"),
    [
        (0.3, 0.01, "better than their frequencies do, by 0.3000 ± 0.0100 nats (± over proteins)"),
        (0.01, 0.01, "no better than their frequencies do, by 0.0100 ± 0.0100 nats (± over proteins): train longer"),
        (-0.01, 0.01, "no better than their frequencies do, by 0.0100 ± 0.0100 nats (± over proteins): train longer"),
        (-0.1, 0.01, "worse than their frequencies do, by 0.1000 ± 0.0100 nats (± over proteins): train longer"),
        (
            0.3,
            None,
            "no better than their frequencies do, by 0.3000 nats (of a single protein or cluster: without",
        ),
    ],
)
def test_verdict_weighs_the_difference_by_its_standard_error(below, error, said):
    results = {"eval_below_unigram_masked": below, "eval_below_unigram_masked_stderr": error}
    assert f"Verdict: the model predicts hidden residues {said}" in verdict(results)
    assert verdict({"eval_loss": 2.0}) == ""


def test_verdict_names_both_baselines_and_the_set():
    results = {f"eval_own_below_{name}_masked": value for name, value in (("unigram", 0.2), ("neighbours", -0.03))}
    results |= {f"{name}_stderr": 0.01 for name in results} | {"eval_own_clusters": 31, "eval_own_samples": 40}
    assert verdicts(results) == [
        "Verdict on own: the model predicts hidden residues better than their frequencies do, by 0.2000 ± 0.0100 "
        "nats, and worse than their neighbours do, by 0.0300 ± 0.0100 nats (± over 31 clusters): has learnt "
        "composition, not context: train longer, look for a rate with --find_learning_rate, or look at the data"
    ]


def test_evaluation_asks_at_a_rate_of_its_own(model, dataset):
    """The same questions whatever a run trains with, and the model's own token dropout (12 %)."""
    training = {"mlm_probability": 0.4, "mlm_probability_end": 0.2, "mask_replace_prob": 0.5, "random_replace_prob": 0}
    usual = numbers(model, dataset)
    assert numbers(model, dataset, **training) == usual
    more = numbers(model, dataset, eval_mlm_probability=0.3)
    assert more["eval_selected_tokens"] == pytest.approx(2 * usual["eval_selected_tokens"], rel=0.15)
    assert more.keys() == usual.keys()


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
    share = counted["eval_selected_tokens"] / residues
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
        assert found == pytest.approx(expected, rel=1e-5), flags
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6), flags


def test_evaluation_workers_change_no_bit_and_are_joined(model, dataset, recwarn):
    others = set(multiprocessing.active_children())
    in_small = {"per_device_eval_batch_size": 1, "dataloader_num_workers": 2}
    assert numbers(model, dataset, **in_small) == numbers(model, dataset, **in_small | {"dataloader_num_workers": 0})
    assert set(multiprocessing.active_children()) == others
    args, stopped = arguments(dataset, **in_small), World(0, 0, 1, torch.device("cpu"))
    stopped.stop.requested = True
    store = PreparedData(args.data, ESM2_TOKENS).held_out("validation")
    assert masked_lm.evaluate(model, store, ESM2_TOKENS, args.data, stopped).results == {}
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
    keys = [k for k in results[1] if "runtime" not in k and "per_second" not in k]
    assert len(keys) > 40
    kept = {nproc: read_losses(tmp_path / f"{nproc}" / "eval_losses.parquet")[0] for nproc in results}
    for nproc in (2, 3):
        # One sequence at a time on every rank: the same arithmetic, summed in fp64.
        assert [results[nproc][k] for k in keys] == pytest.approx([results[1][k] for k in keys], rel=1e-12)
        assert kept[nproc].loss_sum == pytest.approx(kept[1].loss_sum, rel=1e-12)
        assert kept[nproc].masked.tolist() == kept[1].masked.tolist()
        assert kept[nproc].questions == kept[1].questions


def test_evaluation_of_test_split_has_its_own_keys(model, dataset):
    found = numbers(model, dataset, "test", "test")
    assert found["test_samples"] == NUM_TEST
    assert found["test_loss"] != numbers(model, dataset)["eval_loss"]
    assert found["test_perplexity"] == math.exp(found["test_loss"])


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
    assert some["eval_selected_tokens"] == sum((labels != -100).sum().item() for _, labels in first)


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
    flags |= {"eval_dataset": [f"own={tmp_path / 'held_out.fasta'}", f"prepared={dataset}"]}
    train(dataset, tmp_path / "named", **flags)
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("with", "beside", "named")]
    for name in ("own", "prepared"):  # the same proteins once more, beside the validation split
        named = {key.replace(f"eval_{name}_", "eval_"): key for key in results[2] if key.startswith(f"eval_{name}_")}
        assert {*SHARED, "eval_unigram_loss"} - {"perplexity"} <= named.keys()
        for key in named.keys() & {*SHARED, "eval_unigram_loss"}:
            assert results[2][named[key]] == results[0][key] == results[2][key]
        assert read_losses(tmp_path / "named" / f"eval_{name}_losses.parquet")[0].questions
    exact = (*SHARED, "eval_unigram_loss", "test_loss")
    assert {key: results[0][key] for key in exact} == {key: results[1][key] for key in exact}
    assert results[0]["eval_samples"] == len(store)
    flags |= {"eval_dataset": tmp_path / "absent.fasta"}
    said = train(arrow, tmp_path / "none", expect=2, **flags)
    assert "--eval_dataset" in said
    assert not (tmp_path / "none").exists()


def test_tokenised_set_without_a_validation_split_is_refused(dataset, tmp_path):
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match=r"--eval_dataset .*: holds tokenised data already: .*or a split of it as"):
        find_source(arguments(dataset, eval_dataset=[str(tmp_path)]).data)


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
