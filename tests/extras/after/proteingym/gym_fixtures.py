"""A small ProteinGym: a reference file and the assays' tables, and proteingym.py run on it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.data_fixtures import call, load_script

GYM = load_script("proteingym.py")
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
NAMES = ["DMS_id", "DMS_filename", "UniProt_ID", "coarse_selection_type", "taxon", "MSA_Neff_L_category", "target_seq"]


class Gym(NamedTuple):
    reference: Path
    data: Path
    proteins: dict[str, str]

    def flags(self, model: Path, out: Path) -> list[str]:
        given = ["--model_name_or_path", model, "--reference", self.reference, "--data", self.data]
        return [str(word) for word in (*given, "--output_dir", out, "--use_cpu")]


def write_rows(path: Path, names: list[str], rows: list[list]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def make_gym(directory: Path, assays: int = 5, length: int = 30, rows: int = 24) -> Gym:
    """Assays S0, S1, ...: two a UniProt id, three function types; and GONE, which has no table."""
    generator = np.random.default_rng(7)
    proteins, about = {}, []
    for number in range(assays):
        name, protein = f"S{number}", "".join(generator.choice(list(RESIDUES), length))
        proteins[name], made = protein, {}
        while len(made) < rows:
            places = sorted(generator.choice(length, generator.integers(1, 3), replace=False).tolist())
            mutant = list(protein)
            for place in places:
                mutant[place] = str(generator.choice([letter for letter in RESIDUES if letter != protein[place]]))
            words = ":".join(f"{protein[place]}{place + 1}{mutant[place]}" for place in places)
            made[words] = ["".join(mutant), round(float(generator.normal()), 3)]
        table = [[words, sequence, value, int(value > 0)] for words, (sequence, value) in made.items()]
        write_rows(directory / f"data/{name}.csv", ["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"], table)
        function = ("Activity", "Stability", "Binding")[number % 3]
        about.append([name, f"{name}.csv", f"P{number // 2}", function, "Human", ("low", "High")[number % 2], protein])
    about.append(["GONE", "GONE.csv", "P9", "Activity", "Virus", "Low", "MKV"])
    return Gym(write_rows(directory / "reference.csv", NAMES, about), directory / "data", proteins)


def run_gym(gym: Gym, model: Path, out: Path, *flags) -> None:
    """In this process: errors come through."""
    call(GYM, *gym.flags(model, out), *flags)
