"""benchmarks/embeddings.py on a small model: both pages, and that both ways compute the same numbers."""

from __future__ import annotations

import re

import pytest

from benchmarks import embeddings
from extras.prepare.sample import make_proteins
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model

DIFFERENCE = re.compile(r"largest difference.*: (\S+e-\d\d)")


@pytest.mark.parametrize("flags", [(), ("--scores", "--positions", 2, "--residues", 9)], ids=["embeddings", "scores"])
def test_embeddings_benchmark_compares_the_same_numbers(flags, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", make_proteins(5, 2, 4, (0.1, 0.4), seed=3))
    model, page = make_model(tmp_path / "model"), tmp_path / "page.md"
    call(embeddings, "--fasta", fasta, "--config_name", model, "--batch", 3, "--rounds", 1, "--output", page, *flags)
    text = page.read_text()
    (difference,) = DIFFERENCE.findall(text)
    assert float(difference) < 1e-5
    assert "| transformers, one at a time | " in text
    assert ("All 180 single mutants of a protein of 9 residues" in text) == bool(flags)
