"""Embeddings and scores of the chains of a record, each with the others in view."""

from __future__ import annotations

import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import EsmForMaskedLM

from common.cli import UserError
from common.models.esm2.alphabet import ESM2_TOKENS, MASK
from common.models.esm2.config import esm2_config
from extras.after.inference.chains import letters_of, named_chains, of_chains
from extras.after.inference.encoder import alphabet_of, look_through
from extras.after.inference.mutation_scores import parse_variant
from tests.data_fixtures import call, load_script, write_fasta

HEAVY, LIGHT = "EVQLVESGGGLVQPGGSLRL", "DIQMTQSPSSLSASVGDRVT"
RECORDS = [("fab", f"{HEAVY}:{LIGHT}"), ("lone", HEAVY), ("three", f"{LIGHT}:MKV:{HEAVY}")]
EMBED, SCORE = load_script("embed.py"), load_script("score.py")
BETWEEN = {"separator": [31], "linker": [ESM2_TOKENS.byte_to_id[ord("G")]] * 25}


@pytest.fixture(scope="module", params=["separator", "linker"])
def model(request, tmp_path_factory):
    """A random ESM-2 that records what stands between chains, and that."""
    directory = tmp_path_factory.mktemp(request.param) / "model"
    config = family_config(request.param)
    torch.manual_seed(1)
    EsmForMaskedLM(config).eval().save_pretrained(directory)
    return directory, request.param


def family_config(between: str):
    config = esm2_config(2, 32, 2)
    config.others["chains"] = between
    return config.to_transformers()


def stock_ids(text: str, between: str) -> tuple[list[int], np.ndarray]:
    """Ids as stock transformers would read them, by hand, and where each character of the text is."""
    ids, places = [0], []
    for letter in text:
        places.append(len(ids))
        ids += BETWEEN[between] if letter == ":" else [int(ESM2_TOKENS.byte_to_id[ord(letter)])]
    return [*ids, 2], np.array(places)


def test_names_of_chains():
    assert [letters_of(n) for n in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]
    assert named_chains("x", b"MK:AG") == [("x_A", b"MK"), ("x_B", b"AG")]
    assert named_chains("x", b"MK") == [("x", b"MK")]
    assert [part.tolist() for part in of_chains(b"MK:A", np.arange(4))] == [[0, 1], [3]]


@pytest.mark.parametrize("per_residue", [False, True])
def test_embeddings_of_each_chain_see_the_others(model, tmp_path, per_residue):
    directory, between = model
    fasta = write_fasta(tmp_path / "a.fasta", RECORDS)
    call(
        EMBED,
        "--model_name_or_path",
        directory,
        "--fasta",
        fasta,
        "--output_dir",
        tmp_path,
        *["--per_residue"] * per_residue,
    )
    rows = pq.read_table(tmp_path / "embeddings/part-00000.parquet").to_pylist()
    assert [row["id"] for row in rows] == ["fab_A", "fab_B", "lone", "three_A", "three_B", "three_C"]
    assert look_through(str(fasta), alphabet_of(str(directory))).residues == sum(row["length"] for row in rows)
    assert [row["length"] for row in rows] == [20, 20, 20, 20, 3, 20]
    stock, expected = EsmForMaskedLM.from_pretrained(directory).eval(), []
    for _, text in RECORDS:
        ids, places = stock_ids(text, between)
        with torch.no_grad():
            hidden = stock.esm(torch.tensor([ids])).last_hidden_state[0].numpy()
        expected += of_chains(text.encode(), hidden[places])
    for row, each in zip(rows, expected, strict=True):
        assert np.allclose(row["embedding"], each if per_residue else each.mean(0), atol=2e-5)


def test_scores_of_mutations_in_a_chain(model, tmp_path):
    directory, between = model
    fasta = write_fasta(tmp_path / "a.fasta", RECORDS[:1])
    table = tmp_path / "mutants.csv"
    table.write_text("mutant\nVA2L\nDB1K\nVA2L:DB1K\n")
    given = ("--model_name_or_path", directory, "--fasta", fasta)
    call(SCORE, *given, "--mutations", table, "--output", tmp_path / "scored.csv")
    with open(tmp_path / "scored.csv") as file:
        rows = list(csv.DictReader(file))
    stock = EsmForMaskedLM.from_pretrained(directory).eval()

    def masked(position: int, wild: str, mutant: str) -> float:
        ids, places = stock_ids(RECORDS[0][1], between)
        ids[places[position]] = MASK
        with torch.no_grad():
            row = stock(torch.tensor([ids])).logits[0, places[position]].log_softmax(-1)
        return float(row[ESM2_TOKENS.byte_to_id[ord(mutant)]] - row[ESM2_TOKENS.byte_to_id[ord(wild)]])

    first, second = masked(1, "V", "L"), masked(21, "D", "K")
    assert [float(row["masked_marginal"]) for row in rows] == pytest.approx([first, second, first + second], abs=2e-5)
    call(SCORE, *given, "--all_single_mutants", "--output", tmp_path / "matrices")
    with open(tmp_path / "matrices/fab_B.masked_marginal.csv") as file:
        rows = list(csv.DictReader(file))
    assert "".join(row["wild_type"] for row in rows) == LIGHT
    assert float(rows[0]["K"]) == pytest.approx(second, abs=2e-5)


def test_mutations_without_their_chain_are_refused():
    protein = f"{HEAVY}:{LIGHT}".encode()
    assert parse_variant("DB1K", protein, "row 1").mutations[0].position == 21
    for word in ("D1K", "DC1K", "p.Asp1Lys"):
        with pytest.raises(UserError, match="names no chain of the protein, which has A to B"):
            parse_variant(word, protein, "row 1")
    with pytest.raises(UserError, match="residue 1 of the protein is D, not E"):
        parse_variant("EB1K", protein, "row 1")
    with pytest.raises(UserError, match="residue 1 is mutated twice"):
        parse_variant("DB1K:DB1L", protein, "row 1")


def test_models_of_single_chains_refuse_several(tmp_path):
    EsmForMaskedLM(esm2_config(2, 32, 2).to_transformers()).save_pretrained(tmp_path / "plain")
    fasta = write_fasta(tmp_path / "a.fasta", RECORDS)
    for script in (EMBED, SCORE):
        more = ("--output_dir", tmp_path) if script is EMBED else ("--all_single_mutants", "--output", tmp_path / "m")
        with pytest.raises(UserError, match="has : or / as between chains"):
            call(script, "--model_name_or_path", tmp_path / "plain", "--fasta", fasta, *more)
