"""Labels and proteins of tables: what is read, counted, and refused, by finetune.py and probe.py alike."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from common.cli import UserError
from common.models.esm2.alphabet import encode
from extras.after.downstream.labels import IGNORE, contradictions, has_label, label_items, read_examples, task_of
from extras.after.downstream.probes import labels_of
from extras.after.downstream.run_probes import read_sequences
from extras.after.downstream.splits import split_of
from extras.prepare.sources.proteins import ProteinFlags
from tests.data_fixtures import proteins, write_fasta
from tests.extras.after.downstream.tables import write_table

MISSING = ("", "NA", "N/A", "nan", "NaN", "None", "null", "NULL", "<NA>", "#N/A")
SEQUENCES = [text for _, text in proteins(60, seed=2)]


def table_of(path, rows, names=("sequence", "label")):
    return write_table(path, names, rows)


def test_words_for_a_missing_value_are_no_labels_and_are_counted(tmp_path, caplog):
    """Beside numbers and beside classes, for a fine-tuning and a probe."""
    for labels in ([n / 7 for n in range(50)], ["ab"[n % 2] for n in range(50)]):
        rows = list(zip(SEQUENCES, [*MISSING, *labels], strict=True))
        path = str(table_of(tmp_path / "a.csv", rows))
        task, examples = read_examples(path)
        assert (len(examples), task.classes) == (50, ("a", "b") if labels[0] == "a" else ())
        assert len(read_sequences(path, "here")) == 50
        lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert lines == [
            f"{where}: 10 of 60 rows are left out: 10 without a label" for where in (f"--dataset {path}", "here")
        ]
        caplog.clear()


@pytest.mark.parametrize(
    ("label", "residues", "expected"),
    [
        ("HNAC", 4, True),
        ("NA", 2, True),  # two residues with the classes N and A
        ("NA", 30, False),
        ("NA", 0, False),
        ("-.-.", 4, False),
        ("-.-N", 4, True),
        ("NA NA . 0.5", 4, True),
        ("NA NA . nan", 4, False),
        ("-", 0, False),
        ("-1", 0, True),
    ],
)
def test_letters_of_residues_are_labels_but_for_dots_and_dashes(label, residues, expected):
    assert has_label(label, residues) is expected


def test_strings_of_residues_have_none_at_dots_and_dashes(tmp_path):
    rows = [(text, ("NAH" * len(text))[: len(text) - 2] + "-.") for text in SEQUENCES]
    task, examples = read_examples(str(table_of(tmp_path / "a.csv", rows)))
    assert task.classes == ("A", "H", "N")
    for example, text in zip(examples, SEQUENCES, strict=True):
        assert example.target.tolist() == [(2, 0, 1)[n % 3] for n in range(len(text) - 2)] + [IGNORE] * 2


def test_zeros_and_ones_as_floats_are_two_classes():
    """So pandas writes them if one is missing."""
    labels = ["0.0", "1.0", "0", "1"]
    task = task_of(["MKTAY"] * 4, labels, None)
    assert (task.name, task.classes) == ("classification", ("0", "1"))
    assert labels_of(labels, None).tolist() == ["0", "1", "0", "1"]
    assert labels_of(labels, "ridge").tolist() == [0, 1, 0, 1]
    assert labels_of(["2.0", "2", "3"], "logistic").tolist() == ["2", "2", "3"]
    assert labels_of(["1.0", "1.1", "1.10"], "logistic").tolist() == ["1.0", "1.1", "1.10"]  # of enzymes, say
    assert task_of(["MKTAY"] * 3, ["0.0", "1.0", "0.5"], None).name == "regression"


def test_words_among_numbers_are_refused(tmp_path):
    rows = [*((text, n / 7) for n, text in enumerate(SEQUENCES[1:])), (SEQUENCES[0], ">50")]
    path = str(table_of(tmp_path / "a.csv", rows))
    with pytest.raises(UserError, match="'>50' is not a number: correct it; or, for classes, --problem_type classif"):
        read_examples(path)


def test_one_protein_in_two_spellings_is_in_one_split_with_one_input(tmp_path):
    spelt = [text.lower() + "*" if n % 2 else " ".join(text) for n, text in enumerate(SEQUENCES)]
    rows = [(text, n / 7) for n, text in enumerate(SEQUENCES)] + [(text, n / 7) for n, text in enumerate(spelt)]
    _, examples = read_examples(str(table_of(tmp_path / "a.csv", rows)))
    for text, one, other in zip(SEQUENCES, examples, examples[len(SEQUENCES) :], strict=False):
        assert one.split == other.split == split_of(text, (0.1, 0.2))
        assert one.ids.tolist() == other.ids.tolist() == encode(text).tolist()
    found = read_sequences(str(tmp_path / "a.csv"), "here")
    assert [each.group for each in found] == SEQUENCES * 2


def test_fasta_with_one_id_twice_and_another_sequence_than_the_table_are_refused(tmp_path):
    rows = [(f"p{n}", n / 7, text.lower()) for n, text in enumerate(SEQUENCES)]
    path = str(table_of(tmp_path / "a.csv", rows, ("id", "label", "sequence")))
    records = [(f"p{n}", text) for n, text in enumerate(SEQUENCES)]
    _, examples = read_examples(path, str(write_fasta(tmp_path / "a.fasta", records)))
    assert [each.name for each in examples] == [name for name, _ in records]
    with pytest.raises(UserError, match=r"row 5: `sequence` is not that of 'p3'"):
        read_examples(path, str(write_fasta(tmp_path / "b.fasta", [*records[:3], ("p3", "MKV"), *records[4:]])))
    with pytest.raises(UserError, match="'p3'"):
        read_examples(path, str(write_fasta(tmp_path / "c.fasta", [*records, ("p3", SEQUENCES[3])])))


def test_contradicting_labels_are_counted_and_the_first_named(tmp_path, caplog):
    extra = [(SEQUENCES[4].lower(), "9.5"), (SEQUENCES[4], "9.5"), (SEQUENCES[7], "8"), (SEQUENCES[8], "8.00")]
    rows = [(text, f"{n}.0") for n, text in enumerate(SEQUENCES)] + extra
    task, examples = read_examples(str(table_of(tmp_path / "a.csv", rows)))
    found = contradictions(label_items(task, examples), "here")
    assert found == {"proteins": 2, "first": "'row 6' 4.0, 'row 62' 9.5"}
    assert caplog.messages[-1] == "here: 2 proteins have contradicting labels: 'row 6' 4.0, 'row 62' 9.5"
    assert contradictions(label_items(task, examples[:60]), "here") == {"proteins": 0, "first": None}


def test_contradicting_labels_of_residues_are_those_of_one_residue(tmp_path):
    rows = [(text, ("HC" * len(text))[: len(text)]) for text in SEQUENCES]
    first, length = rows[0][1], len(SEQUENCES[0])
    for label, count in (("." * (length - 1) + first[-1], 0), ("C" + "." * (length - 1), 1)):
        task, examples = read_examples(str(table_of(tmp_path / "a.csv", [*rows, (SEQUENCES[0], label)])))
        found = contradictions(label_items(task, examples), "here")
        assert found == {"proteins": count, "first": "'row 2' H, 'row 62' C at residue 1" if count else None}


def test_a_split_with_one_protein_or_one_label_is_said_and_one_label_to_train_on_refused(tmp_path, caplog):
    splits = ["train"] * 40 + ["validation"] * 19 + ["test"]
    rows = [
        (text, n / 7 if n < 40 else 2.5, split) for n, (text, split) in enumerate(zip(SEQUENCES, splits, strict=True))
    ]
    read_examples(str(table_of(tmp_path / "a.csv", rows, ("sequence", "label", "split"))))
    said = "\n".join(caplog.messages)
    assert "one protein or cluster in the test split" in said
    assert "all labels of the validation split are 2.5: spearman, pearson and r2 are not defined" in said
    constant = [(text, 1.5 if split == "train" else n, split) for n, (text, _, split) in enumerate(rows)]
    with pytest.raises(UserError, match="all labels of the train split are 1.5: nothing to learn"):
        read_examples(str(table_of(tmp_path / "b.csv", constant, ("sequence", "label", "split"))))


def test_targets_of_a_regression_are_nan_where_a_residue_has_no_label(tmp_path):
    rows = [(text, " ".join(["NA", "-", *(f"{n / 4}" for n in range(len(text) - 2))])) for text in SEQUENCES]
    _, examples = read_examples(str(table_of(tmp_path / "a.csv", rows)))
    expected = [math.nan, math.nan, *(n / 4 for n in range(len(SEQUENCES[0]) - 2))]
    np.testing.assert_array_equal(examples[0].target, expected)


def test_what_is_changed_in_a_column_of_sequences_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [(f"LAGVSERTIDPJ {text}*", n / 7) for n, text in enumerate(SEQUENCES)]
    path = str(table_of(tmp_path / "a.csv", rows))
    _, examples = read_examples(path)
    assert [each.residues for each in examples] == [f"LAGVSERTIDPX{text}" for text in SEQUENCES]
    assert f"--dataset {path}: removed: 60 blanks, 60 stops (*) at the end" in caplog.messages
    unknown = "60 characters in 60 records are not residues: <unk> (row 2, row 3, row 4 and others)"
    assert f"--dataset {path}: {unknown}" in caplog.messages


def test_gaps_of_a_column_of_sequences_follow_the_flag(tmp_path):
    rows = [(f"{text[:9]}--{text[9:]}", n / 7) for n, text in enumerate(SEQUENCES)]
    path = str(table_of(tmp_path / "a.csv", rows))
    with pytest.raises(UserError, match="row 2 has gaps"):
        read_examples(path)
    _, examples = read_examples(path, proteins=ProteinFlags("remove"))
    assert [each.residues for each in examples] == SEQUENCES


def test_decimal_commas_are_refused(tmp_path):
    rows = [(text, f"{n % 4},5") for n, text in enumerate(SEQUENCES)]
    path = str(table_of(tmp_path / "a.csv", rows))
    for read in (read_examples, lambda path: labels_of([label for _, label in rows], None, f"--dataset {path}")):
        with pytest.raises(UserError, match=r"'0,5' has a decimal comma: write it with a point"):
            read(path)


@pytest.mark.parametrize(
    ("labels", "asked", "task", "classes"),
    [
        (["0.5", "7"], None, "regression", ()),
        (["0", "1"], None, "classification", ("0", "1")),
        (["3", "5"], "classification", "classification", ("3", "5")),
        (["yes", "no"], None, "classification", ("no", "yes")),
        (["HHC.E", "HHCCH"], None, "token_classification", ("C", "E", "H")),
        (["01234", "44444"], None, "token_classification", ("0", "1", "2", "3", "4")),
        (["1,2,nan,4,5", "0 1 0 1 3"], None, "token_regression", ()),
    ],
)
def test_task_follows_from_the_labels(labels, asked, task, classes):
    found = task_of(["MKTAY", "MKTAV"], labels, asked)
    assert (found.name, found.classes) == (task, classes)


def test_examples_honour_splits_and_absent_labels(tmp_path):
    sequences = [f"MK{a}{b}" for a in "ACDEFGHIKL" for b in "MNPQRSTVWY"]
    rows = [(s, "HC.C", "test" if n % 3 == 0 else "train") for n, s in enumerate(sequences)]
    path = write_table(
        tmp_path / "a.csv",
        ("sequence", "label", "split"),
        [*rows, ("MKAA", "", "train"), ("MKAA", "...", "train"), ("MKAA", "HHHH", "")],
    )
    task, examples = read_examples(str(path), sizes=(0.3, 0.0))
    counts = {name: sum(e.split == name for e in examples) for name in ("train", "validation", "test")}
    assert counts["test"] == 34
    assert 10 < counts["validation"] < 30
    assert sum(counts.values()) == 100
    assert examples[0].target.tolist() == [1, 0, IGNORE, 0]
    assert examples[0].labelled().tolist() == [1, 0, 0]
    (tmp_path / "a.fasta").write_text("".join(f">p{n}\n{s}\n" for n, s in enumerate(sequences)))
    path = write_table(tmp_path / "b.csv", ("id", "label"), [(f"p{n}", n / 7) for n in range(100)])
    _, examples = read_examples(str(path), str(tmp_path / "a.fasta"))
    assert [(e.name, e.split) for e in examples] == [
        (f"p{n}", split_of(s, (0.1, 0.2))) for n, s in enumerate(sequences)
    ]


def test_examples_keep_clusters_whole_and_equal_sequences_in_one_group(tmp_path):
    rows = [(f"MK{a}{b}", f"{n % 7}.5", f"c{n // 4}") for n, (a, b) in enumerate(product("ACDEFGHIKL", "MNPQRSTVWY"))]
    path = write_table(
        tmp_path / "a.csv", ("sequence", "label", "of"), [*rows, ("MKAM", "9.5", "c0"), ("MKYY", "1.5", "")]
    )
    _, examples = read_examples(str(path), sizes=(0.2, 0.2), cluster_column="of")
    assert [e.group for e in examples] == [*(cluster for *_, cluster in rows), "c0", "MKYY"]
    assert [e.split for e in examples] == [split_of(e.group, (0.2, 0.2)) for e in examples]
    _, examples = read_examples(str(path), sizes=(0.2, 0.2))
    assert examples[0].group == examples[-2].group == "MKAM"
    mixed = [(*row, ("train", "validation", "test")[n % 3]) for n, row in enumerate(rows)]
    path = write_table(tmp_path / "b.csv", ("sequence", "label", "of", "split"), mixed)
    with pytest.raises(UserError, match="row 3: the cluster 'c0' is in the train split, too"):
        read_examples(str(path), cluster_column="of")


SPLIT_ROWS = [("MKA", "a", "train"), ("MKC", "b", "train"), ("MKD", "a", "validation"), ("MKE", "a", "test")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*SPLIT_ROWS, ("MKF", "c", "test")], "the class 'c' of the test split is not in train"),
        (
            [("MKAY", "HHC", "train"), ("MKAC", "HHCC", "train"), ("MKAD", "HHCC", "test")],
            "row 2: 3 labels for 4 residues",
        ),
        ([*SPLIT_ROWS, ("MKA", "a", "test")], "row 6: the same sequence is in the train split, too"),
        ([*SPLIT_ROWS, ("MKF", "a", "hold")], "row 6: the split is 'hold'"),
        (SPLIT_ROWS[:3], "no protein of the test split"),
        ([("MKA", "", "train")], "no row has a label"),
        ([(s, "a", split) for s, _, split in SPLIT_ROWS], "one class alone, 'a'"),
        (
            [*SPLIT_ROWS, ("M" * 1500, "a", "train"), ("M" * 2000, "a", "train")],
            "row 7: the longest sequence has 2,000 residues: give --max_seq_length 2002, or cut",
        ),
    ],
)
def test_examples_refuse_labels_that_do_not_fit(tmp_path, rows, said):
    with pytest.raises(UserError, match=said):
        read_examples(str(write_table(tmp_path / "a.csv", ("sequence", "label", "split"), rows)))
