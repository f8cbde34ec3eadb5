"""Records of several chains, A:B, in step 1 and in files that are read in place."""

from __future__ import annotations

import json

import pytest

from common.cli import UserError
from common.models.esm2.alphabet import CHAIN_END, TOKENS
from extras.after.generation.flags import UnmaskFlags
from extras.after.generation.templates import templates
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import proteins
from extras.prepare.sources.proteins import ProteinFlags
from extras.prepare.sources.sequence_files import read_sequences, units_of
from tests.data_fixtures import TOKENIZE, call, expect_error, load, write_csv

COMPLEXES = [(f"c{n}", f"MKT{letter}AY:GGHH{letter}:LAGV") for n, letter in enumerate("ACDEFGHIKLMN")]
ALONE = [(f"p{n}", f"{letter}WYMKTAYIAK") for n, letter in enumerate("ACDEFGHIKLMN")]
SIZES = ("--validation_size", "4", "--test_size", "0")


def prepare(tmp_path, rows, *flags, name="out"):
    call(TOKENIZE, "--input_dir", write_csv(tmp_path / "csv", rows), "--output_dir", tmp_path / name, *SIZES, *flags)
    return tmp_path / name


def ids_of(text: str) -> list[int]:
    return [0, *(CHAIN_END if letter == ":" else TOKENS.index(letter) for letter in text), 2]


def test_chain_ends_are_stored_as_the_unused_token(tmp_path):
    out = prepare(tmp_path, COMPLEXES + ALONE, "--chains", "keep")
    texts = dict(COMPLEXES + ALONE)
    stored = dict(row for rows in load(out).values() for row in rows)
    assert stored == {name: ids_of(text) for name, text in texts.items()}
    assert all(
        json.loads((out / "arrow" / split / "state.json").read_text())["_chains"] for split in ("train", "test")
    )


def test_records_without_chains_are_stored_alike(tmp_path):
    plain, kept = prepare(tmp_path, ALONE), prepare(tmp_path, ALONE, "--chains", "keep", name="kept")
    files = sorted(path.relative_to(plain) for path in plain.rglob("*.arrow"))
    assert files
    assert all((plain / file).read_bytes() == (kept / file).read_bytes() for file in files)


def test_copies_of_complexes_are_left_out_of_train(tmp_path):
    twice = [*COMPLEXES, *((f"{name}_again", text) for name, text in COMPLEXES)]
    splits = load(prepare(tmp_path, twice, "--chains", "keep"))
    held_out = {tuple(ids) for _, ids in splits["validation"]}
    assert held_out
    assert held_out.isdisjoint(tuple(ids) for _, ids in splits["train"])


def test_chains_are_refused_in_one_line_that_names_the_flag(tmp_path):
    write_csv(tmp_path / "csv", COMPLEXES)
    given = ("1.tokenize_uniref_csv.py", "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", *SIZES)
    assert "has : or / as between chains: make a record of each (--chains is of step 1" in expect_error(*given)
    assert "--chains keep needs --line_by_line True" in expect_error(*given, "--chains=keep", "--line_by_line=False")


@pytest.mark.parametrize("text", ["MKT::AAG", ":MKTAAG", "MKTAAG:", "MKTAAG:*", "*:MKTAAG"])
def test_empty_chains_are_bad_records(tmp_path, text):
    with pytest.raises(UserError, match=r"has an empty chain \(: at an end, or ::\)"):
        prepare(tmp_path, [*COMPLEXES, ("bad", text)], "--chains", "keep")
    out = prepare(tmp_path, [*COMPLEXES, ("bad", text)], "--chains", "keep", "--on_bad_record", "skip", name="skipped")
    assert json.loads((out / "arrow/data_report.json").read_text())["bad_records"] == 1
    assert "bad" not in dict(row for rows in load(out).values() for row in rows)


def test_lengths_of_complexes_are_not_those_of_proteins(tmp_path):
    out = prepare(tmp_path, COMPLEXES, "--chains", "keep")
    flags = UnmaskFlags(length_from=str(out / "arrow"))
    with pytest.raises(UserError, match="--length_from .*: its records may have several chains"):
        list(templates(flags, ProteinFlags(), 1, 1, 100))


@pytest.mark.parametrize("suffix", ["fasta", "csv", "jsonl"])
def test_files_in_place_keep_chains(tmp_path, suffix):
    records = [*COMPLEXES, ("stops", "MKT*:AAG*"), ("blanks", "MKT : AAG")]
    line = {"fasta": ">{}\n{}\n", "csv": "{},{}\n", "jsonl": '{{"id": "{}", "sequence": "{}"}}\n'}[suffix]
    path = tmp_path / f"complexes.{suffix}"
    path.write_text(("id,sequence\n" if suffix == "csv" else "") + "".join(line.format(*each) for each in records))

    def read(chains: bool) -> list[str]:
        (unit,) = units_of(open_source(str(path), False, content=proteins(chains=chains)).splits["train"], wanted=1)
        blocks = [(data.tobytes().decode(), offsets - offsets[0]) for data, offsets in read_sequences(unit, 0)]
        return [text[a:b] for text, ends in blocks for a, b in zip(ends, ends[1:], strict=False)]

    assert read(True) == [*(text for _, text in COMPLEXES), "MKT:AAG", "MKT:AAG"]
    with pytest.raises(UserError, match="--chains is of step 1, and of encoders"):
        read(False)
    path.write_text(path.read_text().replace("MKTAAY:", "MKTAAY/", 1))
    with pytest.raises(UserError, match="has / as between chains: write : in its place"):
        read(True)
