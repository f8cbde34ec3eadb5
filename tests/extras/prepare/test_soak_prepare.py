"""Step 1 with duplicates, and text, tokenised and killed again and again at random moments: the same bytes.

The long form: pytest tests/extras/prepare/test_soak_prepare.py -s --soak-rounds 30 [--soak-seed N]
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.data_fixtures import everything_in, write_csv
from tests.soak import Subject, soak

pytestmark = pytest.mark.soak


def assert_same_files(killed: Path, whole: Path) -> None:
    assert everything_in(killed) == everything_in(whole)


def write_proteins(directory: Path, files: int, of_each: int) -> Path:
    """A fifth of them have a copy somewhere."""
    draw = random.Random(2)
    texts = ["".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=draw.randint(30, 400))) for _ in range(files * of_each)]
    for number in range(0, len(texts), 10):
        texts[draw.randrange(len(texts))] = texts[number]
    for number in range(files):
        chosen = range(number * of_each, (number + 1) * of_each)
        write_csv(directory, [(f"P{n}", texts[n]) for n in chosen], f"x{number:03d}.csv")
    return directory


def write_documents(directory: Path, files: int, of_each: int) -> Path:
    draw = random.Random(3)
    directory.mkdir()
    for number in range(files):
        texts = [" ".join(draw.choices(("tokens", "of", "text", "and", "more"), k=60)) for _ in range(of_each)]
        (directory / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return directory


def test_tokenize_killed_gives_the_same_bytes(tmp_path, rounds, generator):
    csv = write_proteins(tmp_path / "csv", *((12, 5000) if rounds else (6, 2500)))

    def command(out: Path) -> list:
        return ["1.tokenize_uniref_csv.py", "--input_dir", csv, "--output_dir", out]

    def assert_same(killed: Path, whole: Path) -> None:
        assert_same_files(killed, whole)
        results = json.loads((whole / "arrow" / ".complete.json").read_text())["results"]
        assert results["copies_left_out"]["train"] > 50

    soak(Subject(command, assert_same), tmp_path, rounds or 1, generator)


def test_tokenize_text_killed_gives_the_same_bytes(tmp_path, rounds, generator):
    """The long form with two processes, which need a real interpreter."""
    text = write_documents(tmp_path / "text", *((12, 3000) if rounds else (3, 500)))
    processes = 2 if rounds else 1

    def command(out: Path) -> list:
        return ["1.tokenize_text.py", "--dataset", text, "--output_dir", out, "--preprocessing_num_workers", processes]

    soak(Subject(command, assert_same_files, real=processes > 1), tmp_path, rounds or 1, generator)
