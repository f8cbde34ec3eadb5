"""The formats of `--dataset` files, and what they may hold: proteins or documents.

The name of a file decides its format; of proteins also its first bytes, where the name says nothing.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from common.cli import UserError
from common.data import Gaps, Policy
from extras.prepare.sources.compression import (
    DECOMPRESS_ERRORS,
    HEAD_BYTES,
    LONGEST_DOCUMENT,
    LONGEST_PROTEIN,
    open_decompressed,
    strip_compression,
)
from extras.prepare.sources.record_columns import column_named
from extras.prepare.sources.residues import ALIGNMENTS

# Ends of names that are not taken by content: editors' copies, and NCBI's nucleotides.
NOT_BY_CONTENT = ("~", ".bak", ".orig", ".old", ".tmp", ".swp", ".fna", ".ffn", ".frn")
INFO_BYTES = 1 << 16  # a .json below may be dataset_infos.json


class Format(NamedTuple):
    """suffixes: of its files' names; contents: what they may hold (`Content.name`); module: reads them.

    A module defines `texts(unit)`, which yields the texts of a file as Arrow arrays from the first row to the last,
    and `column(unit)`, which checks the beginning of a file and gives the name of its column of texts, or None. It may
    define `records(file)`, the records of a file, exact or estimated (`record_counts.estimated`): without it one a
    line; and `row_counts(file)`, the rows of each part that can be read alone (`unit.row_group`). For steps 0 and 1, a
    format with columns defines `schema(unit)`, their names and types, and `rows(unit, names)`, which yields record
    batches of some of them; without it records are numbered.
    """

    suffixes: tuple[str, ...]
    contents: tuple[str, ...]
    module: str


FASTA = (".fasta", ".fa", ".faa", ".fas", ".fsa", ".pep", ".seq", *ALIGNMENTS)
FORMATS = {
    "parquet": Format((".parquet", ".pq"), ("proteins", "documents"), "extras.prepare.sources.parquet_texts"),
    "arrow": Format((".arrow", ".feather", ".ipc"), ("proteins",), "extras.prepare.sources.arrow_texts"),
    "json": Format((".jsonl", ".ndjson", ".json"), ("proteins", "documents"), "extras.prepare.sources.json_texts"),
    "csv": Format((".csv", ".tsv"), ("proteins", "documents"), "extras.prepare.sources.csv_texts"),
    "fasta": Format(FASTA, ("proteins",), "extras.prepare.sources.fasta_texts"),
    "text": Format((".txt",), ("documents",), "extras.prepare.sources.plain_text"),
}


@dataclass(frozen=True)
class Content:
    """What files contain: proteins or documents.

    name: plural, for messages; columns: possible names of the column of texts; line_ends: whether a text may contain
    them; other_column: advice if no column has such a name; longest: bytes of a record; gaps, on_bad_record, chains:
    of proteins, as of extras.prepare.sources.residues.Cleaner; alphabet: what declares that of the texts (JSON), ""
    for proteins.
    """

    name: str
    columns: tuple[str, ...]
    line_ends: bool
    other_column: str
    longest: int = LONGEST_PROTEIN
    gaps: Gaps | None = None
    on_bad_record: Policy = "error"
    alphabet: str = ""
    chains: bool = False

    @classmethod
    def from_json(cls, value: dict) -> Content:
        """From `dataclasses.asdict` after JSON."""
        return cls(**value | {"columns": tuple(value["columns"])})

    @property
    def formats(self) -> dict[str, Format]:
        """The formats that may hold this content, by name."""
        return {kind: each for kind, each in FORMATS.items() if self.name in each.contents}

    @property
    def suffixes(self) -> str:
        """Possible suffixes of its files, for messages."""
        return ", ".join(suffix for each in self.formats.values() for suffix in each.suffixes)

    def format_of(self, path: str) -> str | None:
        """The key of FORMATS for a file name; None if it is not one of `formats`."""
        name = strip_compression(path.lower())
        for kind, each in self.formats.items():
            if name.endswith(each.suffixes) and not (kind == "parquet" and name != path.lower()):
                return kind
        return None


PROTEINS = Content(
    "proteins",
    ("sequence", "text"),
    line_ends=False,
    other_column="rename the one that holds the proteins; or if none does, leave the file out by a pattern in place "
    "of a directory ('DIR/*.fasta')",
)


def proteins(
    longest: int = LONGEST_PROTEIN,
    gaps: Gaps | None = None,
    on_bad_record: Policy = "error",
    alphabet: str = "",
    chains: bool = False,
) -> Content:
    """Proteins, in records of at most `longest` bytes; or texts of a declared alphabet."""
    return replace(PROTEINS, longest=longest, gaps=gaps, on_bad_record=on_bad_record, alphabet=alphabet, chains=chains)


def documents(column: str, longest: int = LONGEST_DOCUMENT) -> Content:
    """Text in the column `column`."""
    return Content(
        "documents",
        (column,),
        line_ends=True,
        other_column="name the column of the documents: --text_column",
        longest=longest,
    )


def format_of_file(path: Path, content: Content) -> str | None:
    """The key of FORMATS of a local file, by its name; of proteins also by its first bytes. None: something else."""
    kind = content.format_of(path.name)
    if content.name != PROTEINS.name or not path.is_file():
        return kind
    if not path.stat().st_size:
        return None
    if path.name.lower().endswith(".json") and path.stat().st_size < INFO_BYTES:
        return kind if _has_column(path, content) else None
    if kind is None and not strip_compression(path.name.lower()).endswith(NOT_BY_CONTENT):
        head = b""
        with suppress(UserError, OSError, *DECOMPRESS_ERRORS), open_decompressed(path) as file:
            head = file.read(HEAD_BYTES).lstrip()
        kinds = {rb"PAR1": "parquet", rb"ARROW1": "arrow", rb">\S": "fasta"}
        kind = next((name for start, name in kinds.items() if re.match(start, head)), None)
    return kind


def _has_column(path: Path, content: Content) -> bool:
    """Whether the first line of a small file of JSON lines has a column of texts: dataset_infos.json has none."""
    with suppress(UserError, ValueError, RecursionError, OSError, *DECOMPRESS_ERRORS), open_decompressed(path) as file:
        first = json.loads(file.readline(INFO_BYTES))
        return isinstance(first, dict) and column_named([*first], content.columns) is not None
    return True  # damaged: its reader says how
