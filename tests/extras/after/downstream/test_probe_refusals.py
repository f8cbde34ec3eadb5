"""What probe.py refuses, in one line, with nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.cli import UserError
from tests.data_fixtures import write_fasta
from tests.extras.after.downstream.probing import NAMES, ROWS, probe
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.inference.embed_fixtures import call_embed, make_model


@pytest.fixture(scope="module")
def in_parts(model, fasta, tmp_path_factory) -> tuple[Path, Path]:
    """Embeddings in parts of 30 proteins, by one model and by another."""
    made = [tmp_path_factory.mktemp("parts") / "embedded" for _ in range(2)]
    other = make_model(tmp_path_factory.mktemp("other"), seed=6)
    for directory, name in zip(made, (model, other), strict=True):
        call_embed(name, fasta, directory, "--proteins_per_part", 30)
    return made[0], made[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("another", "part-00001.parquet: of another model or other flags than part-00000.parquet"),
        ("middle", "part-00001.parquet: is missing: run embed.py again"),
        ("last", "of 60 proteins, --fasta .* has 90"),
        ("twice", "of 90 proteins"),
        ("cut", "part-00001.parquet: cannot be read"),
    ],
)
def test_probe_refuses_parts_that_are_not_those_of_one_run(in_parts, fasta, tmp_path, change, said):
    """Also where the labelled proteins are in the parts that are whole, but for a part that stands in for another."""
    embeddings = shutil.copytree(in_parts[0], tmp_path / "embedded")
    first, second, third = (embeddings / "embeddings" / f"part-0000{n}.parquet" for n in range(3))
    if change == "another":
        shutil.copy(in_parts[1] / "embeddings" / second.name, second)
    elif change == "twice":
        shutil.copy(third, second)
    elif change == "cut":
        second.write_bytes(second.read_bytes()[:-9])
    else:
        (second if change == "middle" else third).unlink()
    labels = write_table(tmp_path / "labels.csv", NAMES, ROWS if change == "twice" else ROWS[:30])
    with pytest.raises(UserError, match=said) as error:
        probe(embeddings, fasta, labels, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_probe_refuses_one_id_of_two_proteins(embedded, proteins, tmp_path):
    labels = write_table(tmp_path / "labels.csv", NAMES, ROWS)
    fasta = write_fasta(tmp_path / "my.fasta", [*proteins, ("P88", "MKV")])
    with pytest.raises(UserError, match="'P88'"):
        probe(embedded["mean"], fasta, labels, tmp_path / "out")


def test_probe_refuses_two_splits_of_a_proteins_residues(embedded, fasta, tmp_path):
    rows = [("P1", 1, "H", "train"), ("P2", 1, "E", "train"), ("P1", 2, "H", "test")]
    labels = write_table(tmp_path / "labels.csv", ["id", "position", "label", "split"], rows)
    with pytest.raises(UserError, match="row 4: 'P1' has another split or cluster in row 2: leave one"):
        probe(embedded["residues"], fasta, labels, tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "table", "flags", "said"),
    [
        (NAMES, [*ROWS, ("stranger", 1.0)], (), "row 62: 'stranger' is not in"),
        (NAMES, [*ROWS, ("P3", 1.0)], (), "row 62: a second label of 'P3'"),
        (NAMES, [*ROWS, ("P61",)], (), "row 62 has another number of fields"),
        (NAMES, [*ROWS, ("P61", "high")], (), "'high' is not a number: correct it; or, for classes, --probe logistic"),
        (NAMES, [*ROWS, ("P61", "inf")], (), "'inf' is not a number"),
        (NAMES, ROWS[:9], (), "each needs 10 or more"),
        (NAMES, [(name, "") for name, _ in ROWS], (), "no row has a label"),
        (["protein", "label"], ROWS, (), "no column 'id', only 'protein', 'label'"),
        (
            NAMES,
            ROWS,
            ("--embedding_column", "embedding_3"),
            "no column 'embedding_3': --embedding_column is of embedding",
        ),
        (NAMES, ROWS, ("--model_name_or_path", "x"), "--model_name_or_path and --embeddings: give one"),
        (NAMES, ROWS, ("--bf16",), "--bf16: does nothing with --embeddings"),
        (NAMES, ROWS, ("--per_residue",), "--per_residue: does nothing with --embeddings"),
        (NAMES, ROWS, ("--cluster", 0.3, "--cluster_column", "id"), "--cluster_column and --cluster: give one"),
        ([*NAMES, "split"], [(*row, "left") for row in ROWS], (), "row 2: the split is 'left'"),
        (
            [*NAMES, "split"],
            [(name, ("b" if n > 50 else "a"), ("test" if n > 40 else "train")) for n, (name, _) in enumerate(ROWS)],
            (),
            "all labels of the training part are 'a': nothing to learn",
        ),
        (
            [*NAMES, "split"],
            [
                (name, ("c" if n > 50 else "ab"[n % 2]), ("test" if n > 40 else "train"))
                for n, (name, _) in enumerate(ROWS)
            ],
            (),
            "the class 'c' is in the held-out part alone",
        ),
        (["id", "position", "label"], [(name, 1, y) for name, y in ROWS], (), "give embed.py --per_residue"),
    ],
)
def test_probe_refuses_in_a_line(embedded, fasta, tmp_path, names, table, flags, said):
    labels = write_table(tmp_path / "labels.csv", names, table)
    with pytest.raises(UserError) as error:
        probe(embedded["mean"], fasta, labels, tmp_path / "out", *flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "row", "said"),
    [
        (["id", "label"], ("P1", "HH"), "2 labels for"),
        (["id", "position", "label"], ("P1", 9999, "H"), "position '9999': the protein has residues 1 to"),
        (["id", "position", "label"], ("P1", 0, "H"), "position '0'"),
    ],
)
def test_probe_refuses_labels_that_do_not_fit_the_residues(embedded, fasta, tmp_path, names, row, said):
    labels = write_table(tmp_path / "labels.csv", names, [row])
    with pytest.raises(UserError, match=said):
        probe(embedded["residues"], fasta, labels, tmp_path / "out")
