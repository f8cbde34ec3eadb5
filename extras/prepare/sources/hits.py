"""Tables of a search's hits: of MMseqs2, DIAMOND and BLAST (-outfmt 6), tab-separated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.cli import UserError
from extras.prepare.sources.compression import HEAD_BYTES, detect_non_text, open_decompressed

# Where a column is without a header, and what MMseqs2's --format-mode 4 and DIAMOND call it.
COLUMNS = {
    "query": (0, ("query", "qseqid")),
    "target": (1, ("target", "sseqid")),
    "identity": (2, ("fident", "pident")),
    "aligned columns": (3, ("alnlen", "length")),
}
# Which part of a name, between |, MMseqs2 takes for the protein's, by the name's first part (Util::parseFastaHeader).
PARTS = dict.fromkeys(("cl", "sp", "tr", "gb", "ref", "pdb", "bbs", "lcl"), 1)
PARTS |= dict.fromkeys(("pir", "prf", "gnl", "pat"), 2) | {"gi": 3}


def accession(name: str) -> str:
    """MMseqs2's name of a protein: the accession of `sp|P12345|NAME`, other names as they are."""
    parts = name.split("|")
    place = PARTS.get(parts[0], 0)
    return parts[place] if 0 < place < len(parts) else name


def read_hits(path: Path, given: str, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, its cells in these columns of `COLUMNS`) of each hit; names are accessions.

    Lines of comment and empty ones are left out. given: the flag, for messages. UserError for other files.
    """
    where, places, begun = f"{given} {path}", [COLUMNS[name][0] for name in wanted], False
    with open_decompressed(path) as file:
        if what := detect_non_text(file.peek(HEAD_BYTES)[:HEAD_BYTES]):
            raise UserError(f"{where}: {what}")
        for number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if not line or line.startswith("#"):
                continue
            words = line.split("\t")
            if not begun and (found := _places(words, wanted)):
                places = found
            elif max(places) < len(words) and all(words[place].split() for place in places):
                cells = [words[place].split()[0] for place in places]
                yield number, [accession(cell) if place < 2 else cell for place, cell in enumerate(cells)]
            else:
                raise UserError(
                    f"{where}: line {number:,}: {line[:60]!r}: expected {', '.join(wanted[:-1])} and {wanted[-1]}, "
                    "separated by tabs, as MMseqs2 and BLAST (-outfmt 6) write them"
                )
            begun = True


def _places(words: list[str], wanted: tuple[str, ...]) -> list[int]:
    """Where a header has these columns; [] if it is no header of them."""
    names = [{*COLUMNS[name][1]} & {*words} for name in wanted]
    return [words.index(found.pop()) for found in names] if all(names) else []
