"""What proteins from an encoder begin as: all masks, of some length, or templates of which residues stay."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.cli import UserError
from common.data.counter_rng import derive_key, hash_counters, scale
from common.data.token_store import open_split
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.after.generation.draws import LENGTH
from extras.after.generation.flags import UnmaskFlags
from extras.prepare.sources.proteins import ProteinFlags, proteins_of, read_residues

logger = logging.getLogger(__name__)
FILLED = ord("X")  # in a template without --fix
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class Template(NamedTuple):
    """A protein to begin with. number: of template and sample; residues: X where nothing is known; is_free: bool
    [length], what is generated."""

    name: str
    number: tuple[int, int]
    residues: bytes
    is_free: np.ndarray


def templates(flags: UnmaskFlags, proteins: ProteinFlags, samples: int, seed: int, most: int) -> Iterator[Template]:
    """What every protein begins as, in order. most: the residues that the model reads. UserError for a bad template,
    and for a length above that."""
    if flags.fasta is not None:
        yield from _of_fasta(flags.fasta, flags.fix, proteins, samples, most)
        return
    lengths = _lengths(flags, proteins, samples, seed, most)
    for number, length in enumerate(lengths):
        yield Template(f"sample_{number + 1}", (0, number), b"X" * length, np.ones(length, bool))


def _lengths(flags: UnmaskFlags, proteins: ProteinFlags, samples: int, seed: int, most: int) -> list[int]:
    if flags.length_from is None:
        assert flags.length is not None
        _check_length(flags.length, most, f"--length {flags.length}")
        return [flags.length] * samples
    if Path(flags.length_from).is_dir():
        store = open_split(flags.length_from, "train", ESM2_TOKENS)
        if store.has_chains:
            raise UserError(f"--length_from {flags.length_from}: its records may have several chains: give others")
        known = store.lengths(np.arange(len(store))) - ESM2_TOKENS.num_special
    else:
        known = np.array([len(residues) for _, residues in proteins_of(flags.length_from, proteins)])
    is_read = known <= most
    if not is_read.any():
        raise UserError(f"--length_from {flags.length_from}: no protein of at most {most:,} residues")
    if longer := int((~is_read).sum()):
        logger.warning(
            "--length_from %s: %s proteins of more than %s residues are left out",
            flags.length_from,
            f"{longer:,}",
            f"{most:,}",
        )
    known = known[is_read]
    drawn = scale(hash_counters(derive_key(seed, LENGTH), np.arange(samples)), len(known))
    return known[drawn].tolist()


def _of_fasta(path: str, fix: str | None, flags: ProteinFlags, samples: int, most: int) -> Iterator[Template]:
    for place, (name, residues) in enumerate(read_residues(path, flags=flags).items()):
        where = f"--fasta {path}: {name[:40]}"
        _check_length(len(residues), most, where)
        letters = np.frombuffer(residues, np.uint8)
        is_free = letters == FILLED
        if fix is not None:
            stays = fixed(fix, len(residues), where)
            if (unknown := np.flatnonzero(stays & is_free)).size:
                raise UserError(f"{where}: residue {unknown[0] + 1} is X and cannot stay: leave it out of --fix")
            is_free = ~stays
        if not is_free.any():
            raise UserError(f"{where}: every residue stays: write X for those to generate, or give --fix")
        for number in range(samples):
            yield Template(f"{name}_{number + 1}", (place, number), residues, is_free)


def _check_length(length: int, most: int, where: str) -> None:
    if length > most:
        raise UserError(f"{where}: {length:,} residues, and at most {most:,} are generated: shorten it")


def fixed(text: str, length: int, where: str) -> np.ndarray:
    """bool [length], true in the ranges of `10-45,60`, counted from 1. UserError, which begins with `where`, for
    anything else."""
    stays = np.zeros(length, bool)
    for word in text.split(","):
        if (match := RANGE.fullmatch(word.strip())) is None:
            raise UserError(f"--fix {text}: {word.strip()[:40]!r} is no range: expected, say, 10-45,60")
        first = int(match[1])
        last = int(match[2] or first)
        if not 1 <= first <= last <= length:
            raise UserError(f"{where} has residues 1 to {length}: --fix {match[0]} is not among them")
        stays[first - 1 : last] = True
    return stays
