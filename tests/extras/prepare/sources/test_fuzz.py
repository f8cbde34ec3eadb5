"""Mutations of valid files: the same proteins, or each of the others counted or refused. Never fewer without a word.

The expected numbers are counted without a parser: lines of FASTA that begin with `>`, and lines
of tables that are not empty.
"""

import random
import re

import pytest

from common.cli import UserError
from extras.after.inference.encoder import look_through
from extras.after.inference.mutation_tables import read_rows as read_table
from extras.prepare.sources.csv_records import read_rows as read_csv
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import proteins
from extras.prepare.sources.protein_records import RecordFlags, read_records
from extras.prepare.sources.proteins import ProteinFlags, proteins_of
from extras.prepare.sources.records import BadRecords
from extras.prepare.sources.residues import RESIDUES, Cleaner
from extras.prepare.sources.sequence_files import read_sequences, units_of
from tests.data_fixtures import DOWNLOAD, call
from tests.extras.prepare.test_download_data import partitions
from tests.extras.prepare.test_inputs import UNIREF
from tests.extras.prepare.test_inputs import table_of as pa_table_of
from tests.extras.prepare.test_inputs import write as write_table

NAMES = ["5'-nucleotidase", "3-ligase (EC 6.5.1.1)", "capsid", "kinase, tyrosine", 'the "long" one']
PIECES = [
    b'"',
    b'"',
    b"'",
    b",",
    b"\t",
    b"\n",
    b"\r\n",
    b"\n>",
    b">",
    b"\n;",
    b";",
    b"#",
    b" ",
    b"  ",
    b"-",
    b".",
    b"*",
]
PIECES += [
    b"1",
    b"\xc3\xa9",
    b"\x00",
    b"NA",
    b"Sequence unavailable",
    b"\n\n",
    b'""',
    b'"\n',
    b',"',
    b'",',
    b'\t"',
    b'"\t',
]
MUTATIONS = 4


def sequences(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choices("LAGVSERTIDPKQNFYMHWC", k=draw.randrange(20, 60))) for _ in range(count)]


def fasta_of(draw: random.Random) -> bytes:
    texts = enumerate(sequences(draw, 12))
    return "".join(f">P{n} {draw.choice(NAMES)}\n{text[:30]}\n{text[30:]}\n" for n, text in texts).encode()


def table_of(draw: random.Random, delimiter: str, header: list[str]) -> bytes:
    rows = [header]
    for number, text in enumerate(sequences(draw, 12)):
        name = draw.choice(NAMES)
        if delimiter == "," and ("," in name or '"' in name):
            name = '"' + name.replace('"', '""') + '"'
        cells = {"id": f"P{number}", "name": name, "text": text, "sequence": text, "label": str(number)}
        rows.append([cells[column] for column in header])
    return "".join(delimiter.join(row) + "\n" for row in rows).encode()


def mutated(draw: random.Random, content: bytes, first: int = 0) -> bytes:
    """Some bytes inserted, removed or repeated, or a line's case changed, after the first bytes."""
    for _ in range(draw.randrange(1, MUTATIONS)):
        at = draw.randrange(first, len(content))
        kind = draw.randrange(8)
        if kind < 5:
            content = content[:at] + draw.choice(PIECES) + content[at:]
        elif kind == 5:
            content = content[:at] + content[at + draw.randrange(1, 20) :]
        elif kind == 6:
            content = content[:at] + content[at : at + 40].swapcase() + content[at + 40 :]
        else:
            content = content[:at] + content[max(first, at - draw.randrange(60)) :]
    return content


def one_line(error: UserError, name: str) -> None:
    assert name in str(error)
    assert "\n" not in str(error)


def lines_of(content: bytes) -> list[bytes]:
    return [line for line in re.split(rb"\r\n|\n|\r", content) if line]


@pytest.mark.parametrize("seed", range(4))
def test_mutated_fasta_keeps_or_counts_its_records(tmp_path, seed):
    draw, path, accepted = random.Random(seed), tmp_path / "a.fasta", 0
    for number in range(60):
        path.write_bytes(content := mutated(draw, fasta_of(draw)))
        wanted = len(re.findall(rb"(?m)^>", content.lstrip()))
        gaps, bad = draw.choice([None, "remove", "keep"]), BadRecords("skip")
        cleaner = Cleaner("a.fasta", gaps, bad)
        try:
            found = list(read_fasta(path, draw.choice([7, 100, 1 << 20]), cleaner=cleaner))
        except UserError as error:
            one_line(error, "a.fasta")
            continue
        accepted += 1
        assert len(found) + bad.count == wanted, (number, content)
        allowed = RESIDUES + (b"-." if gaps == "keep" else b"")
        strange = sum(len(text.translate(None, allowed)) for _, text in found)
        assert strange == cleaner.changes.unknown, (number, content)
        # Letters are neither lost nor made.
        named, parts = dict(found), [part.partition(b"\n") for part in re.split(rb"(?m)^>", content.lstrip())[1:]]
        names = [(header.split() or [b""])[0] for header, _, _ in parts]
        for name, (_, _, body) in zip(names, parts, strict=True):
            if name in named and names.count(name) == 1:
                letters = b"".join(re.sub(rb"(?m)^[;#].*$", b"", body).split()).rstrip(b"*")
                assert named[name] == (letters.translate(None, b"-.") if gaps == "remove" else letters), number
    assert accepted > 20


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["csv", "tsv", "step 1"])
def test_mutated_tables_keep_or_count_their_rows(tmp_path, seed, kind):
    draw, accepted = random.Random(seed), 0
    path = tmp_path / ("a.tsv" if kind == "tsv" else "a.csv")
    header = ["id", "text", "name"] if kind == "step 1" else ["id", "name", "sequence"]
    for number in range(50):
        whole = table_of(draw, "\t" if kind == "tsv" else ",", header)
        path.write_bytes(content := mutated(draw, whole, len(whole.split(b"\n")[0]) + 1))
        wanted = len(lines_of(content)) - 1
        try:
            if kind == "step 1":
                bad = BadRecords("skip")
                rows = sum(batch.num_rows for batch in read_csv(path, Cleaner(str(path), bad_records=bad))) + bad.count
            else:
                source = open_source(str(path), False, content=proteins(gaps="keep", on_bad_record="skip"))
                units = units_of(source.splits["train"], 1)
                rows = sum(len(ends) - 1 for unit in units for _, ends in read_sequences(unit, 0))
        except UserError as error:
            one_line(error, path.name)
            continue
        accepted += 1
        assert rows == wanted, (number, content)
    assert accepted > 5


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "a.jsonl"])
def test_mutated_binary_files_keep_or_count_their_rows(tmp_path, name):
    """Bytes changed, set or left out anywhere, in headers too. In JSON lines a line may be lost with its end."""
    draw, flags = random.Random(3), RecordFlags(on_bad_record="skip")
    rows = [(f"C{number // 3}", f"P{number}", text) for number, text in enumerate(sequences(draw, 60))]
    path = write_table(tmp_path / name, pa_table_of(rows, UNIREF))
    whole, accepted = path.read_bytes(), 0
    for number in range(150):
        content = bytearray(whole)
        at, kind = draw.randrange(len(content)), draw.randrange(3)
        if kind == 0:
            content[at] = draw.randrange(256)
        elif kind == 1:
            content[at : at + 4] = bytes(draw.choices([0, 1, 127, 255], k=4))
        else:
            del content[at : at + draw.randrange(1, 9)]
        path.write_bytes(content)
        cleaner = flags.cleaner(path)
        try:
            found = sum(batch.num_rows for batch in read_records(path, cleaner, flags)) + cleaner.bad_records.count
        except UserError as error:
            one_line(error, name)
            continue
        accepted += 1
        assert found == 60, (number, content)
    assert accepted > 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_mutated_labels_keep_their_rows_or_name_the_line(tmp_path, seed, delimiter):
    draw, accepted = random.Random(seed), 0
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    for number in range(50):
        whole = table_of(draw, delimiter, ["id", "name", "sequence", "label"])
        path.write_bytes(content := mutated(draw, whole, len(whole.split(b"\n")[0]) + 1))
        try:
            _, rows = read_table(path, path.name)
        except UserError as error:
            one_line(error, path.name)
            continue
        accepted += 1
        assert len(rows) == len(lines_of(content)) - 1, (number, content)
    assert accepted > 5


def test_scripts_read_the_same_proteins_or_all_refuse(tmp_path):
    """Step 0, --dataset of the train scripts, embed.py, and what the other scripts share, of each mutated file."""
    draw, accepted = random.Random(7), 0
    for number in range(30):
        path = tmp_path / f"{number}.fasta"
        path.write_bytes(mutated(draw, fasta_of(draw)))
        gaps = draw.choice([None, "remove", "keep"])
        flags = ProteinFlags(gaps, "skip")
        words = ("--on_bad_record", "skip", *(("--gaps", gaps) if gaps else ()))

        def step_0(path=path, words=words) -> int:
            out = path.with_suffix("")
            call(DOWNLOAD, "--source", path, "--output_dir", out, *words)
            return sum(map(len, partitions(out / "csv")))

        def dataset(path=path, gaps=gaps) -> int:
            content = proteins(gaps=gaps, on_bad_record="skip")
            units = units_of(open_source(str(path), False, content=content).splits["train"], 1)
            return sum(int((ends[1:] > ends[:-1]).sum()) for unit in units for _, ends in read_sequences(unit, 0))

        def embed(path=path, flags=flags) -> int:
            return look_through(str(path), flags=flags).proteins

        def others(path=path, flags=flags) -> int:
            return sum(1 for _ in proteins_of(str(path), flags))

        found = []
        for read in (step_0, dataset, embed, others):
            try:
                found.append(read())
            except UserError:
                found.append(0)
        assert len(set(found)) == 1, (number, found)
        accepted += found[0] > 0
    assert accepted > 10
