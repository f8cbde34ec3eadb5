"""What the files of a `--dataset` hold, proteins or documents, and in which formats and columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.sources.limits import LONGEST_DOCUMENT, LONGEST_PROTEIN
from common.sources.packed import unpacked_name

FORMATS = {
    "parquet": (".parquet", ".pq"),
    "json": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "fasta": (".fasta", ".fa", ".faa"),
    "text": (".txt",),
}


@dataclass(frozen=True)
class Content:
    """name: plural, for messages; kinds: of FORMATS; columns: one of which holds the texts; line_ends: whether a text
    may go on over them; other_column: what to do where none of the columns is there; longest: bytes of a record."""

    name: str
    kinds: tuple[str, ...]
    columns: tuple[str, ...]
    line_ends: bool
    other_column: str
    longest: int = LONGEST_PROTEIN

    @classmethod
    def from_json(cls, value: dict) -> Content:
        """Of `dataclasses.asdict` in JSON."""
        return cls(**value | {name: tuple(value[name]) for name in ("kinds", "columns")})

    @property
    def suffixes(self) -> str:
        """The names that its files may have, for messages."""
        return ", ".join(suffix for kind in self.kinds for suffix in FORMATS[kind])

    def format_of(self, path: str) -> str | None:
        """The key of FORMATS that a file's name stands for; None for none of its own."""
        name = unpacked_name(path.lower())
        for kind in self.kinds:
            if name.endswith(FORMATS[kind]) and not (kind == "parquet" and name != path.lower()):
                return kind
        return None


PROTEINS = Content(
    "proteins",
    ("parquet", "json", "csv", "fasta"),
    ("sequence", "text"),
    line_ends=False,
    other_column="rename the one that holds the proteins; or if none does, leave the file out by a pattern in place "
    "of a directory ('DIR/*.fasta')",
)


def proteins(longest: int = LONGEST_PROTEIN) -> Content:
    """Proteins, in records of at most so many bytes."""
    return replace(PROTEINS, longest=longest)


def documents(column: str, longest: int = LONGEST_DOCUMENT) -> Content:
    """Text, in a column of that name."""
    return Content(
        "documents",
        ("parquet", "json", "csv", "text"),
        (column,),
        line_ends=True,
        other_column="say which one holds the documents: --text_column",
        longest=longest,
    )
