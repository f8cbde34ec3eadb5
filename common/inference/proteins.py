"""A FASTA file of proteins, looked through as a whole before anything is computed from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from common.files.alphabet import BYTE_TO_ID, UNK
from common.files.hashing import hash_bytes
from common.files.records import characters, columns
from common.sources.fasta import read_fasta_lines
from common.sources.residues import check_residues, clean

logger = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts. unknown: characters that are no residues, <unk> to the model; duplicates: ids that came before."""

    proteins: int = 0
    residues: int = 0
    unknown: int = 0
    with_unknown: int = 0
    duplicates: int = 0

    def report(self, where: str) -> None:
        if self.unknown:
            counts = f"{self.unknown:,}", f"{self.with_unknown:,}"
            logger.warning("%s: %s characters in %s proteins are no residues: <unk>", where, *counts)
        if self.duplicates:
            logger.warning("%s: %s ids have come before: each has its row", where, f"{self.duplicates:,}")


def look_through(fasta: str) -> Totals:
    """What is in the file, by the rules that hold for training (common.sources.residues).

    UserError for what `read_fasta_lines` refuses anywhere in the file, and for what is no protein. 8 bytes a protein.
    """
    where = f"--fasta {fasta}"
    totals, ids = Totals(), []
    for lines in read_fasta_lines(fasta):
        rows = columns(lines)
        data, offsets = clean(*characters(rows.column("text")), where)
        unknown = np.add.reduceat(BYTE_TO_ID[data] == UNK, offsets[:-1], dtype=np.int64)  # no text is empty
        totals.proteins += rows.num_rows
        totals.residues += len(data)
        totals.unknown += int(unknown.sum())
        totals.with_unknown += int(np.count_nonzero(unknown))
        ids.append(hash_bytes(*characters(rows.column("id"))))
    check_residues(where, totals.unknown, totals.residues)
    totals.duplicates = totals.proteins - len(np.unique(np.concatenate(ids)))
    return totals
