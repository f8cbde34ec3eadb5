"""score.py --all_single_mutants: matrices and pictures of proteins, and an output that is there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import score as script
from common.cli import UserError
from extras.after.downstream.outputs import MANIFEST
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.mutation_scores import RESIDUES, parse_variant, score
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model
from tests.extras.after.inference.test_score import rows_of
from tests.extras.after.inference.test_score_windows import LONGEST
from tests.small_disk import fill, small_disk

RECORDS = ("scores.json", "best_and_worst.csv")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_score_writes_all_single_mutants(model, tmp_path, monkeypatch, caplog):
    """Each cell is the score of that mutation; as a matrix and a picture of each protein."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    long = ("MKVLAGTYRRWCDE" * 11)[:120]
    fasta = write_fasta(tmp_path / "my.fasta", [("sp|A/1", "MKVXAG"), ("sp|A:1", long), ("X", "XX")])
    output = tmp_path / "matrices"
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu", "--max_seq_length", LONGEST + 2)
    command = (*flags, "--all_single_mutants", "--first_residue", 11, "--output", output)
    caplog.set_level("INFO")
    call(script, *command)
    stems = ("X", "sp_A_1", "sp_A_1-1")
    scores = ("masked_marginal", "wild_type_marginal")
    names = {f"{stem}.{end}" for stem in stems for end in ("png", *(f"{name}.csv" for name in scores))}
    assert {path.name for path in output.iterdir()} == names | {*RECORDS, MANIFEST}
    assert all((output / f"{stem}.png").read_bytes().startswith(b"\x89PNG") for stem in stems)
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=LONGEST + 2, use_cpu=True))
    for stem, text in (("sp_A_1", "MKVXAG"), ("sp_A_1-1", long)):
        for name, masked in zip(scores, (True, False), strict=True):
            rows = rows_of(output / f"{stem}.{name}.csv")
            assert [(int(row["position"]), row["wild_type"]) for row in rows] == list(enumerate(text, 11))
            words = [f"{old}{n}{new}" for n, old in enumerate(text, 1) if old != "X" for new in RESIDUES]
            one_by_one = score(encoder, [parse_variant(word, text.encode(), "") for word in words], masked)
            cells = {f"{row['wild_type']}{n}{new}": row[new] for n, row in enumerate(rows, 1) for new in RESIDUES}
            assert [float(cells[word]) for word in words] == pytest.approx(one_by_one, abs=1e-5)
            assert all(cells[word] == "" for word in cells if word[0] == "X")
    variance = json.loads((output / "scores.json").read_text())["variance"]
    assert set(variance) == {f"{stem}.{name}" for stem in stems for name in scores}
    assert variance["sp_A_1-1.masked_marginal"]["scores"] == 19 * len(long)
    assert variance["X.masked_marginal"] == {"scores": 0, "residues": None, "position": None}
    assert "sp_A_1-1.masked_marginal: variance of the 2,280 scores: " in caplog.text
    assert "sp|A/1: the best and worst 10 single mutants by masked_marginal, nats\n  best " in caplog.text
    ranked = rows_of(output / "best_and_worst.csv")
    assert {row["protein"] for row in ranked} == {"sp|A/1", "sp|A:1"}
    of_long = rows_of(output / "sp_A_1-1.masked_marginal.csv")
    named = [
        (f"{row['wild_type']}{row['position']}{to}", row[to]) for row in of_long for to in RESIDUES if row[to] != ""
    ]
    named = [(name, float(value)) for name, value in named if name[0] != name[-1]]
    for end, sign in (("best", -1), ("worst", 1)):
        found = [row for row in ranked if (row["protein"], row["end"]) == ("sp|A:1", end)]
        assert [int(row["rank"]) for row in found] == list(range(1, 11))
        values = sorted((value for _, value in named), key=lambda value: sign * value)[:10]
        assert [float(row["masked_marginal"]) for row in found] == values
        assert all(dict(named)[row["mutant"]] == float(row["masked_marginal"]) for row in found)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    call(script, *command)
    assert "nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before

    write_fasta(fasta, [("two", "MKV")])
    with pytest.raises(UserError, match="was made from other input or arguments"):
        call(script, *command)
    (output / "notes.txt").write_text("of the user")
    call(script, *command, "--overwrite", "--wild_type_marginal_only")
    assert {path.name for path in output.iterdir()} == {
        *("two.png", "two.wild_type_marginal.csv", *RECORDS, "notes.txt", MANIFEST)
    }
    (output / "two.png").unlink()
    with pytest.raises(UserError, match=r"two.png has gone since it was written"):
        call(script, *command, "--wild_type_marginal_only")
    (output / "two.png").write_text("of the user")
    with pytest.raises(UserError, match="--fasta .* is in there: choose another"):
        call(script, *flags, "--all_single_mutants", "--output", tmp_path, "--overwrite")
    with pytest.raises(UserError, match="--mutations: does not go with --all_single_mutants"):
        call(script, *command, "--mutations", fasta)
    assert not list(tmp_path.glob("*.partial"))


def test_score_replaces_matrices_of_an_earlier_version_by_their_record(model, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKV")])
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu", "--wild_type_marginal_only")
    command = (*flags, "--all_single_mutants", "--output", tmp_path / "matrices")
    call(script, *command)
    record = tmp_path / "matrices" / "scores.json"
    earlier = json.loads(record.read_text()) | {"sha256": {"one.png": "00", "../my.fasta": "00", "gone.png": "00"}}
    record.write_text(json.dumps(earlier))
    for name in (MANIFEST, "best_and_worst.csv"):
        (tmp_path / "matrices" / name).unlink()
    (tmp_path / "matrices" / "one.wild_type_marginal.csv").unlink()
    write_fasta(fasta, [("two", "MKV")])
    call(script, *command, "--overwrite")
    names = {"two.png", "two.wild_type_marginal.csv", *RECORDS, MANIFEST}
    assert {path.name for path in (tmp_path / "matrices").iterdir()} == names
    assert fasta.exists()


def test_score_draws_the_formats_that_are_asked_for(model, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKV")])
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu", "--wild_type_marginal_only")
    command = (*flags, "--all_single_mutants", "--output", tmp_path / "matrices")
    call(script, *command, "--figure_format", "svg", "pdf")
    names = {"one.svg", "one.pdf", "one.wild_type_marginal.csv", *RECORDS, MANIFEST}
    assert {path.name for path in (tmp_path / "matrices").iterdir()} == names
    with pytest.raises(UserError, match="was made from other input or arguments"):
        call(script, *command)
    with pytest.raises(UserError, match="--figure_format tif: choose png, svg, pdf"):
        call(script, *command, "--figure_format", "tif")
    with pytest.raises(UserError, match="are of the pictures of --all_single_mutants: drop them"):
        call(script, *flags, "--mutations", fasta, "--output", tmp_path / "scored.csv", "--dpi", 300)


def test_score_of_all_single_mutants_on_a_full_disk_leaves_nothing(model, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKV" * 100)])
    with small_disk(tmp_path, "1m") as disk:
        fill(disk)
        flags = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu", "--wild_type_marginal_only")
        with pytest.raises(UserError, match="No space left on device: make room"):
            call(script, *flags, "--all_single_mutants", "--output", disk / "matrices")
        assert [path.name for path in disk.iterdir()] == ["mine"]
