"""Held-out losses of single proteins, their mean with an error over proteins, and the file that keeps them.

`<split>_losses.parquet` has a row a held-out protein, in the order of the split: 12 bytes for its loss and the number
of its hidden residues, so that two runs can be compared protein by protein (extras/compare/).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files.safe_files import replace_flushed


@dataclass(frozen=True)
class ProteinLosses:
    """The losses of n held-out proteins, in the order of their store.

    loss_sum: float64 [n], nats over the hidden residues; masked: int32 [n], their number; clusters: int64 [n], the
    cluster of each, None where the data have none; questions: a hash (hex) of what was asked, "" if unknown.
    """

    loss_sum: np.ndarray
    masked: np.ndarray
    clusters: np.ndarray | None = None
    questions: str = field(default="", kw_only=True)

    def below(self, baseline: np.ndarray) -> tuple[float, float]:
        """How far the mean loss of a hidden residue is below a baseline's, and the standard error, as
        `mean_and_error`. baseline: float64 [n], its losses."""
        return mean_and_error(baseline - self.loss_sum, self.masked, self.clusters)


class Evaluation(NamedTuple):
    """A held-out split's results by name, {} if the run was stopped meanwhile (on all ranks), and the losses of its
    proteins (text: None)."""

    results: dict[str, Any]
    losses: ProteinLosses | None = None


def mean_and_error(
    differences: np.ndarray, counts: np.ndarray, clusters: np.ndarray | None = None
) -> tuple[float, float]:
    """The mean of a difference per residue, and its standard error over proteins, or over clusters of them.

    differences: float64 [n], summed over the residues of each protein; counts: [n], these residues; clusters: int [n].
    A ratio of sums over units that vary together (Cochran 1977, Sampling Techniques, 6.4): with r = sum d / sum n,
    the error is sqrt(m / (m - 1) sum (d - r n)^2) / sum n over m units that have a residue. NaN without a residue;
    the error is NaN for a single unit.
    """
    asked = counts > 0
    d, n = differences[asked].astype(np.float64), counts[asked].astype(np.float64)
    if clusters is not None:
        _, unit = np.unique(clusters[asked], return_inverse=True)
        d, n = np.bincount(unit, d), np.bincount(unit, n)
    if not len(n):
        return math.nan, math.nan
    mean, units = d.sum() / n.sum(), len(n)
    if units == 1:
        return float(mean), math.nan
    return float(mean), math.sqrt(units / (units - 1) * ((d - mean * n) ** 2).sum()) / n.sum()


def hash_of_questions(hashes: np.ndarray) -> str:
    """One hash of those of all proteins, uint64 [n], in their order."""
    return hashlib.sha256(np.ascontiguousarray(hashes, dtype="<u8").tobytes()).hexdigest()


def write_losses(path: Path, losses: ProteinLosses, step: int) -> None:
    """Write a Parquet file, complete or not at all. step: of the run, after which these are its losses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, np.ndarray] = {
        "loss_sum": losses.loss_sum.astype(np.float64),
        "masked": losses.masked.astype(np.int32),
    }
    if losses.clusters is not None:
        columns["cluster"] = losses.clusters.astype(np.int64)
    about = {"questions": losses.questions, "step": str(step)}
    with replace_flushed(path) as file:
        pq.write_table(pa.table(columns).replace_schema_metadata(about), file)
