"""Protein chains with the coordinates of their residues, from PDB and mmCIF files, read by gemmi."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.cli import UserError, one_line
from common.models.esm2.alphabet import encode

logger = logging.getLogger(__name__)
ENDINGS = {".pdb": "Pdb", ".ent": "Pdb", ".cif": "Mmcif", ".mmcif": "Mmcif"}  # gemmi.CoorFormat
LARGEST = 1 << 30  # bytes of a file, decompressed
SHORTEST, LONGEST = 20, 1022  # residues of a chain; ESM-2 was trained on 1,022
LONGEST_GAP = 100  # residues that a jump in the numbering may stand for
CONTACT_ANGSTROM = 8.0
SAID = 5  # files that a warning names


@dataclass(frozen=True)
class Chain:
    """sequence: one letter a residue, also of those without coordinates; beta: float32 [L, 3] in angstrom, of C-beta
    (glycine: C-alpha), NaN where there is none."""

    name: str
    sequence: str
    beta: np.ndarray

    @property
    def ids(self) -> np.ndarray:
        """Token ids uint8 [L + 2]."""
        return encode(self.sequence)

    def contacts(self) -> tuple[np.ndarray, np.ndarray]:
        """(whether two residues are in contact, whether that is known): bool [L, L]."""
        distances = np.linalg.norm(self.beta[:, None] - self.beta[None], axis=-1)
        known = np.isfinite(distances)
        return known & (np.where(known, distances, np.inf) < CONTACT_ANGSTROM), known


def read_structures(directory: str) -> list[Chain]:
    """The protein chains of all structures of a directory, sorted by file and chain, each sequence once.

    Skipped chains (unreadable files, other lengths than `SHORTEST` to `LONGEST`, repeated sequences) are logged.
    UserError if there is nothing to read.
    """
    if not Path(directory).is_dir():
        raise UserError(f"{directory}: no such directory: give one with PDB or mmCIF files (.pdb, .ent, .cif, .gz)")
    paths = sorted(path for path in Path(directory).iterdir() if _format(path) and path.is_file())
    chains: dict[str, Chain] = {}
    skipped: dict[str, list[str]] = {}
    for path in paths:
        try:
            found = list(chains_of(path))
        except (ValueError, RuntimeError, OSError, EOFError, zlib.error) as error:  # gemmi raises the first two
            skipped.setdefault("cannot be read", []).append(f"{path.name} ({one_line(error)[:80]})")
            continue
        if not found:
            skipped.setdefault("has no protein chain", []).append(path.name)
        for chain in found:
            if not SHORTEST <= len(chain.sequence) <= LONGEST:
                reason = f"not of {SHORTEST} to {LONGEST:,} residues"
            elif not np.isfinite(chain.beta).all(1).sum() >= SHORTEST:
                reason = f"less than {SHORTEST} residues with coordinates"
            elif chain.sequence in chains:
                reason = "sequence seen already"
            else:
                chains[chain.sequence] = chain
                continue
            skipped.setdefault(reason, []).append(chain.name)
    for reason, names in skipped.items():
        more = f" and {len(names) - SAID} more" if len(names) > SAID else ""
        logger.warning("%s: left out: %s%s: %s", directory, ", ".join(names[:SAID]), more, reason)
    if not chains:
        raise UserError(f"{directory}: no protein chain in {len(paths)} PDB or mmCIF files (.pdb, .ent, .cif, .gz)")
    return list(chains.values())


def _format(path: Path) -> str | None:
    return ENDINGS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def _content(path: Path) -> bytes:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"larger than {LARGEST:,} bytes")
    return content


def chains_of(path: Path) -> Iterator[Chain]:
    """Of the first model of a structure. ValueError, RuntimeError or OSError if it cannot be read."""
    import gemmi

    structure = gemmi.read_structure_string(_content(path), format=getattr(gemmi.CoorFormat, str(_format(path))))
    if not len(structure):
        return
    structure.setup_entities()
    structure.assign_label_seq_id()
    structure.remove_alternative_conformations()
    name = path.name.split(".")[0]
    for chain in structure[0]:
        polymer = chain.get_polymer()
        if polymer.check_polymer_type() not in (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD):
            continue
        residues = [residue for residue in polymer if gemmi.find_tabulated_residue(residue.name).is_amino_acid()]
        entity = structure.get_entity_of(polymer)
        sequence, places = _numbered(residues, list(entity.full_sequence) if entity else [])
        beta = np.full((len(sequence), 3), np.nan, dtype=np.float32)
        for place, residue in zip(places, residues, strict=True):
            if (atom := _beta(residue)) is not None:
                beta[place] = atom.pos.tolist()
        yield Chain(f"{name}_{chain.name}", sequence, beta)


def _numbered(residues: list[Any], full: list[str]) -> tuple[str, list[int]]:
    """(the sequence, each residue's index in it). full: names of all residues, by the file; [] if it has none.

    Without it, residues that the numbering leaves out are X.
    """
    import gemmi

    if full and all(residue.label_seq is not None and residue.label_seq <= len(full) for residue in residues):
        letters = "".join(_letter(gemmi.Entity.first_mon(name)) for name in full)
        places = [residue.label_seq - 1 for residue in residues]
        if all(letters[place] == _letter(residue.name) for place, residue in zip(places, residues, strict=True)):
            return letters, places
    letters, places, last = "", [], None
    for residue in residues:
        number = residue.seqid.num
        missing = number - last - 1 if last is not None else 0
        letters += "X" * (missing if 0 < missing <= LONGEST_GAP else 0)
        places.append(len(letters))
        letters, last = letters + _letter(residue.name), number
    return letters, places


def _letter(name: str) -> str:
    """Of a residue, modified ones (MSE) as what they were made from (M); X if unknown."""
    import gemmi

    letter = gemmi.find_tabulated_residue(name).one_letter_code.upper()
    return letter if letter.isalpha() else "X"


def _beta(residue: Any) -> Any:
    return residue.find_atom("CA" if residue.name == "GLY" else "CB", "*")
