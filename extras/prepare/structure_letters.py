"""3Di letters of proteins (Foldseek, van Kempen et al. 2024), and texts of two letters a residue as SaProt has them.

The letters come from a FASTA file, as Foldseek writes one, or from a directory of PDB and mmCIF files by mini3di.
Where the confidence of a predicted structure (pLDDT, in the column of B-factors) is below LEAST_CONFIDENCE, the letter
is `#`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.cli import UserError, one_line
from common.files.content_hash import combined_hash, content_hash
from extras.after.downstream.structures import polymers_of, structure_files
from extras.families.alphabets.declared import declare
from extras.families.alphabets.saprot import AMINO_ACIDS, STRUCTURES, UNKNOWN
from extras.prepare.sources.alphabet_texts import AlphabetCleaner
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.residues import Cleaner

LEAST_CONFIDENCE = 70.0  # of SaProt
SPECIAL = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>"]
LETTERS = declare({"name": "3di", "tokens": [*SPECIAL, *STRUCTURES.upper(), UNKNOWN], "synonyms": {"X": UNKNOWN}})
INSTALL = "pip install -r requirements-structures.txt, or give a FASTA file of 3Di letters, as Foldseek writes it"
ATOMS = ("CA", "CB", "N", "C")


class StructureLetters:
    """3Di letters by the id of a record. path: a FASTA file of them, or a directory of structures, whose ids are the
    file's name without its ending, and with `_` and the chain's letter."""

    def __init__(self, path: str):
        self.path = path
        if not Path(path).exists():
            raise UserError(f"--structures {path}: no such file or directory")
        self._of = of_structures(path) if Path(path).is_dir() else of_fasta(path)

    def beside(self, rows: pa.RecordBatch, cleaner: Cleaner) -> pa.RecordBatch:
        """Rows of proteins with two letters a residue, `#` for a structure that is not there. A record whose structure
        has another length is a bad one."""
        texts, kept = [], np.ones(rows.num_rows, bool)
        for number, (name, text) in enumerate(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True)):
            letters = self._of.get(name)
            cleaner.changes.without_structure += letters is None
            if letters is not None and len(letters) != len(text):
                kept[number] = False
                lengths = f"{len(text):,} residues, and its structure {len(letters):,} letters"
                cleaner.bad_records(UserError(f"{cleaner.where}: record {name[:60]} has {lengths} (--structures)"))
            texts.append(pair(text, letters or UNKNOWN * len(text)))
        made = rows.set_column(rows.schema.get_field_index("text"), "text", pa.array(texts, pa.string()))
        return made if kept.all() else made.filter(pa.array(kept))

    def check(self, records: int, without: int) -> None:
        """UserError if none of the records has a structure."""
        if without >= records:
            some = ", ".join(list(self._of)[:3])
            raise UserError(f"--structures {self.path}: no record of the input has one of its ids ({some}, ...)")


def structures_hash(path: str) -> str | None:
    """Of a file, or of the structures of a directory; None where there is nothing."""
    if Path(path).is_dir():
        return combined_hash(structure_files(path))
    return content_hash(Path(path)) if Path(path).is_file() else None


def pair(residues: str, letters: str) -> str:
    """`MEK`, `dvp` -> `MdEvKp`; residues other than the 20 amino acids become `#`."""
    known = (residue if residue in AMINO_ACIDS else UNKNOWN for residue in residues.upper())
    return "".join(map("".join, zip(known, letters, strict=True)))


def of_fasta(path: str) -> dict[str, str]:
    """Lower case. UserError for an id that two records have."""
    found: dict[str, str] = {}
    for name, letters in read_fasta(path, cleaner=AlphabetCleaner(f"--structures {path}", LETTERS)):
        if found.setdefault(name.decode(), text := letters.decode().upper().replace("X", UNKNOWN).lower()) is not text:
            raise UserError(f"--structures {path}: two records have the id {name.decode()[:40]!r}")
    return found


def of_structures(directory: str) -> dict[str, str]:
    """By the name of the file, for its first chain, and by NAME_CHAIN. UserError without mini3di."""
    try:
        from mini3di import Encoder
    except ImportError:
        raise UserError(f"--structures {directory}: needs mini3di: {INSTALL}") from None
    found: dict[str, str] = {}
    encoder = Encoder()
    for path in structure_files(directory):
        try:
            for name, residues, places, sequence in polymers_of(path):
                letters = letters_of(encoder, residues, places, len(sequence))
                found[name] = letters
                found.setdefault(name.rpartition("_")[0], letters)
        except (ValueError, RuntimeError, IndexError, OSError, EOFError) as error:
            raise UserError(f"--structures {path}: cannot be read: {one_line(error)[:80]}") from None
    if not found:
        raise UserError(f"--structures {directory}: no protein chain in it")
    return found


def letters_of(encoder: Any, residues: list[Any], places: list[int], length: int) -> str:
    """3Di letters of a chain of `length` residues. residues: gemmi's, those with coordinates, at `places`.

    `#` where one has no coordinates or is not confident.
    """
    atoms = np.full((len(ATOMS), len(residues), 3), np.nan, np.float32)
    sure = np.ones(len(residues), bool)
    predicted = _is_predicted(residues)
    for column, residue in enumerate(residues):
        for row, name in enumerate(ATOMS):
            if (atom := residue.find_atom(name, "*")) is not None:
                atoms[row, column] = atom.pos.tolist()
                sure[column] &= not predicted or atom.b_iso >= LEAST_CONFIDENCE
    text = np.full(length, UNKNOWN)
    if len(residues) > 2:
        states = encoder.encode_atoms(*atoms)
        known = sure & ~np.ma.getmaskarray(states)
        text[np.array(places)[known]] = np.array(list(encoder.build_sequence(states).lower()))[known]
    return "".join(text)


def _is_predicted(residues: list[Any]) -> bool:
    """Whether the B-factors are pLDDT: all atoms of each residue have the same, from 0 to 100."""
    of_residues = [{round(atom.b_iso, 2) for atom in residue} for residue in residues]
    values = [value for of_residue in of_residues for value in of_residue]
    return all(len(each) == 1 for each in of_residues) and 0 < max(values, default=0) <= 100


def with_structures(
    blocks: Iterator[pa.RecordBatch], structures: StructureLetters | None, cleaner: Cleaner
) -> Iterator[pa.RecordBatch]:
    """Blocks of proteins with their structures; as they are without."""
    return blocks if structures is None else (structures.beside(rows, cleaner) for rows in blocks)
