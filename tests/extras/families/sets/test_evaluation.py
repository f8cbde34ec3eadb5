"""Held-out losses behind homologs, against a plain loop over proteins, and runs that train on sets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.cli import UserError
from common.data.clusters import cluster_numbers
from common.data.collators import MaskRates, mask_tokens
from common.data.counter_rng import SET_ORDER, derive_key, hash_counters
from common.data.crops import crop
from common.data.token_store import open_split
from common.data.training_data import EVAL_SEED
from common.distributed.world import World
from common.models.layers.initialise import initialise
from common.training import masked_lm
from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.families.e1.alphabet import ALPHABET
from extras.families.e1.config import e1_config
from extras.families.e1.model import E1ForMaskedLM
from extras.families.sets.evaluation import gains, held_out_sets, losses_by_number, losses_with_homologs
from tests.data_fixtures import load_script
from tests.extras.families.sets.homologs import make_homologs
from tests.training_fixtures import arguments, final_weights, losses, same_bits, train

ALONE = World(0, 0, 1, torch.device("cpu"))
LONGEST, BUDGET = 48, 256  # tokens
SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=64"
RUN = {"model_type": "e1", "config_name": None, "config_overrides": SIZES, "max_seq_length": 64, "max_steps": 4}
RUN |= {"set_tokens": "0:64,0.3:512", "tokens_per_pack": 512, "packs_per_step": 4}


@pytest.fixture(scope="module")
def homologs(tmp_path_factory) -> Path:
    return make_homologs(tmp_path_factory.mktemp("homologs"))


@pytest.fixture(scope="module")
def model():
    model = E1ForMaskedLM(replace(e1_config(4, 32, 4, 48), max_num_sequences=16))
    initialise(model, 1, 0.3)  # far from uniform predictions
    return model


@pytest.fixture(scope="module")
def store(homologs):
    return open_split(homologs, "validation", ALPHABET)


@pytest.fixture(scope="module")
def clusters(homologs, store):
    return cluster_numbers(homologs / "validation", len(store))


@pytest.fixture(scope="module")
def flags(homologs):
    return arguments(homologs, max_seq_length=LONGEST).data


def tokens_of(store, record: int) -> np.ndarray:
    record = np.array([record])
    return store.gather(record, np.zeros(1, np.int64), store.lengths(record))[0]


def by_loop(store, clusters, set_size: int, budget: int) -> tuple[dict[int, list[int]], int]:
    """The predecessors of each protein, by the definition, and how many members were left out as equal to it."""
    key, sets, copies = derive_key(EVAL_SEED, 0, SET_ORDER), {}, 0
    ring = sorted(range(len(store)), key=lambda record: int(hash_counters(key, np.array([record]))[0]))
    for protein in range(len(store)):
        at = ring.index(protein)
        others = [other for other in ring[at + 1 :] + ring[:at] if clusters[other] == clusters[protein]]
        free, before, full = budget - min(LONGEST, len(tokens_of(store, protein))), [], False
        for other in others:
            if np.array_equal(tokens_of(store, other), tokens_of(store, protein)):
                copies += not full
                continue
            free -= min(LONGEST, len(tokens_of(store, other)))
            full = full or free < 0 or len(before) == set_size - 1
            if not full:
                before.insert(0, other)
        sets[protein] = before
    return sets, copies


def loss_by_loop(model, store, protein: int, before: list[int]) -> tuple[float, int]:
    """The loss of the hidden residues of one protein behind others, computed alone; and their number."""
    ids = [tokens_of(store, record) for record in (*before, protein)]
    records = np.array([*before, protein])
    starts, lengths = crop(records, np.array(list(map(len, ids))), EVAL_SEED, 0, LONGEST)
    ids = [each[a : a + n] for each, a, n in zip(ids, starts, lengths, strict=True)]
    last = (records[-1:], starts[-1:], lengths[-1:])
    shown, asked = mask_tokens(ids[-1], *last, ALPHABET, EVAL_SEED, 0, MaskRates(0.15, 0.8, 0.1))
    labels = np.concatenate([np.full(lengths[:-1].sum(), -100), asked])
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int32)
    sets = np.stack([bounds, np.minimum(np.arange(len(bounds)), 1) * len(ids)]).astype(np.int32)
    with torch.no_grad():
        losses = model.eval()(
            torch.from_numpy(np.concatenate([*ids[:-1], shown]).astype(np.int64)),
            labels=torch.from_numpy(labels),
            cu_seqlens=torch.from_numpy(bounds),
            max_seqlen=int(lengths.max()),
            sets=torch.from_numpy(sets),
        ).token_losses
    hidden = np.concatenate([np.zeros(lengths[:-1].sum(), bool), (asked >= 0) & (shown == ALPHABET.mask)])
    return float(losses[torch.from_numpy(hidden)].double().sum()), int(hidden.sum())


@pytest.mark.parametrize(("set_size", "budget"), [(16, BUDGET), (3, BUDGET), (16, 100), (1, BUDGET)])
def test_predecessors_are_those_of_a_plain_loop(store, clusters, set_size, budget):
    sets = held_out_sets(store, clusters, set_size, budget, LONGEST, ALPHABET)
    expected, copies = by_loop(store, clusters, set_size, budget)
    found = np.split(sets.records, sets.bounds[1:-1])
    assert dict(zip(sets.proteins.tolist(), (each[:-1].tolist() for each in found), strict=True)) == expected
    assert [each[-1] for each in found] == sets.proteins.tolist()
    assert sets.copies == copies
    assert set_size < 16 or budget < BUDGET or copies > 0
    assert set_size == 1 or (sets.numbers > 1).sum() > 5


class Texts:
    """A store of these proteins."""

    def __init__(self, texts: list[str]):
        self.ids = [ALPHABET.encode(text) for text in texts]

    def __len__(self) -> int:
        return len(self.ids)

    def lengths(self, records: np.ndarray) -> np.ndarray:
        return np.array([len(self.ids[n]) for n in records])

    def gather(self, records, starts, lengths) -> tuple[np.ndarray, np.ndarray]:
        crops = [self.ids[n][a : a + size] for n, a, size in zip(records, starts, lengths, strict=True)]
        return np.concatenate(crops), np.append(0, np.cumsum(lengths))


def test_members_that_show_the_protein_do_not_precede_it():
    """Copies with X, fragments, longer ones, and one that differs only outside of the crop that is asked."""
    protein = "MKVLAGWERTYHDNMKVLCCWERTYHDNAQ"
    copies = [protein, protein[:9] + "X" + protein[10:], protein[4:12], "GG" + protein + "GG"]
    texts = [protein, *copies, "MKVLAGWERTYHDNMKVLCCWERTYHDNAC"]
    for longest, shown in ((64, [5]), (12, [])):
        starts, _ = crop(np.arange(1), np.array([len(protein) + 4]), EVAL_SEED, 0, longest)
        assert longest == 64 or 0 < starts[0] < len(protein) - longest
        sets = held_out_sets(Texts(texts), np.zeros(6, np.int64), 16, 512, longest, ALPHABET)
        of_first = sets.proteins.tolist().index(0)
        assert sets.records[sets.bounds[of_first] : sets.bounds[of_first + 1]].tolist() == [*shown, 0]


def test_losses_behind_homologs_are_those_of_a_plain_loop(model, store, clusters, flags):
    sets = held_out_sets(store, clusters, 16, BUDGET, LONGEST, ALPHABET).with_at_least(1)
    found = losses_with_homologs(model, store, sets, ALPHABET, flags, ALONE)
    assert found.masked.sum() == found.masked[sets.proteins].sum() > 300
    for number, protein in enumerate(sets.proteins.tolist()):
        before = sets.records[sets.bounds[number] : sets.bounds[number + 1] - 1].tolist()
        loss, masked = loss_by_loop(model, store, protein, before)
        assert masked == found.masked[protein]
        assert found.loss_sum[protein] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    alone = masked_lm.evaluate(model, store, ALPHABET, flags, ALONE).losses
    assert np.array_equal(alone.masked[sets.proteins], found.masked[sets.proteins]), "the same residues are hidden"
    assert np.abs(alone.loss_sum - found.loss_sum)[sets.proteins].max() > 0.1


def test_losses_by_number_are_of_the_same_proteins(model, store, clusters, flags):
    found = losses_by_number(model, store, clusters, ALPHABET, flags, ALONE, (0, 1, 3), BUDGET)
    alone = masked_lm.evaluate(model, store, ALPHABET, flags, ALONE).losses
    proteins = np.flatnonzero(found[3].masked)
    assert 5 < len(proteins) < len(store)
    sets, _ = by_loop(store, clusters, 4, BUDGET)
    for number, of_number in found.items():
        assert np.array_equal(of_number.masked, found[3].masked)
        for protein in proteins[:5].tolist():
            loss, _ = loss_by_loop(model, store, protein, sets[protein][3 - number :])
            assert of_number.loss_sum[protein] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert found[0].loss_sum[proteins] == pytest.approx(alone.loss_sum[proteins], rel=1e-4, abs=1e-4)
    with pytest.raises(UserError, match="no held-out protein has 40 others of its cluster in 256 tokens"):
        losses_by_number(model, store, clusters, ALPHABET, flags, ALONE, (0, 40), BUDGET)


def test_gains_are_means_over_residues_with_errors_over_clusters(store, clusters):
    sets, generator = (
        held_out_sets(store, clusters, 16, BUDGET, LONGEST, ALPHABET).with_at_least(1),
        np.random.default_rng(0),
    )
    masked = generator.integers(0, 9, len(store)).astype(np.int32)
    alone, behind = (generator.random(len(store)) * masked for _ in range(2))
    results = gains(sets, ProteinLosses(alone, masked, clusters), ProteinLosses(behind, masked), "eval")
    numbers = dict(zip(sets.proteins.tolist(), sets.numbers.tolist(), strict=True))
    for name, (first, last) in {"1": (1, 1), "2_3": (2, 3), "4_7": (4, 7)}.items():
        chosen = [p for p, number in numbers.items() if first <= number <= last and masked[p]]
        part = f"eval_predecessors_{name}"
        assert results[f"{part}_samples"] == len(chosen) > 0
        assert results[f"{part}_loss_masked"] == pytest.approx(behind[chosen].sum() / masked[chosen].sum())
        expected = mean_and_error((alone - behind)[chosen], masked[chosen], clusters[chosen])
        assert (results[f"{part}_gain_masked"], results[f"{part}_gain_masked_stderr"]) == pytest.approx(expected)
    chosen = [protein for protein in numbers if masked[protein]]
    assert results["eval_homologs_samples"] == len(chosen)
    assert results["eval_loss_masked_without_homologs"] == pytest.approx(alone[chosen].sum() / masked[chosen].sum())
    listed = {key for key, *_ in load_script("docs/make_reference.py").EVALUATION}
    assert {re.sub("predecessors_(1|2_3|4_7|8_up)_", "predecessors_<number>_", name) for name in results} <= listed


# ---- runs ----


def results_of(out: Path) -> dict[str, float]:
    results = json.loads((out / "eval_results.json").read_text())
    return {name: value for name, value in results.items() if "second" not in name and "runtime" not in name}


@pytest.fixture(scope="module")
def whole(homologs, tmp_path_factory):
    out = tmp_path_factory.mktemp("sets") / "run"
    said = train(homologs, out, do_eval=True, **RUN)
    assert re.search(
        r"Sampling sets: 1 to 16 members of each of \d+ clusters of \d+ proteins, at most 0:64,0.3:512", said
    )
    assert said.count("Held-out sets (validation): ") == 1
    assert "Held-out loss behind homologs " in said
    return out


@pytest.mark.parametrize(
    ("script", "flags"), [("train_ddp.py", {}), ("train_ddp_cp.py", {"cp_size": 2}), ("train_fsdp2.py", {})]
)
def test_two_ranks_train_on_the_sets_of_one(homologs, whole, tmp_path, script, flags):
    train(homologs, tmp_path, 2, script=script, do_eval=True, **RUN | flags)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-4)
    expected = results_of(whole)
    assert "eval_predecessors_2_3_gain_masked_stderr" in expected
    assert results_of(tmp_path) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_run_resumes_and_refuses_other_sets(homologs, whole, tmp_path):
    train(homologs, tmp_path, do_eval=True, stop_at_step=2, **RUN)
    for other in ({"set_tokens": "512"}, {"set_size": 8}, {"set_tokens": None}):
        said = train(homologs, tmp_path, expect=2, **RUN | other)
        assert "error: the checkpoint stands in another order of batches: " in said
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss_masked_with_homologs", "save_steps": 2}
    said = train(homologs, tmp_path, do_eval=True, eval_steps=2, **RUN | best)
    assert "eval_loss_masked_with_homologs" in said
    assert losses(tmp_path) == losses(whole)
    assert same_bits(final_weights(tmp_path), final_weights(whole))


REFUSED = [
    (
        {"model_type": "amplify"},
        "--set_tokens 512: AMPLIFY reads no sets of homologs: choose --model_type e1 or esm_s",
    ),
    ({"dataset": "sample"}, "--set_tokens 512: needs --dataset_dir, prepared with clusters by"),
    ({"pad_to_max_length": True, "tokens_per_pack": None}, "needs packs of tokens: drop --pad_to_max_length or --seq"),
    ({"tokens_per_pack": 256}, "--set_tokens 512: packs of 256 tokens do not hold one set: raise --tokens_per_pack"),
    ({"set_tokens": "32"}, "--set_tokens 32 is less than one sequence of --max_seq_length 64: raise the one or lower"),
    ({"set_tokens": "0:512,x"}, "--set_tokens '0:512,x': expected a number, or at most 100 epochs:tokens pairs"),
    ({"sample_clusters": False}, "draws each cluster once an epoch: drop --sample_clusters False"),
    ({"sample_clusters_exponent": 0.5}, "draws each cluster once an epoch: drop sample_clusters_exponent"),
    ({"set_size": 0}, "--set_size 0: must be at least 1"),
    ({"max_train_samples": 5}, "--set_tokens needs all of them (no --max_train_samples)"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED)
def test_refused_in_one_line_before_anything_is_written(homologs, tmp_path, flags, line):
    out = tmp_path / "out"
    said = train(None if "dataset" in flags else homologs, out, expect=2, **RUN | {"set_tokens": "512"} | flags)
    assert line in said.splitlines()[-1]
    assert not out.exists()


def test_data_without_clusters_are_refused(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", expect=2, **RUN)
    assert "clusters: no clusters: tokenise with --cluster_table or --cluster, or train without --set_tokens" in said
