"""Read the records (id, residues, perhaps a cluster) of a file of proteins in any format, for steps 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.data import GAPS_HELP, Gaps, Policy
from common.flags import Flags, flag
from extras.prepare.sources import compression as limits
from extras.prepare.sources import csv_records
from extras.prepare.sources.compression import check_file, open_decompressed
from extras.prepare.sources.fasta import read_fasta_lines
from extras.prepare.sources.find_files import File
from extras.prepare.sources.formats import Content, format_of_file, proteins
from extras.prepare.sources.record_columns import CLUSTERS, IDS, SEQUENCES, Columns, Wanted
from extras.prepare.sources.record_lines import lines_of
from extras.prepare.sources.record_rows import REMEDY, Blocks, clean_rows
from extras.prepare.sources.records import BadRecords, Lines, characters, columns
from extras.prepare.sources.residues import Cleaner, is_alignment
from extras.prepare.sources.sequence_files import Unit, read_batches, read_rows, reader_of, reporting

Chains = Literal["refuse", "keep"]  # what becomes of records of several chains, A:B


@dataclass
class RecordFlags(Flags):
    """How records are read: the flags that steps 0 and 1 share."""

    sequence_column: str | None = flag(None, f"of a table, for the residues; default: {', '.join(SEQUENCES[:3])}")
    id_column: str | None = flag(None, f"of a table; default: {', '.join(IDS[:4])}; without one: file and row number")
    cluster_column: str | None = flag(None, f"of a table, for names of clusters; default: {', '.join(CLUSTERS)}")
    gaps: Gaps | None = flag(None, GAPS_HELP, choices=get_args(Gaps))
    chains: Chains = flag(
        "refuse",
        "records of several chains, A:B: refuse, or keep the ends of chains, for training with --chains",
        choices=get_args(Chains),
    )
    on_bad_record: Policy = flag(
        "error", "stop at a record that is no protein, or skip and count", choices=get_args(Policy)
    )
    max_record_length: int = flag(limits.LONGEST_PROTEIN, limits.HELP)

    def check(self) -> None:
        limits.check_record_length(self.max_record_length)

    @property
    def content(self) -> Content:
        """What the files hold, to find them."""
        how = self.max_record_length, self.gaps, self.on_bad_record, self.keeps_chains
        return replace(proteins(*how), columns=self.columns_wanted.sequences)

    @property
    def keeps_chains(self) -> bool:
        return self.chains == "keep"

    @property
    def columns_wanted(self) -> Wanted:
        return Wanted(self.sequence_column, self.id_column, self.cluster_column)

    @property
    def changing(self) -> dict[str, str]:
        """{flag: value} of those that were given and change what is read."""
        names = ("sequence_column", "id_column", "cluster_column", "gaps")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return given | ({"chains": self.chains} if self.keeps_chains else {})

    def cleaner(self, path: Path, bad_records: BadRecords | None = None) -> Cleaner:
        """Of a file, with its own count of bad records if none is given."""
        bad_records = bad_records or BadRecords(self.on_bad_record)
        return Cleaner(str(path), self.gaps, bad_records, is_alignment(path.name), self.keeps_chains)


def file_of(path: Path, content: Content) -> File:
    """A local file and its format, by its name or else its first bytes; FASTA, whose reader says what is wrong, for
    one that neither tells. UserError unless it is a regular file."""
    check_file(path, str(path))
    kind = content.format_of(path.name) or format_of_file(path, content) or "fasta"
    return File(str(path), kind, path.stat().st_size, content)


def columns_of(file: File, wanted: Wanted) -> Columns | None:
    """The columns of a file with some; None of FASTA. UserError if none holds proteins, or one has another type."""
    path = Path(file.path)
    if file.kind == "csv":
        with open_decompressed(path) as stream:
            names = csv_records.read_header(stream, file.path, csv_records.delimiter_of(file.path))
        return wanted.choose(f"{path}: row 0", names)
    if not hasattr(reader_of(file), "schema"):
        return None
    with reporting(file.path):
        schema = reader_of(file).schema(Unit(file))
        chosen = wanted.choose(file.path, schema.names)
        chosen.check(file.path, schema)
        return chosen


def all_columns(paths: Iterable[Path], flags: RecordFlags) -> list[Columns | None]:
    """`columns_of` of all files, so that a wrong one is an error before anything is read. UserError for the flag of a
    column if no file has columns."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: columns_of(file_of(path, flags.content), flags.columns_wanted), paths))
    if (given := [name for name in flags.changing if name.endswith("_column")]) and not any(found):
        raise UserError(f"--{given[0]} {flags.changing[given[0]]}: no file of the input has columns: drop the flag")
    return found


def read_records(
    path: Path,
    cleaner: Cleaner,
    flags: RecordFlags,
    line_ends: bool = False,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Record batches with string columns `id`, `text` and, where the file has one, `cluster` (null: of its own).

    text is ASCII, clean and not empty. cleaner: its `bad_records` is called with the error of each bad record, which
    is left out; line_ends: quoted texts of CSV may have some; on_read: called with the bytes of FASTA read so far.
    UserError, with file and row or line, for a file that is damaged or no table of proteins.
    """
    file = file_of(path, flags.content)
    longest, wanted = flags.max_record_length, flags.columns_wanted
    if file.kind == "csv":
        yield from csv_records.read_rows(path, cleaner, line_ends, longest, wanted)
    elif file.kind == "fasta":
        for lines in read_fasta_lines(path, on_read=on_read, max_record=longest, cleaner=cleaner):
            yield columns(lines)
    else:
        yield from clean_rows(path, _blocks(file, wanted), cleaner, longest)


def _blocks(file: File, wanted: Wanted) -> Blocks:
    """Numbered rows of a format that is neither CSV nor FASTA."""
    row = 1
    if (chosen := columns_of(file, wanted)) is None:
        batches = (pa.RecordBatch.from_arrays([text.cast(pa.binary())], ["text"]) for text in read_rows(Unit(file), 0))
    else:
        unit = Unit(file)
        is_json = file.kind == "json"
        read = _refusing_late_fields(unit, chosen) if is_json else read_batches(unit, chosen.names)
        batches = map(chosen.of, read)
    for batch in batches:
        yield np.arange(row, row + batch.num_rows), batch
        row += batch.num_rows


def _refusing_late_fields(unit: Unit, chosen: Columns) -> Iterator[pa.RecordBatch]:
    """Rows of JSON lines, whose first object decides the columns. UserError for an id or a cluster that it lacks."""
    usual = [*(IDS if chosen.id is None else ()), *(CLUSTERS if chosen.cluster is None else ())]
    absent = [spelled for name in usual for spelled in (name, name.capitalize(), name.upper())]
    row = 1
    for batch in read_batches(unit, [*chosen.names, *absent]):
        for name in absent:
            if (values := batch.column(name)).null_count < len(values):
                first = row + int(pc.index(values.is_valid(), True).as_py())
                raise UserError(
                    f"{unit}: row {first:,} has a field {name}, and the first has none: give it to the first too, as "
                    "null if it is unknown"
                )
        row += batch.num_rows
        yield batch


def read_lines(
    path: Path, cleaner: Cleaner, flags: RecordFlags, with_clusters: bool, on_read: Callable[[int], None]
) -> Iterator[tuple[Lines, int]]:
    """The records of `read_records` as lines, and how many of them have a cluster.

    with_clusters: with a field for the cluster, be it empty. A record whose id is empty or has a tab or line end is a
    bad one.
    """
    file = file_of(path, flags.content)
    if file.kind == "fasta" and not with_clusters:
        for lines in read_fasta_lines(path, on_read=on_read, max_record=flags.max_record_length, cleaner=cleaner):
            yield lines, 0
        return
    for batch in read_records(path, cleaner, flags, on_read=on_read):
        batch = _of_one_line(batch, path, cleaner)
        if batch.num_rows:
            yield lines_of(batch, with_clusters), clustered_rows(batch)


def _of_one_line(batch: pa.RecordBatch, path: Path, cleaner: Cleaner) -> pa.RecordBatch:
    """Without the records whose id or cluster cannot stand in a line."""
    good = np.ones(batch.num_rows, bool)
    for name in {"id", "cluster"} & {*batch.schema.names}:
        values = batch.column(name)
        data, offsets = characters(values)
        if len(data) and data[offsets[0] : offsets[-1]].min(initial=255) < ord(" "):
            good &= ~pc.match_substring_regex(values, r"[\t\r\n]").fill_null(False).to_numpy(zero_copy_only=False)
    good &= np.diff(characters(batch.column("id"))[1]) > 0
    for row in np.flatnonzero(~good).tolist():
        name = batch.column("id")[row].as_py()
        what = f"has a tab or line end in its id or cluster ({name[:60]!r})" if name else "has no id"
        residues = batch.column("text")[row].as_py()
        cleaner.bad_records(UserError(f"{path}: the record {residues[:20]}... {what}: {REMEDY}"))
    return batch if good.all() else batch.filter(pa.array(good))


def require_clusters(given: str, clustered: int) -> None:
    """UserError if no record has a cluster, though there is a column of them. given: the input, for the message."""
    if not clustered:
        raise UserError(
            f"{given}: the column of clusters has no value in any record: name another one by --cluster_column, or "
            "write the table without it"
        )


def clustered_rows(batch: pa.RecordBatch) -> int:
    """Number of records with a cluster."""
    return batch.num_rows - batch.column("cluster").null_count if "cluster" in batch.schema.names else 0
