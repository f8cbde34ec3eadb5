"""Held-out proteins with a relative in training: what is found is what the generated families say."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from extras.prepare import relatives as module
from extras.prepare import tokenize_proteins
from extras.prepare.relatives import COPIES, SEARCH, main, relatives
from tests.data_fixtures import TOKENIZE, call, load
from tests.extras.prepare.test_mmseqs import like_nucleotides, related, write

NO_MMSEQS = shutil.which("mmseqs") is None
needs_mmseqs = pytest.mark.skipif(NO_MMSEQS, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
SIZES = ("--validation_size", 30, "--test_size", 20)


def two_sides() -> tuple[list[str], list[str], np.ndarray]:
    """Held-out and training sequences, and which of the first have their family among the second."""
    rows = related()
    held_out, training = rows[:60], [row for row in rows[60:] if row[2] % 2]
    families = {family for _, _, family in training}
    return (
        [text for _, text, _ in held_out],
        [text for _, text, _ in training],
        np.array([family in families for _, _, family in held_out]),
    )


@needs_mmseqs
def test_relatives_are_the_members_of_training_families(tmp_path):
    held_out, training, expected = two_sides()
    held_out += [training[0].lower(), "MKV", training[1][:40]]  # a copy, a short protein, a fragment
    found = relatives(held_out, iter(training), 0.5, tmp_path)
    assert found.by == SEARCH
    assert found.found.tolist() == [*expected.tolist(), True, False, False]
    assert 0 < expected.sum() < 60


@needs_mmseqs
def test_relatives_of_a_file_that_begins_like_nucleotides_are_found(tmp_path):
    held_out, training, expected = two_sides()
    first = like_nucleotides()
    found = relatives([*first, *held_out], iter([*first, *training]), 0.5, tmp_path)
    assert (found.by, found.found.tolist()) == (SEARCH, [True] * 10 + expected.tolist())


def test_relatives_without_mmseqs_are_exact_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    held_out, training, _ = two_sides()
    found = relatives([*held_out, training[3].lower()], iter(training), 0.5, tmp_path)
    assert found.by == COPIES
    assert found.found.tolist() == [False] * 60 + [True]


@needs_mmseqs
def test_relatives_of_proteins_too_short_to_search_are_exact_copies(tmp_path, caplog):
    found = relatives(["MKV", "MKL"], iter(["MKL", "MKA"]), 0.5, tmp_path)
    assert (found.found.tolist(), found.by) == ([False, True], COPIES)
    assert "less than 14 residues" in caplog.text
    assert caplog.text.endswith("only exact copies are counted\n")


def prepare(tmp_path, rows, *flags) -> dict:
    """Step 1's report."""
    write(tmp_path / "csv", rows)
    count = () if "--count_relatives" in flags else ("--count_relatives", "True")
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", *SIZES, *count, *flags)
    return json.loads((tmp_path / "out/arrow/data_report.json").read_text())


def with_family_in_train(tmp_path, rows) -> dict[str, int]:
    family_of = {text: family for _, text, family in rows}
    families = {
        split: [family_of["".join(TOKENS[token] for token in ids[1:-1])] for _, ids in part]
        for split, part in load(tmp_path / "out").items()
    }
    return {split: sum(family in families["train"] for family in families[split]) for split in ("validation", "test")}


@needs_mmseqs
def test_step_1_counts_relatives_of_a_random_split(tmp_path, monkeypatch, caplog):
    rows = related()
    with caplog.at_level("INFO"):
        counts = prepare(tmp_path, rows)["relatives"]
    expected = with_family_in_train(tmp_path, rows)
    assert counts == {
        "by": SEARCH,
        "identity": 0.5,
        "coverage": 0.8,
        "validation": {"proteins": 30, "with_relative": expected["validation"]},
        "test": {"proteins": 20, "with_relative": expected["test"]},
    }
    assert expected["validation"] > 20
    line = f"validation: {expected['validation']} of 30 proteins have a relative in train (MMseqs2 search, identity of"
    assert f"{line} at least 0.5 over 80% of both)" in caplog.text
    monkeypatch.setattr(module, "SAMPLE", 12)
    monkeypatch.setattr("sys.argv", ["relatives", str(tmp_path / "out"), "0.4"])
    with caplog.at_level("INFO"):
        main()
    assert "of 12 proteins (a sample of 30) have a relative in train (MMseqs2 search, identity of at least 0.4" in (
        caplog.text
    )


@needs_mmseqs
def test_step_1_leaves_no_relatives_by_clusters(tmp_path):
    rows = related()
    counts = prepare(tmp_path, rows, "--cluster", 0.5)["relatives"]
    assert with_family_in_train(tmp_path, rows) == {"validation": 0, "test": 0}
    assert [counts[split]["with_relative"] for split in ("validation", "test")] == [0, 0]


def test_step_1_says_what_is_not_counted(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patched, caplog.at_level("INFO"):
        patched.setenv("PATH", str(tmp_path))
        counts = prepare(tmp_path, related())["relatives"]
    assert (counts["by"], counts["test"]) == (COPIES, {"proteins": 20, "with_relative": 0})
    assert "test: 0 of 20 proteins are exact copies of training ones; relatives were not searched" in caplog.text
    for directory in ("csv", "out"):
        shutil.rmtree(tmp_path / directory)
    monkeypatch.setattr(tokenize_proteins, "SEARCHED", 100)
    with caplog.at_level("INFO"):
        assert "relatives" not in prepare(tmp_path, related())
    assert f"in train, of 190: count them by python -m extras.prepare.relatives {tmp_path / 'out'}" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [(["absent"], "absent/arrow: not a finished output of step 1"), (["out", "50"], "IDENTITY 50: a number above 0")],
)
def test_relatives_refuses_what_is_no_output_of_step_1(tmp_path, monkeypatch, words, message):
    prepare(tmp_path, related()[:80], "--count_relatives", "False")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["relatives", *words])
    with pytest.raises(UserError, match=message):
        main()
