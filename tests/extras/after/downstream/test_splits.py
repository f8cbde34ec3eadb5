"""Splits that tables give: one column, or two as in FLIP; and what clusters and equal proteins do to them."""

from __future__ import annotations

from collections import Counter

import pytest

from common.cli import UserError
from extras.after.downstream.labels import read_examples
from extras.after.downstream.run_probes import read_sequences
from extras.after.downstream.splits import given_splits
from tests.data_fixtures import proteins
from tests.extras.after.downstream.tables import write_table

SEQUENCES = [text for _, text in proteins(60, seed=2)]
FLIP = ("sequence", "label", "set", "validation")


def flip_rows():
    """Of https://github.com/J-SNACKKB/FLIP: some tables leave `validation` empty for False."""
    sets = [("train", "False"), ("train", ""), ("train", "True"), ("test", "False"), ("test", "")]
    return [(text, n / 7, *sets[n % 5]) for n, text in enumerate(SEQUENCES)]


def splits_of(path, **flags):
    return [each.split for each in read_examples(str(path), **flags)[1]]


def test_flip_columns_are_the_splits_of_both_scripts(tmp_path, caplog):
    caplog.set_level("INFO")
    path = write_table(tmp_path / "a.csv", FLIP, flip_rows())
    expected = ["train", "train", "validation", "test", "test"] * 12
    assert splits_of(path) == expected
    assert [each.split for each in read_sequences(str(path), "here")] == expected
    assert caplog.messages.count("Splits as in FLIP: by the column set and the column validation") == 2


def test_flip_set_alone_is_used_and_lacks_a_validation_split(tmp_path):
    rows = [(text, label, side) for text, label, side, _ in flip_rows()]
    found = splits_of(write_table(tmp_path / "a.csv", FLIP[:3], rows), sizes=(0.3, 0.5))
    assert [split == "test" for split in found] == [side == "test" for *_, side in rows]
    assert 3 < Counter(found)["validation"] < 20


def test_column_set_about_something_else_gives_no_splits(tmp_path):
    rows = [(text, n / 7, "AB"[n % 2]) for n, text in enumerate(SEQUENCES)]
    path = write_table(tmp_path / "a.csv", FLIP[:3], rows)
    assert splits_of(path) == splits_of(write_table(tmp_path / "b.csv", FLIP[:2], [row[:2] for row in rows]))


def test_split_column_comes_before_split_and_split_before_flip(tmp_path):
    names = ("sequence", "label", "set", "split", "mine")
    rows = [
        (text, n / 7, "train", ("train", "dev", "test")[n % 3], ("val", "Test", "train")[n % 3])
        for n, text in enumerate(SEQUENCES)
    ]
    path = write_table(tmp_path / "a.csv", names, rows)
    assert splits_of(path) == ["train", "validation", "test"] * 20
    assert splits_of(path, split_column="mine") == ["validation", "test", "train"] * 20
    with pytest.raises(UserError, match="no column 'other'"):
        splits_of(path, split_column="other")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"split": "hold"}, "here: the split is 'hold': expected train, validation, test"),
        ({"set": "train", "validation": "B"}, "here: validation is 'B': expected True or False"),
        ({"set": "test", "validation": "True"}, "here: set is test and validation is True"),
    ],
)
def test_fields_that_are_no_split_are_refused(row, said):
    with pytest.raises(UserError, match=said):
        given_splits([row], None, ["here"])


def test_rows_without_a_split_are_counted(tmp_path, caplog):
    rows = [(text, n / 7, ("train", "NA", "test")[n % 3]) for n, text in enumerate(SEQUENCES)]
    path = write_table(tmp_path / "a.csv", ("sequence", "label", "split"), rows)
    assert set(splits_of(path)) == {"train", "validation", "test"}
    assert f"--dataset {path}: 20 of 60 rows are left out: 20 without a split" in caplog.messages


def test_one_protein_in_two_splits_is_refused_by_both_scripts(tmp_path):
    rows = [(text, n / 7, ("train", "validation", "test")[n % 3]) for n, text in enumerate(SEQUENCES)]
    path = write_table(tmp_path / "a.csv", ("sequence", "label", "split"), [*rows, (SEQUENCES[0].lower(), 1, "test")])
    for read in (read_examples, lambda path: read_sequences(path, "here")):
        with pytest.raises(UserError, match="row 62: the same sequence is in the train split, too"):
            read(str(path))


@pytest.mark.parametrize(
    ("splits", "flags", "said"),
    [
        ("train validation test", ["--validation_size"], "--validation_size: no effect, as --dataset"),
        ("train test", ["--validation_size", "--test_size"], "--test_size: no effect, as --dataset"),
        ("train test", ["--validation_size"], ""),
        ("", ["--validation_size", "--test_size"], ""),
    ],
)
def test_sizes_of_splits_that_are_given_are_refused(tmp_path, splits, flags, said):
    words = splits.split()
    rows = [(text, n / 7, *words[n % len(words) :][:1]) for n, text in enumerate(SEQUENCES)] if words else None
    rows = rows or [(text, n / 7) for n, text in enumerate(SEQUENCES)]
    path = write_table(tmp_path / "a.csv", ("sequence", "label", "split")[: len(rows[0])], rows)
    if not said:
        assert len(splits_of(path, flags=flags, sizes=(0.2, 0.2))) == 60
        return
    with pytest.raises(UserError, match=f"^{said}"):
        splits_of(path, flags=flags)


@pytest.mark.parametrize(("named", "more"), [(("Split",), ()), (("Set", "Validation"), ("0.0",))])
def test_columns_of_splits_are_known_in_any_case_of_letters(tmp_path, named, more):
    rows = [(text, n / 7, ("train", "validation", "test")[n % 3], *more) for n, text in enumerate(SEQUENCES)]
    path = write_table(tmp_path / "a.csv", ["sequence", "label", *named], rows)
    assert splits_of(path) == ["train", "validation", "test"] * 20
