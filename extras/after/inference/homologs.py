"""Homologs of a protein: read from an alignment, a FASTA file, or the table of a search; their weights.

An alignment (A3M, A2M, or FASTA whose rows are of one length or have gaps) has the query among its rows, anywhere:
it is found by its residues. Lower case in A3M and A2M is an insertion: residues of the row, outside the columns. FASTA
without columns, and tables of hits (.m8, of MMseqs2 or BLAST), do not tell how similar two homologs are: all weigh the
same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from extras.prepare.sources.compression import strip_compression
from extras.prepare.sources.copies import shows
from extras.prepare.sources.fasta import read_fasta, read_fasta_lines
from extras.prepare.sources.hits import COLUMNS, accession, read_hits
from extras.prepare.sources.records import columns
from extras.prepare.sources.residues import Cleaner, is_alignment

logger = logging.getLogger(__name__)
GAP = 0  # in arrays of aligned letters
IS_GAP = np.isin(np.arange(256), list(b"-."))
MOST_ROWS = 10_000  # of an alignment: weights compare each row with each
SIMILAR = (4, 5)  # rows that share 4 of 5 residues share their weight
HITS = ".m8"
PERCENT, MOST_COLUMNS = 100.0, 1e6


class Homologs(NamedTuple):
    """Homologs of one query, in the order of their file.

    residues: upper case, without gaps; weights: float64 [N], see `weights_of`; similarity: float64 [N], the part of
    the query's residues that the homolog has in the same columns; NaN where no alignment tells it.
    """

    residues: list[bytes]
    weights: np.ndarray
    similarity: np.ndarray


def weights_of(rows: np.ndarray) -> np.ndarray:
    """float64 [N] of aligned letters uint8 [N, columns], `GAP` for none: 1 / (rows that have at least 80 % of its
    residues in the same columns, itself included), as the authors of PoET and E1 weigh."""
    by_column = np.ascontiguousarray(rows.T)  # sums along rows of this one are fast
    own = np.count_nonzero(rows, axis=1)
    counts = np.empty(len(rows))
    for number, row in enumerate(rows):
        filled = np.flatnonzero(row)
        shared = (by_column[filled] == row[filled, None]).sum(0, dtype=np.uint16)
        counts[number] = np.count_nonzero(shared.astype(int) * SIMILAR[1] >= own[number] * SIMILAR[0])
    return 1 / counts


def read_homologs(path: Path, query: bytes, given: str = "--homologs") -> Homologs:
    """Those of an alignment or a FASTA file, without rows that show the query's residues
    (extras.prepare.sources.copies), which are counted.

    query: upper case; given: the flag, for messages. UserError for an alignment without the query or with rows of
    unequal length, and for any record that is no protein.
    """
    where, aligned = f"{given} {path}", is_alignment(path.name)
    cleaner = Cleaner(where, "remove", aligned=aligned)
    residues = [text.upper() for _, text in read_fasta(path, cleaner=cleaner)]
    if cleaner.changes.unknown:
        cleaner.report()
    in_columns = [text.upper() for _, text in read_fasta(path, cleaner=Cleaner(where, "keep", aligned=aligned))]
    lengths = {len(text) for text in in_columns}
    if not (aligned or cleaner.changes.gaps or len(lengths) == 1 and query in residues):
        logger.warning(
            "%s: not aligned: all homologs have the same weight, and --max_similarity does not apply: give an .a3m",
            where,
        )
        unknown = np.full(len(residues), np.nan)
        return _others(where, Homologs(residues, np.ones(len(residues)), unknown), query)
    if len(lengths) > 1:
        number = next(n for n, text in enumerate(in_columns) if len(text) != len(in_columns[0]))
        raise UserError(
            f"{where}: row {number + 1} has {len(in_columns[number])} columns, the first {len(in_columns[0])}: "
            f"the rows of an alignment are of one length{'' if aligned else ' (name it .a3m if it is A3M)'}"
        )
    if query not in residues:
        raise UserError(
            f"{where}: no row is the query ({len(query)} residues, {query[:20].decode('latin-1')}...): search with "
            "this protein itself, or add it as a row"
        )
    return _others(where, _of_alignment(where, residues, in_columns, residues.index(query)), query)


def _of_alignment(where: str, residues: list[bytes], in_columns: list[bytes], query: int) -> Homologs:
    """All rows; of more than `MOST_ROWS` a fixed sample with the query."""
    letters = np.frombuffer(b"".join(in_columns), np.uint8).reshape(len(in_columns), -1)
    letters = np.where(IS_GAP[letters], GAP, letters)[:, ~IS_GAP[letters[query]]]
    chosen = np.arange(len(residues))
    if len(residues) > MOST_ROWS:
        logger.info(
            "%s: %s of its %s rows are used, drawn by a fixed seed", where, f"{MOST_ROWS:,}", f"{len(chosen):,}"
        )
        others = np.delete(chosen, query)
        drawn = np.random.default_rng(0).choice(len(others), MOST_ROWS - 1, replace=False)
        chosen = np.sort(np.append(others[drawn], query))
    rows = letters[chosen]
    similarity = (rows == letters[query]).mean(1)
    return Homologs([residues[n] for n in chosen], weights_of(rows), similarity)


def _others(where: str, found: Homologs, query: bytes) -> Homologs:
    """Without the rows that show the query's residues, which a model would copy. One of an alignment is the query."""
    kept = [n for n, text in enumerate(found.residues) if not shows(text, query)]
    counts = (f"{count:,}" for count in (len(kept), len(found.residues) - len(kept)))
    logger.info("%s: %s homologs; left out: %s rows that are, contain or are a part of the query", where, *counts)
    return Homologs([found.residues[n] for n in kept], found.weights[kept], found.similarity[kept])


def is_table(path: Path) -> bool:
    """Whether it is a table of hits, by its name."""
    return strip_compression(path.name.lower()).endswith(HITS)


def hits_of(path: Path) -> dict[str, dict[str, float]]:
    """{query's accession: {target's accession: identical residues}} of a table of hits.

    Identities are fractions, as MMseqs2 writes them, or per cent. Of several hits of a target the one with the most
    identical residues counts.
    """
    where = f"--homologs {path}"
    names: list[tuple[str, str]] = []
    numbers: list[tuple[float, float]] = []
    for line, (query, target, identity, length) in read_hits(path, "--homologs", tuple(COLUMNS)):
        try:
            numbers.append((float(identity), float(length)))
        except ValueError:
            raise UserError(
                f"{where}: line {line:,}: identity {identity[:20]!r} and aligned columns {length[:20]!r} are not both "
                "numbers: use the default columns"
            ) from None
        names.append((query, target))
    identity, length = np.array(numbers).reshape(-1, 2).T
    for what, column, values, most in (
        ("third", "identity (0 to 1, or 0 to 100)", identity, PERCENT),
        ("fourth", "number of aligned columns", length, MOST_COLUMNS),
    ):
        if not ((values >= 0) & (values <= most)).all():
            raise UserError(f"{where}: its {what} column is no {column}: use the default columns")
    identical = identity * length / (PERCENT if identity.max(initial=0) > 1 else 1)
    hits: dict[str, dict[str, float]] = {}
    for (query, target), count in zip(names, identical.tolist(), strict=True):
        of_query = hits.setdefault(query, {})
        of_query[target] = max(count, of_query.get(target, 0.0))
    return hits


def read_targets(fasta: str, targets: Iterable[str]) -> dict[str, bytes]:
    """{accession: residues} of these records of a database. UserError for those that are not in it, and for two of an
    accession that differ."""
    where, wanted = f"--homologs_fasta {fasta}", set(targets)
    found: dict[str, bytes] = {}
    for lines in read_fasta_lines(fasta, cleaner=Cleaner(where)):
        rows = columns(lines)
        names = rows.column("id")
        if pc.any(pc.match_substring(names, "|")).as_py():
            names = pa.array([accession(name) for name in names.to_pylist()])
        chosen = pc.is_in(names, pa.array(sorted(wanted), pa.string()))
        texts = rows.column("text").filter(chosen).to_pylist()
        for name, text in zip(names.filter(chosen).to_pylist(), texts, strict=True):
            residues = text.upper().encode()
            if found.setdefault(name, residues) != residues:
                raise UserError(f"{where}: {name[:40]}: twice, with other residues: rename one, and search again")
    if lacking := sorted(wanted - found.keys()):
        raise UserError(
            f"{where}: {len(lacking):,} hits are not in it, {lacking[0][:40]!r} the first: give the database"
        )
    return found


def of_hits(where: str, hits: dict[str, float], targets: dict[str, bytes], query: bytes) -> Homologs:
    """The homologs of one query. hits, targets: as of `hits_of` and `read_targets`."""
    similarity = np.minimum(np.array(list(hits.values()), np.float64) / len(query), 1.0)
    residues = [targets[name] for name in hits]
    return _others(where, Homologs(residues, np.ones(len(residues)), similarity), query)
