"""Contacts within and between the chains of complexes."""

from __future__ import annotations

import csv
import json

import gemmi
import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM

from common.models.esm2.config import esm2_config
from extras.after.downstream.complexes import between, complex_features, joined, likeliest, read_complexes
from extras.after.downstream.contacts import chain_features
from extras.after.downstream.stock_model import read_stock_model
from extras.after.downstream.structures import Chain
from extras.after.inference.encoder import alphabet_of
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures
from tests.data_fixtures import write_fasta
from tests.forked import run_script

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def structures(tmp_path_factory):
    """Eight chains alone, and three complexes of two more each, that lie in one another."""
    directory = tmp_path_factory.mktemp("coils")
    write_structures(directory, coil_structures(COIL_STRUCTURES, 5))
    paths = sorted(directory.iterdir())
    for path, partner in zip(paths[8:11], paths[11:14], strict=True):
        one, other = (gemmi.read_structure(str(each)) for each in (path, partner))
        other[0][0].name = "B"
        one[0].add_chain(other[0][0])
        one.entities.clear()
        (directory / f"pair{path.name}.pdb").write_text(one.make_pdb_string())
    for path in paths[8:]:
        path.unlink()
    return directory


@pytest.fixture(scope="module", params=["separator", "linker"])
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "model"
    config = esm2_config(2, 32, 2)
    config.others["chains"] = request.param
    torch.manual_seed(1)
    EsmForMaskedLM(config.to_transformers()).save_pretrained(directory)
    return directory, request.param


def test_features_are_the_attentions_of_residues(structures, model):
    """Against a plain slice of transformers' maps, with what stands between the chains cut out."""
    directory, way = model
    whole = read_complexes(str(structures))[0]
    first, second = whole.text.split(":")
    stock, size = read_stock_model(str(directory), CPU), 1 if way == "separator" else 25
    ids = alphabet_of(str(directory)).encode(whole.text)
    rows = np.r_[1 : 1 + len(first), 1 + len(first) + size : len(ids) - 1]
    with torch.no_grad():
        layers = stock(torch.from_numpy(ids.astype(np.int64))[None], output_attentions=True).attentions
    maps = torch.cat(layers, 1)[0].double().numpy()[:, rows][:, :, rows]
    maps = maps + maps.transpose(0, 2, 1)
    maps -= maps.sum(1, keepdims=True) * maps.sum(2, keepdims=True) / maps.sum((1, 2), keepdims=True)
    found = complex_features(stock, alphabet_of(str(directory)), whole)
    assert found.shape[:2] == (len(first + second),) * 2
    np.testing.assert_allclose(found, maps.transpose(1, 2, 0), atol=1e-6)
    alone = Chain("alone", first, whole.beta[: len(first)])
    np.testing.assert_array_equal(
        complex_features(stock, alphabet_of(str(directory)), alone), chain_features(stock, alone)
    )


def test_between_is_a_plain_loop():
    rng = np.random.default_rng(0)
    beta = [rng.normal(scale=8, size=(n, 3)).astype(np.float32) for n in (30, 22)]
    beta[1][:4] = np.nan
    whole = joined("x", [Chain("a", "A" * 30, beta[0]), Chain("b", "C" * 22, beta[1])])
    scores = rng.random((52, 52))
    found = [(scores[i, 30 + j], np.linalg.norm(beta[0][i] - beta[1][j]) < 8) for i in range(30) for j in range(4, 22)]
    hits = [hit for _, hit in sorted(found, reverse=True)]
    expected = [np.mean(hits[:18]), np.mean(hits[:9]), np.mean(hits[:3]), np.mean(hits)]
    result = between(whole, scores)
    names = ("between_p_at_l", "between_p_at_l2", "between_p_at_l5", "between_chance")
    assert [result[name] for name in names] == pytest.approx(expected)
    best = likeliest(whole, np.where(np.arange(52)[:, None] == 29, 1.0, 0.5) * (np.arange(52)[None] == 30))[0]
    assert (best["chain_i"], best["i"], best["chain_j"], best["j"]) == ("A", 30, "B", 1)  # neighbours end to end
    assert (best["residue_i"], best["residue_j"]) == ("A", "C")


def test_script_reports_contacts_within_and_between_chains(structures, model, tmp_path):
    directory, _ = model
    out = tmp_path / "contacts"
    given = ("contacts.py", "--model_name_or_path", directory, "--structures", structures, "--maps", 0)
    done = run_script(*given, "--output_dir", out)
    assert done.returncode == 0, done.stderr
    with (out / "complexes.csv").open() as file:
        rows = list(csv.DictReader(file))
    means = json.loads((out / "results.json").read_text())["of_complexes"]
    assert 1 <= means["complexes"] == len(rows) <= 3
    assert {row["chains"] for row in rows} == {"2"}
    for name in ("between_p_at_l", "between_chance", "within_long_p_at_l"):
        assert means[name] == pytest.approx(np.mean([float(row[name]) for row in rows]))
    assert "likeliest pairs between chains" in done.stderr
    fasta = write_fasta(tmp_path / "a.fasta", [("fab", "EVQLVESGGGLVQPGGSLRL:DIQMTQSPSSLSASVGDRVT")])
    done = run_script(*given, "--fasta", fasta, "--output_dir", tmp_path / "fab")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "fab/fab.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert {row["chain_i"] + row["chain_j"] for row in rows} <= {"AA", "AB", "BB"}
