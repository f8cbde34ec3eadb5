"""What the tests of probe.py share: the script, called, and labels of proteins."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.data_fixtures import call, load_script

PROBE = load_script("probe.py")
COUNT = 90  # proteins of the fixture
ROWS = [(f"P{n}", n / 7) for n in range(60)]
NAMES = ["id", "label"]


def probe(embeddings: Path, fasta: Path, labels: Path, out: Path, *flags) -> tuple[dict, list[dict[str, str]]]:
    call(PROBE, *("--embeddings", embeddings, "--fasta", fasta, "--labels", labels, "--output_dir", out), *flags)
    with (out / "predictions.csv").open() as file:
        return json.loads((out / "results.json").read_text()), list(csv.DictReader(file))
