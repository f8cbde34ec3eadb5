"""Which files of a directory are proteins, by name and by content, and tables whose quotes mean nothing."""

import gzip
import json
import logging

import pytest

from common.cli import UserError
from extras.after.inference.mutation_tables import read_rows as read_table
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import FORMATS, proteins
from extras.prepare.sources.record_counts import count_records
from extras.prepare.sources.sequence_files import read_sequences, units_of

FASTA = b">one\nMKVLAG\n>two\nMKV\n"
# As UniProt writes it: no quoting.
TSV = 'Entry\tProtein names\tSequence\nP1\t"5-nucleotidase\tMKVLAG\nP2\t3"-ligase\tMKV\nP3\ta "long" one\t"MKL"\n'
CSV = 'Entry,Protein names,Sequence\nP1,"5-nucleotidase,MKVLAG\nP2,3"-ligase,MKV\nP3,"a, b",MKL\n'


def read(path, **options) -> list[str]:
    source = open_source(str(path), False, content=proteins(**options))
    units = units_of(source.splits["train"], 1)
    found = []
    for unit in units:
        for data, ends in read_sequences(unit, 0):
            found += [data[a:b].tobytes().decode() for a, b in zip(ends, ends[1:], strict=False)]
    return found


def test_a_directory_gives_every_file_of_proteins_and_names_the_others(tmp_path, caplog):
    names = ["a.fasta", "b.fa", "c.faa", "d.fas", "e.fsa", "f.pep", "g.seq", "h.a3m", "sequences", "i.part"]
    for name in names:
        (tmp_path / name).write_bytes(FASTA)
    (tmp_path / "j.xyz").write_bytes(gzip.compress(FASTA))
    (tmp_path / "small.json").write_text(json.dumps({"id": 1, "sequence": "MKVLAG"}) + "\n")
    others = ["README.md", "base.fasta~", "dataset_infos.json", "empty.fasta", "rna.fna", "table.txt"]
    for name in ("base.fasta~", "rna.fna"):
        (tmp_path / name).write_bytes(FASTA)
    (tmp_path / "empty.fasta").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / "linked/b.fasta").write_bytes(FASTA)
    (tmp_path / "more/again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "more/other").symlink_to(tmp_path / "linked", target_is_directory=True)
    (tmp_path / "dataset_infos.json").write_text(json.dumps({"default": {"features": {"sequence": {}}}}))
    for name in ("README.md", "table.txt"):
        (tmp_path / name).write_text("> a quotation\nMKVLAG\n")
    (tmp_path / ".hidden.fasta").write_bytes(FASTA)
    with caplog.at_level(logging.INFO):
        assert sorted(read(tmp_path)) == sorted(["MKVLAG", "MKV"] * 12 + ["MKVLAG"])
    assert f"left out, no proteins by name or content: {', '.join(others[:5])} and 1 more" in caplog.text
    source = open_source(str(tmp_path), False)
    assert source.name == str(tmp_path)
    assert count_records(source.splits["train"]) == 25


def test_an_alignment_is_counted_in_records(tmp_path):
    path = tmp_path / "family.a3m"
    path.write_bytes(b"#5\t1\n" + b"".join(b">p%d\nMK-\nVgLA\n" % n for n in range(10)))
    assert read(path) == ["MKVgLA"] * 10
    assert read(path, gaps="keep") == ["MK-VLA"] * 10
    assert count_records(open_source(str(path), False).splits["train"]) == 10


@pytest.mark.parametrize("rows", [1, 200])
def test_a_quote_in_another_column_of_tsv_is_a_character(tmp_path, rows):
    head, *lines = TSV.splitlines(keepends=True)
    (tmp_path / "a.tsv").write_text(head + "".join(lines) * rows)
    assert read(tmp_path / "a.tsv") == ["MKVLAG", "MKV", "MKL"] * rows
    _, found = read_table(tmp_path / "a.tsv", "a.tsv")
    assert [row["Protein names"] for row in found] == ['"5-nucleotidase', '3"-ligase', 'a "long" one'] * rows


def test_an_open_quote_in_another_column_of_csv_names_the_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    with pytest.raises(UserError, match=r"a\.csv: row 1: a text that continues after a line end, after a quote"):
        read(path)
    with pytest.raises(UserError, match=r"^a\.csv: line 2: "):
        read_table(path, "a.csv")
    path.write_text(CSV.replace('"5-', "5-"))
    assert read(path) == ["MKVLAG", "MKV", "MKL"]


def test_rows_without_a_protein_are_counted(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text("id,sequence\n1,MKV\n2,\n3, \n4,M-K\n5,MKL\n")
    with caplog.at_level(logging.INFO):
        assert read(path, on_bad_record="skip") == ["MKV", "", "", "", "MKL"]
    assert "a.csv, rows 1 to 5: 2 records have no protein: left out" in caplog.text
    assert "1 bad records were skipped" in caplog.text


def test_a_pair_of_quotes_around_a_whole_value_of_tsv_is_not_part_of_it(tmp_path):
    """As R's write.table has it."""
    path = tmp_path / "a.tsv"
    path.write_text('"sequence"\t"label"\n"MKVLAG"\t"high"\n"MKV"\tNA\n')
    assert read(path) == ["MKVLAG", "MKV"]
    assert read_table(path, "a.tsv") == (
        ["sequence", "label"],
        [{"sequence": "MKVLAG", "label": "high"}, {"sequence": "MKV", "label": "NA"}],
    )


def test_a_table_of_one_column_says_what_separates_it(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id;sequence\n1;MKV\n")
    with pytest.raises(UserError, match="separated by semicolons"):
        read(path)


def test_tables_of_labels_may_be_compressed_and_say_what_else_they_are(tmp_path):
    text = b"sequence,label\nMKV,1\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    assert read_table(tmp_path / "a.csv.gz", "a.csv")[1] == [{"sequence": "MKV", "label": "1"}]
    (tmp_path / "a.csv").write_bytes(text.decode().encode("utf-16"))
    with pytest.raises(UserError, match="^a.csv: not a CSV file: it is UTF-16: convert it"):
        read_table(tmp_path / "a.csv", "a.csv")


def test_an_ending_belongs_to_one_format_of_each_content():
    for content in ("proteins", "documents"):
        endings = [ending for each in FORMATS.values() if content in each.contents for ending in each.suffixes]
        assert len(endings) == len(set(endings))
