"""score.py against stock transformers, one sequence at a time: numbers and mistakes."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, EsmForMaskedLM

from common.esm2.presets import esm2_config
from common.esm2.pretrained import write_tokenizer
from common.prepare.sample import make_proteins
from tests.data_fixtures import environment, write_fasta
from tests.esm2.reference import reference_model
from tests.forked import run_script


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A directory of transformers' own: every weight random and of a size that shows."""
    directory = tmp_path_factory.mktemp("model")
    reference_model(esm2_config(2, 32, 4, initializer_range=0.2), seed=5).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def proteins(tmp_path_factory, real) -> list[tuple[str, str]]:
    return real or [(name, text) for name, text in make_proteins(25, 5, 4, (0.1, 0.4), seed=3)]


@pytest.fixture(scope="module")
def real() -> list[tuple[str, str]]:
    """25 of UniRef90's, where they are beside the checkout: the shortest and the longest among them."""
    from tests.data_fixtures import REAL_SAMPLE

    if not REAL_SAMPLE.exists():
        return []
    records = [part.split("\n") for part in gzip.decompress(REAL_SAMPLE.read_bytes()).decode()[1:].split("\n>")]
    found = sorted(((lines[0].split()[0], "".join(lines[1:])) for lines in records), key=lambda each: len(each[1]))
    return [found[n] for n in np.linspace(0, len(found) * 0.99, 25).astype(int)]


def refused(script: str, *flags) -> str:
    done = run_script(script, *flags, env=environment())
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    return errors[0]


def ran(script: str, *flags) -> str:
    done = run_script(script, *flags, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stderr


@torch.no_grad()
def stock_scores(model: Path, text: str, variant: str) -> tuple[float, float]:
    """(masked marginal, wild-type marginal) by transformers, from the formula."""
    tokenizer, stock = AutoTokenizer.from_pretrained(model), EsmForMaskedLM.from_pretrained(model).eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    mutations = [(word[0], int(word[1:-1]), word[-1]) for word in variant.split(":")] if variant else []
    hidden = ids.clone()
    hidden[0, [position for _, position, _ in mutations]] = tokenizer.mask_token_id
    found = []
    for given in (hidden, ids):
        log_p = stock(given).logits[0].double().log_softmax(-1)
        of = tokenizer.convert_tokens_to_ids
        found.append(float(sum(log_p[at, of(new)] - log_p[at, of(old)] for old, at, new in mutations)))
    return tuple(found)


def test_scores_are_those_of_transformers(model, proteins, tmp_path):
    some = proteins[5:8]
    rows = []
    for name, text in some:
        for at in (1, len(text) // 2, len(text)):
            rows.append({"note": f"at, {at}", "protein": name, "mutant": f"{text[at - 1]}{at}W"})
        rows.append({"note": "", "protein": name, "mutant": f"{text[2]}3A:{text[0]}1G"})
        rows.append({"note": "wild", "protein": name, "mutant": ""})
    with open(tmp_path / "mutants.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    fasta = write_fasta(tmp_path / "my.fasta", some)
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", tmp_path / "mutants.csv")
    ran("score.py", *flags, "--output", tmp_path / "new" / "scored.csv", "--max_seq_length", 100_000)
    with open(tmp_path / "new" / "scored.csv", newline="") as file:
        scored = list(csv.DictReader(file))
    assert [{key: row[key] for key in rows[0]} for row in scored] == rows
    for row in scored:
        expected = stock_scores(model, dict(some)[row["protein"]], row["mutant"])
        found = float(row["masked_marginal"]), float(row["wild_type_marginal"])
        assert found == pytest.approx(expected, abs=1e-5), row
    assert max(abs(float(row["masked_marginal"])) for row in scored) > 0.05
    ran("score.py", *flags, "--output", tmp_path / "cheap.csv", "--wild_type_marginal_only")
    assert "masked_marginal" not in (tmp_path / "cheap.csv").read_text()


def test_mistakes_are_said_in_one_line(model, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG"), ("two", "MKV"), ("long", "MKVLAGTYRRMKV")])
    base = ["--model_name_or_path", model, "--fasta", fasta]
    for mutants, more, told in (
        ("protein,mutant\none,A5G\none,K3R\n", [], "row 3: K3R: residue 3 of the protein is V, not K"),
        ("protein,mutant\none,A15G\n", [], "row 2: A15G: the protein has residues 1 to 6"),
        ("protein,mutant\none,nonsense\n", [], "row 2: 'nonsense' is no mutation: expected, say, A24G"),
        ("protein,mutant\none,A5Z\n", [], "row 2: A5Z: Z is none of the 20 amino acids"),
        ("protein,mutant\none,A5G:A5V\n", [], "row 2: A5G:A5V: a residue is mutated twice"),
        ("protein,mutant\nthree,A5G\n", [], "row 2: 'three' is not in"),
        ("mutant\nA5G\n", [], "has 3 proteins and"),
        ("protein,change\none,A5G\n", [], "no column 'mutant': there are protein, change"),
        ("protein,mutant\none,M11G\n", ["--first_residue", "12"], "the protein has residues 12 to 17"),
        ("protein,mutant\n", [], "there is no row in it"),
        ("protein,mutant\none,A5G,1\n", [], "row 2 has not as many fields as the header"),
        ("protein,mutant\none,A5G\none\n", [], "row 3 has not as many fields as the header"),
        ("protein,mutant\nlong,M1A:V13A\n", ["--max_seq_length", "8"], "1 and 13 are further apart than 6 residues"),
    ):
        (tmp_path / "m.csv").write_text(mutants)
        said = refused("score.py", *base, "--mutations", tmp_path / "m.csv", "--output", tmp_path / "o.csv", *more)
        assert told in said
        assert not (tmp_path / "o.csv").exists()
