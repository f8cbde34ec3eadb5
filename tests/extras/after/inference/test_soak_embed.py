"""embed.py on one to three ranks, killed again and again at random moments: the same bytes as of one rank left alone.

The long form: pytest tests/extras/after/inference/test_soak_embed.py -s --soak-rounds 30 [--soak-seed N]
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data_fixtures import everything_in, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model
from tests.soak import Subject, soak

pytestmark = pytest.mark.soak
PARTS = 60
LAUNCHER = ["-m", "extras.launch", "--nproc_per_node"]


def assert_same_files(killed: Path, whole: Path) -> None:
    assert everything_in(killed) == everything_in(whole)
    assert len(list(whole.glob("embeddings/*.parquet"))) == PARTS


def writes_a_part(out: Path) -> bool:
    return any(out.glob(".building/embeddings/*.partial"))


def test_embed_killed_gives_the_same_bytes(tmp_path, rounds, generator):
    model, lengths = make_model(tmp_path / "model"), random.Random(1)
    proteins = [(f"P{n}", "".join(lengths.choices("ACDEFGHIKLMNPQRSTVWY", k=300))) for n in range(20 * PARTS)]
    fasta = write_fasta(tmp_path / "my.fasta", proteins)
    flags = ["--model_name_or_path", model, "--fasta", fasta, "--proteins_per_part", 20, "--output_dir"]

    def command(out: Path) -> list:
        return [*LAUNCHER, generator.choice((1, 2, 3)), "embed.py", *flags, out]

    soak(Subject(command, assert_same_files, writes_a_part), tmp_path, rounds or 1, generator)
