"""The contact head: scikit-learn's regression on transformers' attentions, in a run and in contacts.py."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from transformers import AutoTokenizer, EsmForMaskedLM

from common.cli import UserError
from extras.after.downstream.contacts import (
    RANGES,
    SEPARATION,
    TOP,
    attention_features,
    chain_features,
    fit,
    mean_precisions,
    pairs,
    precisions,
    split,
    standard_errors,
    summary,
)
from extras.after.downstream.stock_model import read_stock_model
from extras.after.downstream.structures import Chain, read_structures
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures
from tests.forked import run_script
from tests.training_fixtures import TINY_OVERRIDES, rows, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def structures(tmp_path_factory):
    directory = tmp_path_factory.mktemp("coils")
    write_structures(directory, coil_structures(COIL_STRUCTURES, 5))
    for path in sorted(directory.iterdir())[8:]:
        path.unlink()
    return directory


def stock_features(model, chain: Chain) -> torch.Tensor:
    """[L, L, C] in float64, by transformers' outputs and the formula of Rao et al."""
    ids = torch.from_numpy(chain.ids.astype(np.int64))[None]
    with torch.no_grad():
        layers = model(ids, attention_mask=torch.ones_like(ids), output_attentions=True).attentions
    maps = torch.cat(layers, 1)[0, :, 1:-1, 1:-1].double()
    maps = maps + maps.mT
    corrected = maps - maps.sum(1, keepdim=True) * maps.sum(2, keepdim=True) / maps.sum((1, 2), keepdim=True)
    return corrected.permute(1, 2, 0)


def test_fit_equals_scikit_learn_on_transformers_attentions(structures, untrained):
    chains = read_structures(str(structures))[:3]
    head = fit(partial(chain_features, read_stock_model(str(untrained), CPU)), chains)
    stock = EsmForMaskedLM.from_pretrained(untrained, attn_implementation="eager")
    x, y = [], []
    for chain in chains:
        i, j, contact = pairs(chain)
        x.append(stock_features(stock, chain)[i, j].float().numpy())
        y.append(contact)
    x, y = np.concatenate(x), np.concatenate(y)
    theirs = LogisticRegression(l1_ratio=1.0, C=head.strength, solver="liblinear", random_state=0).fit(x, y)
    np.testing.assert_allclose(head.weight, theirs.coef_[0], atol=1e-4 * abs(theirs.coef_).max())
    found = head.probabilities(attention_features(read_stock_model(str(untrained), CPU), chains[0].ids))
    expected = theirs.predict_proba(stock_features(stock, chains[0]).reshape(-1, x.shape[1]).numpy())[:, 1]
    np.testing.assert_allclose(found.ravel(), expected, atol=1e-6)


def test_fit_is_an_l1_regression_without_a_warning():
    """By its optimality: C times the loss' gradient is 1 where there is a weight, and at most 1 where there is none.
    scikit-learn has renamed the penalty (1.8) and removes its old name (1.10); an older one would fit by L2."""
    generator = np.random.default_rng(0)
    places = generator.normal(scale=12, size=(80, 3)).astype(np.float32)
    chain = Chain("a", "A" * 80, places)
    contacts, _ = chain.contacts()
    features = generator.normal(size=(80, 80, 20)).astype(np.float32)
    features[..., 0] += 2 * contacts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = fit(lambda _: features, [chain])
    i, j, contact = pairs(chain)
    gradient = features[i, j].T @ (head.probabilities(features)[i, j] - contact) * head.strength
    assert 0 < np.count_nonzero(head.weight) < 20
    np.testing.assert_allclose(abs(gradient[head.weight != 0]), 1, atol=0.01)
    assert (abs(gradient[head.weight == 0]) <= 1.01).all()


@pytest.mark.parametrize("resolved", [range(60), [*range(7), *range(8, 60)], [*range(12, 25), *range(48, 59)]])
def test_precisions_of_a_chain_with_gaps_equal_a_plain_loop(resolved):
    """From the coordinates: L is the number of residues that have them, and their numbers are those of the chain."""
    generator = np.random.default_rng(0)
    places = generator.normal(scale=8, size=(60, 3)).astype(np.float32)
    chain = Chain("a", "A" * 60, np.full((60, 3), np.nan, np.float32))
    chain.beta[resolved] = places[resolved]
    scores = generator.random((60, 60))
    scores = scores + scores.T
    found = precisions(chain, scores)
    for name, (nearest, beyond) in RANGES.items():
        inside = [(i, j) for i, j in itertools.combinations(resolved, 2) if nearest <= j - i < beyond]
        touch = {(i, j): math.dist(places[i], places[j]) < 8 for i, j in inside}
        assert found[f"{name}_chance"] == pytest.approx(np.mean(list(touch.values())))
        ranked = sorted(inside, key=lambda pair: -scores[pair])
        for key, part in TOP.items():
            taken = ranked[: len(resolved) // part]
            assert found[f"{name}_{key}"] == pytest.approx(np.mean([touch[pair] for pair in taken]))
    assert min(pairs(chain)[1] - pairs(chain)[0]) == SEPARATION


def test_standard_errors_are_those_of_a_bootstrap_over_chains():
    """A bootstrap's variance is (n - 1) / n of the unbiased one; 4 sigma of 20,000 samples' root: 2 %."""
    generator = np.random.default_rng(0)
    each = [{"long_p_at_l": p, "long_chance": 0.1} for p in generator.random(12)] + [{"short_chance": 0.1}]
    found = standard_errors(each)
    values = np.array([one["long_p_at_l"] for one in each if "long_p_at_l" in one])
    drawn = values[generator.integers(12, size=(20_000, 12))].mean(1)
    assert found["long_p_at_l_stderr"] == pytest.approx(drawn.std() * np.sqrt(12 / 11), rel=0.02)
    assert found["long_chance_stderr"] == pytest.approx(0, abs=1e-12)
    assert "short_chance_stderr" not in found  # of one chain
    assert standard_errors(each[:1]) == {}


def test_mean_precisions_leave_out_ranges_without_contacts():
    hairpin = {"short_chance": 0.0, "short_p_at_l": 0.0, "long_chance": 0.25, "long_p_at_l": 0.5}
    extended = {"short_chance": 0.0, "short_p_at_l": 0.0, "long_chance": 0.0, "long_p_at_l": 0.0}
    assert mean_precisions([hairpin, extended]) == {"long_chance": 0.125, "long_p_at_l": 0.25}
    assert mean_precisions([extended]) == {}
    assert summary([extended]) == "no contact to evaluate"


def test_split_depends_on_sequences_alone_and_needs_three():
    chains = [Chain(str(n), letter * 30, np.zeros((30, 3), np.float32)) for n, letter in enumerate("ACDEFG")]
    fitted, evaluated = split(chains)
    assert [len(fitted), len(evaluated)] == [3, 3]
    assert [c.sequence for c in split(chains[::-1])[0]] == [c.sequence for c in fitted]
    with pytest.raises(UserError, match="2 protein chains: a contact head needs 3 or more"):
        split(chains[:2])


def test_untrained_model_predicts_contacts_no_better_than_their_distance_along_the_chain(structures, untrained):
    fitted, evaluated = split(read_structures(str(structures)))
    model = read_stock_model(str(untrained), CPU)
    head = fit(partial(chain_features, model), fitted)
    found = [precisions(chain, head.probabilities(attention_features(model, chain.ids))) for chain in evaluated]
    means = mean_precisions(found)
    assert means["long_p_at_l"] < 2 * means["long_nearest_p_at_l"]


def test_run_exports_the_head_it_fitted_and_trains_as_without(dataset, structures, tmp_path):
    flags = {"max_steps": 4, "do_eval": True, "eval_steps": 2, "config_overrides": TINY_OVERRIDES}
    with_contacts = {"eval_contacts": structures, "eval_downstream_steps": 2}
    train(dataset, tmp_path / "plain", 2, **flags)
    for name, script in (("ddp", "train_ddp.py"), ("fsdp", "train_fsdp2.py")):
        train(dataset, tmp_path / name, 2, script=script, **flags | with_contacts)
    plain, out = rows(tmp_path / "plain"), rows(tmp_path / "ddp")
    assert [row["loss"] for row in out if "loss" in row] == [row["loss"] for row in plain if "loss" in row]
    asked = [row["step"] for row in out if "eval_contacts_long_p_at_l" in row]
    assert asked == [2, 4]
    results = json.loads((tmp_path / "ddp" / "all_results.json").read_text())
    assert 0 <= results["eval_contacts_long_p_at_l5"] <= 1

    directory = tmp_path / "ddp" / "final_model"
    assert "fitted to these weights on 4 protein chains" in (directory / "README.md").read_text()
    stock = EsmForMaskedLM.from_pretrained(directory)  # as its card says
    chain = read_structures(str(structures))[0]
    tokens = AutoTokenizer.from_pretrained(directory)(chain.sequence, return_tensors="pt")
    with torch.no_grad():
        theirs = stock.predict_contacts(tokens["input_ids"], tokens["attention_mask"])[0].numpy()
    model = read_stock_model(str(directory), CPU)
    head = fit(partial(chain_features, model), split(read_structures(str(structures)))[0])
    np.testing.assert_allclose(theirs, head.probabilities(attention_features(model, chain.ids)), atol=1e-5)
    fitted_on, _ = split(read_structures(str(structures)))
    identities = {hashlib.sha256(chain.sequence.encode()).hexdigest()[:16] for chain in fitted_on}
    stock.save_pretrained(tmp_path / "copied")  # the record stays with the head
    for place in (directory, tmp_path / "copied"):
        assert set(json.loads((place / "config.json").read_text())["contact_head_fitted_on"]) == identities
    # A checkpoint has the weights of its step, but no head.
    for place, head in (("ddp", "the model's own"), ("ddp/checkpoint-4", "fitted on 4 chains")):
        out = tmp_path / f"contacts of {Path(place).name}"
        flags = (
            "--model_name_or_path",
            tmp_path / place,
            "--structures",
            structures,
            "--output_dir",
            out,
            "--maps",
            0,
        )
        done = run_script("contacts.py", *flags)
        assert done.returncode == 0, done.stderr
        found = json.loads((out / "results.json").read_text())
        assert found["head"].startswith(head)
        assert ("4 of 8 chains left out: the model's head was fitted on them" in done.stderr) == (place == "ddp")
        assert found["chains"] == 4
        assert found["long_p_at_l"] == pytest.approx(results["eval_contacts_long_p_at_l"], abs=1e-6)
    (tmp_path / "seen").mkdir()
    for chain in fitted_on:
        name = f"{chain.name.removesuffix('_A')}.pdb"
        shutil.copy(structures / name, tmp_path / "seen" / f"renamed {name}")
    flags = ("--model_name_or_path", directory, "--structures", tmp_path / "seen", "--output_dir", tmp_path / "none")
    refused = run_script("contacts.py", *flags)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert "the model's head was fitted on all 4 chains: give others, or --fit" in refused.stderr
    assert not (tmp_path / "none").exists()
    ours, sharded = (rows(tmp_path / name)[-1] for name in ("ddp", "fsdp"))
    assert ours["eval_contacts_long_chance"] == sharded["eval_contacts_long_chance"]
    assert ours["eval_contacts_long_p_at_l"] == pytest.approx(sharded["eval_contacts_long_p_at_l"], abs=0.05)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"eval_contacts": "nowhere"}, "missing: --do_eval"),
        ({"eval_contacts": "nowhere", "do_eval": True}, "nowhere: no such directory"),
        ({"eval_downstream_steps": 2}, "missing: --eval_contacts"),
    ],
)
def test_run_refuses_what_cannot_be_evaluated(dataset, tmp_path, flags, said):
    assert said in train(dataset, tmp_path / "out", max_steps=1, expect=2, **flags)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_contacts_script_writes_tables_and_maps(structures, untrained, tmp_path):
    out, asked = tmp_path / "contacts", ["contacts.py", "--model_name_or_path", untrained]
    done = run_script(*asked, "--structures", structures, "--output_dir", out, "--maps", 1)
    assert done.returncode == 0, done.stderr
    with (out / "contacts.csv").open() as file:
        table = list(csv.DictReader(file))
    results = json.loads((out / "results.json").read_text())
    assert results["chains"] == len(table) == 4
    assert results["long_p_at_l"] == pytest.approx(np.mean([float(row["long_p_at_l"]) for row in table]))
    spread = np.std([float(row["long_p_at_l"]) for row in table], ddof=1)
    assert results["long_p_at_l_stderr"] == pytest.approx(spread / 2)
    assert "mean ± s.e. over 4 chains" in done.stderr
    assert len(list(out.glob("*.png"))) == 1
    again = run_script(*asked, "--structures", structures, "--output_dir", out, "--maps", 1)
    assert (again.returncode, "was made by the same command: nothing to do" in again.stderr) == (0, True)
    again = run_script(*asked, "--structures", structures, "--output_dir", out)
    assert again.returncode == 2
    assert "was made from other input or arguments: --overwrite it, or choose another" in again.stderr
    copied = shutil.copytree(structures, tmp_path / "pdb")
    again = run_script(*asked, "--structures", copied, "--output_dir", copied, "--overwrite")
    assert again.returncode == 2
    assert f"--structures {copied} is in there: choose another" in again.stderr
    assert len(list(copied.iterdir())) == 8

    (tmp_path / "a.fasta").write_text(">../a b\nMKTAYIAKQRQISFVKSHFSRQ\n")
    refused = run_script(*asked, "--fasta", tmp_path / "a.fasta", "--output_dir", tmp_path / "other")
    assert refused.returncode == 2
    assert "no fitted contact head" in refused.stderr
    assert not (tmp_path / "other").exists()
    both = ("--structures", structures, "--fasta", tmp_path / "a.fasta", "--output_dir", tmp_path / "other")
    done = run_script(*asked, *both)
    assert done.returncode == 0, done.stderr
    (png,) = (tmp_path / "other").glob("*.png")
    assert f"Written: {png}, " in done.stderr
    with png.with_suffix(".csv").open() as file:
        first = next(csv.DictReader(file))
    model = read_stock_model(str(untrained), CPU)
    head = fit(partial(chain_features, model), split(read_structures(str(structures)))[0])
    chain = Chain("a", "MKTAYIAKQRQISFVKSHFSRQ", np.full((22, 3), np.nan, np.float32))
    expected = head.probabilities(attention_features(model, chain.ids))[int(first["i"]) - 1, int(first["j"]) - 1]
    assert float(first["probability"]) == pytest.approx(expected, abs=1e-5)
