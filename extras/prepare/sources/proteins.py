"""Proteins by id, or one at a time, with the identity that all scripts give a protein: its normalised residues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np

from common.cli import UserError
from common.data import GAPS_HELP, Gaps, Policy
from common.data.alphabet import Alphabet
from common.flags import Flags, flag
from extras.prepare.sources.alphabet_texts import AlphabetCleaner
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.records import BadRecords
from extras.prepare.sources.residues import Cleaner, is_alignment


@dataclass
class ProteinFlags(Flags):
    """What is made of proteins that are not plain residues."""

    group = "proteins"
    unlisted = ("gaps", "on_bad_record")

    gaps: Gaps | None = flag(None, GAPS_HELP, choices=get_args(Gaps))
    on_bad_record: Policy = flag(
        "error", "Stop at a record that is no protein, or skip and count.", choices=get_args(Policy)
    )

    @property
    def given(self) -> dict[str, str]:
        """{flag: value} that differ from the defaults and decide what is read."""
        changed = {"gaps": self.gaps, "on_bad_record": self.on_bad_record}
        return {name: value for name, value in changed.items() if value not in (None, "error")}

    def cleaner(self, where: str, alphabet: Alphabet | None = None) -> Cleaner:
        """The cleaner of a FASTA file or an alignment. where: for messages; it ends with the file's name; alphabet: of
        the texts, if they are no proteins, or of the model, which may read several chains a record."""
        if alphabet is not None and alphabet.declared:
            return AlphabetCleaner(where, alphabet, BadRecords(self.on_bad_record))
        chains = alphabet is not None and bool(alphabet.chains)
        return Cleaner(where, self.gaps, BadRecords(self.on_bad_record), is_alignment(where), chains)


def proteins_of(
    path: str, flags: ProteinFlags | None = None, alphabet: Alphabet | None = None
) -> Iterator[tuple[str, bytes]]:
    """(id, residues) of each record of a FASTA file; nothing is reported. alphabet: as of `ProteinFlags.cleaner`."""
    for name, text in read_fasta(path, cleaner=(flags or ProteinFlags()).cleaner(path, alphabet)):
        yield name.decode(), text


def read_proteins(
    path: str, given: str = "--fasta", flags: ProteinFlags | None = None, alphabet: Alphabet | None = None
) -> dict[str, str]:
    """{id: normalised residues} of a FASTA file; says what was changed. given: its flag, "" for none;
    alphabet: as of `ProteinFlags.cleaner`.

    UserError for an id that two records have.
    """
    where = f"{given} {path}".strip()
    cleaner = (flags or ProteinFlags()).cleaner(where, alphabet)
    proteins: dict[str, str] = {}
    for raw, text in read_fasta(path, cleaner=cleaner):
        if (name := raw.decode()) in proteins:
            raise UserError(f"{where}: two records have the id {name[:40]!r}: rename one, or remove it")
        proteins[name] = text.decode().upper() if alphabet is None or alphabet.ignore_case else text.decode()
    cleaner.report()
    if not proteins:
        raise UserError(f"{where}: no record is a protein")
    return proteins


def read_residues(
    path: str, given: str = "--fasta", flags: ProteinFlags | None = None, alphabet: Alphabet | None = None
) -> dict[str, bytes]:
    """As `read_proteins`, ASCII."""
    return {name: text.encode() for name, text in read_proteins(path, given, flags, alphabet).items()}


def clean_texts(
    texts: Sequence[str], where: str, names: Sequence[str], flags: ProteinFlags | None = None
) -> list[str]:
    """The normalised residues of a table's cells; says what was changed.

    names: of the rows, for messages that begin with `where`. "" for a cell without residues, and for one that is
    skipped; UserError for one that is no protein.
    """
    cells = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, cells)])
    cleaner = (flags or ProteinFlags()).cleaner(where)
    data, ends, _ = cleaner(np.frombuffer(b"".join(cells), np.uint8), offsets, lambda number: names[number])
    cleaner.report()
    residues = data.tobytes().decode().upper()
    return [residues[begin:end] for begin, end in pairwise(ends.tolist())]
