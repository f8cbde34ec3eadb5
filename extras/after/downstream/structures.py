"""Protein chains with the coordinates of their residues, from PDB and mmCIF files, read by gemmi."""

from __future__ import annotations

import gzip
import hashlib
import logging
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
STEP_ANGSTROM, LONGEST_STEP = 3.8, 4.5  # between C-alphas of neighbours; more than the latter is a gap
WORD = 10  # residues that two chains of one protein have in common, without a gap
SAME = 0.95  # of the shorter chain's residues that are aligned to equal ones, in chains of one protein
CONTACT_ANGSTROM = 8.0
BEYOND_END = re.compile(rb"^END[ \t\r]*$.*?^ATOM", re.MULTILINE | re.DOTALL)  # gemmi stops at END, without a word
# Names of AMBER and CHARMM for states of protonation, and for bridged cysteines.
PROTONATED = {**dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "HIS"), "CYX": "CYS", "CYM": "CYS"}
PROTONATED |= {"ASH": "ASP", "GLH": "GLU", "LYN": "LYS"}
# gemmi raises the first three, IndexError of an empty mmCIF file
UNREADABLE = (ValueError, RuntimeError, IndexError, OSError, EOFError, zlib.error)
SAID = 5  # files that a warning names


@dataclass(frozen=True, eq=False)
class Chain:
    """sequence: one letter a residue, also of those without coordinates; beta: float32 [L, 3] in angstrom, of C-beta
    (glycine: C-alpha) as the file has it, NaN where there is none."""

    name: str
    sequence: str
    beta: np.ndarray

    @property
    def resolved(self) -> int:
        """Residues with coordinates: L of the precision of contacts."""
        return int(np.isfinite(self.beta).all(1).sum())

    @property
    def identity(self) -> str:
        """By content: a hash of the residues that are known, whatever the file's name and the number of gaps."""
        return hashlib.sha256(self.sequence.replace("X", "").encode()).hexdigest()[:16]

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
    """The protein chains of all structures of a directory, sorted by file and chain, each protein once: of its chains
    the one with the most coordinates.

    Skipped chains (unreadable files, other lengths than `SHORTEST` to `LONGEST`, repeated proteins) are logged.
    UserError if there is nothing to read.
    """
    paths = structure_files(directory)
    chains: list[Chain] = []
    skipped: dict[str, list[str]] = {}
    for path in paths:
        try:
            file_chains = list(chains_of(path))
        except UNREADABLE as error:
            reason = one_line(error)[:80] if path.stat().st_size else "it is empty"
            skipped.setdefault("cannot be read", []).append(f"{path.name} ({reason})")
            continue
        if not file_chains:
            skipped.setdefault("has no protein chain", []).append(path.name)
        for chain in file_chains:
            if not SHORTEST <= len(chain.sequence) <= LONGEST:
                reason = f"not of {SHORTEST} to {LONGEST:,} residues"
            elif not chain.resolved >= SHORTEST:
                reason = f"less than {SHORTEST} residues with coordinates"
            else:
                chains.append(chain)
                continue
            skipped.setdefault(reason, []).append(chain.name)
    unique = one_each(chains)
    if repeated := [chain.name for chain in chains if chain not in unique]:
        skipped["the same protein as a chain that is kept"] = repeated
    for reason, names in skipped.items():
        more = f" and {len(names) - SAID} more" if len(names) > SAID else ""
        logger.warning("%s: left out: %s%s: %s", directory, ", ".join(names[:SAID]), more, reason)
    if not chains:
        raise UserError(f"{directory}: no protein chain in {len(paths)} PDB or mmCIF files (.pdb, .ent, .cif, .gz)")
    return unique


def readable_chains(directory: str) -> Iterator[tuple[str, list[Chain]]]:
    """(name, chains) of each structure that can be read; `read_structures` says which cannot."""
    for path in structure_files(directory):
        with suppress(*UNREADABLE):
            yield path.name.split(".")[0], list(chains_of(path))


def structure_files(directory: str) -> list[Path]:
    """Sorted. UserError if there is no such directory."""
    if not Path(directory).is_dir():
        raise UserError(f"{directory}: no such directory: give one with PDB or mmCIF files (.pdb, .ent, .cif, .gz)")
    files = sorted(path for path in Path(directory).iterdir() if not path.name.startswith("."))
    if others := [path.name for path in files if not (_format(path) and path.is_file())]:
        more = f" and {len(others) - SAID} more" if len(others) > SAID else ""
        listed = ", ".join(others[:SAID]) + more
        logger.info("%s: left out, neither .pdb, .ent, .cif nor .mmcif: %s", directory, listed)
    return [path for path in files if _format(path) and path.is_file()]


def one_each(chains: Sequence[Chain]) -> list[Chain]:
    """The chain with the most coordinates of each protein, in the order given.

    Chains of one protein may lack other residues, as those of a homodimer do. Only chains that share a word of `WORD`
    residues, or are equal, are aligned.
    """
    unique: list[Chain] = []
    having: dict[str, set[int]] = {}  # {word: indices in `unique`}
    for chain in sorted(chains, key=lambda chain: -chain.resolved):
        words = {chain.sequence[n : n + WORD] for n in range(len(chain.sequence) - WORD + 1)}
        words = {word for word in words if "X" not in word} | {chain.sequence}
        related = sorted({number for word in words for number in having.get(word, ())})
        if any(_is_same(unique[number].sequence, chain.sequence) for number in related):
            continue
        for word in words:
            having.setdefault(word, set()).add(len(unique))
        unique.append(chain)
    return [chain for chain in chains if chain in unique]


def _is_same(one: str, other: str) -> bool:
    """Whether these are one protein's sequences, some residues of which may be X or missing."""
    import gemmi

    one, other = sorted((text.replace("X", "") for text in (one, other)), key=len)
    return gemmi.align_string_sequences(list(one), list(other), []).match_count >= SAME * len(one)


def _format(path: Path) -> str | None:
    return ENDINGS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def _content(path: Path) -> bytes:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"larger than {LARGEST:,} bytes")
    return content


def chains_of(path: Path) -> Iterator[Chain]:
    """The chains of the first model of a structure. ValueError, RuntimeError or OSError if it cannot be read."""
    for name, residues, places, sequence in polymers_of(path):
        beta = np.full((len(sequence), 3), np.nan, dtype=np.float32)
        for place, residue in zip(places, residues, strict=True):
            if (atom := _beta(residue)) is not None:
                beta[place] = atom.pos.tolist()
        yield Chain(name, sequence, beta)


def polymers_of(path: Path) -> Iterator[tuple[str, list[Any], list[int], str]]:
    """(name, gemmi's residues, the index of each in the sequence, the sequence) of the chains of `chains_of`."""
    import gemmi

    if _format(path) == "Pdb":  # TER ends a chain, whatever letter the next one has
        content = _content(path)
        if BEYOND_END.search(content):
            raise ValueError("it has atoms after END: make a file of each structure")
        structure = gemmi.read_pdb_string(content, split_chain_on_ter=True)
    else:
        structure = gemmi.read_structure_string(_content(path), format=gemmi.CoorFormat.Mmcif)
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
        residues = [residue for residue in polymer if _tabulated(residue.name).is_amino_acid()]
        entity = structure.get_entity_of(polymer)
        sequence, places = _numbered(residues, list(entity.full_sequence) if entity else [])
        yield f"{name}_{chain.name}", residues, places, sequence


def _numbered(residues: list[Any], full: list[str]) -> tuple[str, list[int]]:
    """(the sequence, each residue's index in it). full: names of all residues, by the file; [] if it has none.

    Without it, residues that are missing between two C-alphas too far apart for neighbours are X.
    """
    import gemmi

    if full and all(residue.label_seq is not None and residue.label_seq <= len(full) for residue in residues):
        letters = "".join(_letter(gemmi.Entity.first_mon(name)) for name in full)
        places = [residue.label_seq - 1 for residue in residues]
        if all(letters[place] == _letter(residue.name) for place, residue in zip(places, residues, strict=True)):
            return letters, places
    letters, places = "", []
    for before, residue in zip([None, *residues], residues, strict=False):
        letters += "X" * (_missing(before, residue) if before else 0)
        places.append(len(letters))
        letters += _letter(residue.name)
    return letters, places


def _missing(before: Any, after: Any) -> int:
    """Residues that are missing between two of a file. Numbers jump where nothing is missing (chymotrypsin's,
    antibodies'), so that C-alphas decide; how many follows from the numbers where these fit the distance."""
    by_number = after.seqid.num - before.seqid.num - 1
    if not 0 < by_number <= LONGEST_GAP:
        by_number = 0
    ends = [residue.find_atom("CA", "*") for residue in (before, after)]
    if None in ends:
        return by_number
    distance = ends[0].pos.dist(ends[1].pos)
    if distance <= LONGEST_STEP:
        return 0
    return max(by_number, min(LONGEST_GAP, math.ceil(distance / STEP_ANGSTROM) - 1))


def _letter(name: str) -> str:
    """The one-letter code of a residue, a modified one (MSE) as its parent (M); X if unknown."""
    letter = _tabulated(name).one_letter_code.upper()
    return letter if letter.isalpha() else "X"


def _tabulated(name: str) -> Any:
    import gemmi

    return gemmi.find_tabulated_residue(PROTONATED.get(name, name))


def _beta(residue: Any) -> Any:
    return residue.find_atom("CA" if residue.name == "GLY" else "CB", "*")
