"""A table of clusters for step 1's --cluster_table, from UniProt's own files.

    python -m extras.prepare.cluster_table OUT.parquet --uniref_xml uniref90.xml.gz
    python -m extras.prepare.cluster_table OUT.parquet --idmapping idmapping_selected.tab.gz

OUT.parquet has the columns ur50_id and ur90_id, each UniRef90 cluster once. An XML file of UniRef50, UniRef90 or
UniRef100 names every cluster of its release. The mapping of ids has UniProtKB's entries alone: UniRef90 clusters
without one (UniRef90_UPI..., and most of isoforms) are not in it. The headers of UniRef's FASTA files name no other
cluster than their own. Take both files from the same release as the proteins: clusters change with each.

The input is read once, with some 50 bytes a row on the disk beside OUT for a while. A run that is stopped leaves
nothing.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.lib.format import open_memmap

from common.cli import UserError, log_every, one_line, run
from common.files.safe_files import replace_flushed
from common.flags import Flags, flag, parse_arguments
from extras.prepare.cluster_splits import COLUMNS
from extras.prepare.output_directory import lock, release
from extras.prepare.sources.compression import STRADDLING, open_decompressed
from extras.prepare.sources.records import hash_names
from extras.prepare.splits import Buckets

logger = logging.getLogger(__name__)
LEVELS = ("50", "90")  # of COLUMNS
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
# README of UniProt's knowledgebase/idmapping: 22 columns, of which the 9th is UniRef90, the 10th UniRef50.
IDMAPPING_COLUMNS = 22
IDMAPPING = {"ur50_id": "10", "ur90_id": "9"}
BLOCK_BYTES = 32 << 20  # of the mapping: longest row
PROPERTIES = {"UniRef50 ID": "UniRef50", "UniRef90 ID": "UniRef90"}  # of a dbReference
XML_BYTES = 4 << 20  # read at a time


@dataclass
class Arguments(Flags):
    idmapping: str | None = flag(None, "UniProt's idmapping_selected.tab, plain or compressed")
    uniref_xml: str | None = flag(None, "uniref90.xml, or that of UniRef50 or UniRef100, plain or compressed")
    overwrite: bool = flag(False, "replace an existing table")

    def check(self) -> None:
        if (self.idmapping is None) == (self.uniref_xml is None):
            raise UserError("--uniref_xml or --idmapping: give one of them, a file of the release of your proteins")


@dataclass
class Counted:
    """rows: lines of the mapping, or members in the XML; without: of these, without one of the two clusters."""

    rows: int = 0
    without: int = 0


def read_idmapping(path: Path, counted: Counted) -> Iterator[pa.RecordBatch]:
    """Rows of SCHEMA of idmapping_selected.tab. UserError if it is none."""
    with open_decompressed(path) as stream:
        first = stream.readline(BLOCK_BYTES).rstrip(b"\r\n").split(b"\t")
    if len(first) != IDMAPPING_COLUMNS:
        raise UserError(
            f"{path}: its first line has {len(first)} columns separated by tabs: expected the {IDMAPPING_COLUMNS} of "
            "idmapping_selected.tab (not idmapping.dat)"
        )
    names = [str(number) for number in range(1, IDMAPPING_COLUMNS + 1)]
    with open_decompressed(path) as stream:
        read = pa.csv.ReadOptions(block_size=BLOCK_BYTES, column_names=names)
        parse = pa.csv.ParseOptions(delimiter="\t", quote_char=False)
        wanted = [IDMAPPING[name] for name in COLUMNS]
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted, strings_can_be_null=False
        )
        try:
            with pa.csv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert) as reader:
                for batch in reader:
                    yield from _named(batch.columns, path, counted)
        except pa.ArrowInvalid as error:
            what = f"a row of more than {BLOCK_BYTES:,} bytes" if STRADDLING in str(error) else one_line(error)[:200]
            raise UserError(f"{path}: after row {counted.rows:,}: {what}: fetch it again") from None


def _named(columns: list[pa.Array], path: Path, counted: Counted) -> Iterator[pa.RecordBatch]:
    """The rows that name both clusters. UserError for a name that is not of its level."""
    present = pa.array(np.ones(len(columns[0]), bool))
    for level, names in zip(LEVELS, columns, strict=True):
        is_there = pc.not_equal(names, "")
        good = pc.match_substring_regex(names, rf"^UniRef{level}_[^\s;]+$")
        if bad := np.flatnonzero(pc.and_not(is_there, good)).tolist():
            row, name = counted.rows + bad[0] + 1, names[bad[0]].as_py()
            raise UserError(f"{path}: row {row:,}: {name[:80]!r}: expected UniRef{level}_... or nothing")
        present = pc.and_(present, is_there)
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA).filter(present)
    counted.rows += len(present)
    counted.without += len(present) - rows.num_rows
    yield rows


class UniRefParser:
    """Collects the (UniRef50, UniRef90) clusters of each member of an XML file of UniRef, as far as it names them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str | None, str | None]] = []
        self._of_entry: dict[str, str] = {}
        self._of_member: dict[str, str] = {}
        self._root = ""
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end

    def feed(self, block: bytes) -> None:
        """An empty block ends the file. expat.ExpatError, or ValueError if it is not UniRef's."""
        self._parser.Parse(block, not block)

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        if not self._root:
            self._root = element
            if element not in ("UniRef50", "UniRef90", "UniRef100"):
                raise ValueError(f"its root is <{element[:80]}>: expected <UniRef50>, <UniRef90> or <UniRef100>")
        elif element == "property" and (level := PROPERTIES.get(attributes["type"])):
            self._of_member[level] = attributes["value"]
        elif element == "dbReference":
            self._of_member = dict(self._of_entry)
        elif element == "entry":
            if not attributes["id"].startswith(f"{self._root}_"):
                raise ValueError(f"an entry is called {attributes['id'][:80]!r}: expected {self._root}_...")
            self._of_entry = {self._root: attributes["id"]}

    def _end(self, element: str) -> None:
        if element == "dbReference":
            self.pairs.append((self._of_member.get("UniRef50"), self._of_member.get("UniRef90")))


def read_uniref_xml(path: Path, counted: Counted) -> Iterator[pa.RecordBatch]:
    """Rows of SCHEMA of an XML file of UniRef, one a member. UserError if it is none, or ends early."""
    parser, block = UniRefParser(), b"<"
    with open_decompressed(path) as stream:
        while block:
            block = stream.read(XML_BYTES)
            try:
                parser.feed(block)
            except (expat.ExpatError, ValueError, KeyError) as error:
                raise UserError(f"{path}: no whole XML file of UniRef: {one_line(error)[:200]}") from None
            pairs = [pair for pair in parser.pairs if None not in pair]
            counted.rows += len(parser.pairs)
            counted.without += len(parser.pairs) - len(pairs)
            parser.pairs = []
            if pairs:
                yield pa.RecordBatch.from_arrays(
                    [pa.array(names) for names in zip(*pairs, strict=True)], schema=SCHEMA
                )


@dataclass
class Rows:
    """Rows of SCHEMA on the disk, and hashes of their names; `kept` has each member once."""

    scratch: Path
    count: int = 0
    members: Buckets = field(init=False)

    def __post_init__(self) -> None:
        self.members = Buckets(self.scratch / "members")

    @property
    def path(self) -> Path:
        return self.scratch / "rows.parquet"

    def write(self, batches: Iterator[pa.RecordBatch]) -> None:
        with _writer(self.path) as writer, open(self.scratch / "clusters", "wb") as clusters:
            for batch in batches:
                writer.write_batch(batch)
                hash_names(batch.column("ur50_id")).tofile(clusters)
                numbers = np.arange(self.count, self.count + batch.num_rows)
                self.members.add(hash_names(batch.column("ur90_id")), numbers)
                self.count += batch.num_rows
        self.members.flush()

    def first_of_members(self) -> tuple[np.ndarray, int, int]:
        """The first row of each member, bool [rows]; numbers of members with two clusters, and of clusters."""
        clusters = np.memmap(self.scratch / "clusters", np.uint64, "r", shape=(self.count,))
        kept = open_memmap(self.scratch / "kept.npy", "w+", bool, (self.count,))
        of_clusters, in_two = Buckets(self.scratch / "of_clusters"), 0
        for members, rows in self.members:
            order = np.argsort(members, kind="stable")  # rows are in their order
            members, rows = members[order], rows[order].astype(np.int64)
            is_first = np.diff(members, prepend=members[:1] ^ np.uint64(1)) != 0
            kept[rows[is_first]] = True
            group = np.cumsum(is_first) - 1
            differs = clusters[rows] != clusters[rows[is_first]][group]
            in_two += len(np.unique(group[differs]))
            of_clusters.add(clusters[rows[is_first]], rows[is_first])
        of_clusters.flush()
        return kept, in_two, sum(len(np.unique(names)) for names, _ in of_clusters)

    def filtered(self, kept: np.ndarray) -> Iterator[pa.RecordBatch]:
        first = 0
        with pa.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches():
                yield batch.filter(pa.array(kept[first : first + batch.num_rows]))
                first += batch.num_rows


def _writer(path: Path) -> pa.parquet.ParquetWriter:
    return pa.parquet.ParquetWriter(path, SCHEMA, compression="zstd")


def write_table(out: Path, args: Arguments, scratch: Path) -> None:
    """Make `out`, complete, and say in one line what is in it. scratch: an empty directory on the same file system."""
    counted = Counted()
    source = Path(args.idmapping or args.uniref_xml or "")
    read = read_idmapping if args.idmapping else read_uniref_xml
    rows = Rows(scratch)
    with log_every(f"Reading {source}"):
        rows.write(read(source, counted))
    if not rows.count:
        raise UserError(f"{source}: none of its {counted.rows:,} rows names a UniRef50 and a UniRef90 cluster")
    kept, in_two, clusters = rows.first_of_members()
    with replace_flushed(out) as made, _writer(made) as writer:
        for batch in rows.filtered(kept):
            writer.write_batch(batch)
    logger.info(
        "%s: %s rows; %s without a UniRef50 and a UniRef90 cluster; %s members in %s clusters; %s members in two "
        "clusters, of which the first counts",
        *(out, *(f"{number:,}" for number in (counted.rows, counted.without, int(kept.sum()), clusters, in_two))),
    )


def main() -> None:
    usage = "python -m extras.prepare.cluster_table OUT.parquet --uniref_xml FILE (or --idmapping FILE)"
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help", "--help_all"):
        raise UserError(f"give the table to write first: {usage}")
    first, *words = sys.argv[1:]
    args = parse_arguments(__doc__, Arguments, [first] if first.startswith("-") else words, program=usage)
    out = Path(first)
    if out.exists() and not args.overwrite:
        raise UserError(f"{out}: there is a file already: give --overwrite to replace it, or another name")
    scratch = out.with_name(f".{out.name}.building")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}: choose a directory you can write to") from None
    handle = lock(scratch, flag="OUT.parquet")
    try:
        shutil.rmtree(scratch / "work", ignore_errors=True)  # of a run that was killed
        (scratch / "work").mkdir()
        write_table(out, args, scratch / "work")
    finally:
        shutil.rmtree(scratch)
        release(handle)


if __name__ == "__main__":
    run(main)
