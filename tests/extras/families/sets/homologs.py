"""Prepared data with families of homologs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.data_fixtures import TOKENIZE, call

LETTERS = np.array(list("ACDEFGHIKLMNPQRSTVWY"))


def families(count: int, seed: int = 0) -> dict[str, list[str]]:
    """{family: members}: 1 to 12 relatives of 20 to 59 residues, and in each tenth family the first one twice."""
    generator, made = np.random.default_rng(seed), {}
    for family in range(count):
        ancestor = generator.integers(20, size=generator.integers(20, 60))
        drawn = generator.integers(20, size=(generator.integers(1, 13), len(ancestor)))
        members = np.where(generator.random(drawn.shape) < 0.2, drawn, ancestor)
        made[f"C{family}"] = ["".join(LETTERS[member]) for member in members]
        made[f"C{family}"] += made[f"C{family}"][:1] * (family % 10 == 0)
    return made


def make_homologs(directory: Path, count: int = 120) -> Path:
    """processed/arrow, with an index of clusters, about 100 validation and 50 test proteins."""
    (directory / "csv").mkdir(parents=True)
    names = {f"{family}_{n}": (family, text) for family, of in families(count).items() for n, text in enumerate(of)}
    (directory / "csv/x.csv").write_text("id,text\n" + "".join(f"{n},{text}\n" for n, (_, text) in names.items()))
    table = "".join(f"{family},{name}\n" for name, (family, _) in names.items())
    (directory / "table.csv").write_text("ur50_id,ur90_id\n" + table)
    where = ("--input_dir", directory / "csv", "--output_dir", directory / "processed")
    sizes = ("--validation_size", 100, "--test_size", 50)
    call(TOKENIZE, *where, *sizes, "--cluster_table", directory / "table.csv", "--preprocessing_num_workers", 1)
    return directory / "processed/arrow"
