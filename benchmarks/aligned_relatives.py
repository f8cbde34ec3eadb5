"""What aligned relatives alone say of a hidden residue: the baseline for a model that reads homologs.

A protein's relatives are aligned with it globally (BLOSUM62; a gap of n residues costs 11 + n, none at the ends). Its
hidden residues score nothing with any residue, so that the alignment knows no more than the model. The letter that is
aligned with a hidden residue looks up a row of a table, p(residue | aligned letter), counted over pairs of other
families; of several relatives, the mean of their rows is the prediction.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from extras.prepare.sample import blosum62

GAP_OPEN, GAP_EXTEND = 12.0, 1.0  # of the first residue, of each further one
UNALIGNED = 20  # letter of a residue that has none beside it
OTHER = 21  # letter that is hidden, or no amino acid
PSEUDOCOUNT = 1.0  # of each cell of the table
FAR = -1e9


def scores() -> np.ndarray:
    """Of two letters 0 to 21, float64 [22, 22]: BLOSUM62 in the order of extras.prepare.sample, else 0."""
    table = np.zeros((22, 22))
    table[:20, :20] = blosum62()
    return table


def aligned_letters(query: np.ndarray, relative: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """The letter of a relative beside each residue of a query, int64 [n]; `UNALIGNED` for none.

    query [n], relative [m]: letters 0 to 21; hidden: bool [n], which of the query's may not be seen. Needleman and
    Wunsch (1970) with affine gaps (Gotoh 1982), row by row: a gap along a row is a running maximum.
    """
    rows = scores()[np.where(hidden, OTHER, query)][:, relative]  # [n, m]
    n, m = rows.shape
    columns = np.arange(m + 1)
    best, down = np.zeros(m + 1), np.full(m + 1, FAR)  # of the row above; down: it ends in a gap of the relative
    from_side = np.zeros((n + 1, m + 1), np.int32)  # length of the gap that ends here along the row
    from_above = np.zeros((n + 1, m + 1), np.int32)  # the same down the column
    open_length = np.zeros(m + 1, np.int32)
    for i in range(1, n + 1):
        opened, extended = best - GAP_OPEN, down - GAP_EXTEND
        open_length = np.where(extended > opened, open_length + 1, 1).astype(np.int32)
        down = np.maximum(opened, extended)
        matched = np.append(0.0, best[:-1] + rows[i - 1])
        ended = np.maximum(matched, down)
        from_above[i] = np.where(down > matched, open_length, 0)
        # max over j' < j of ended[j'] - open - extend (j - j' - 1)
        lifted = ended + GAP_EXTEND * columns
        running = np.maximum.accumulate(lifted)
        origin = np.maximum.accumulate(np.where(lifted == running, columns, 0))
        side = np.append(FAR, running[:-1]) - GAP_OPEN - GAP_EXTEND * (columns - 1)
        gap = columns - np.append(0, origin[:-1])
        is_side = side > ended
        from_side[i] = np.where(is_side, gap, 0)
        best = np.where(is_side, side, ended)
        if i == 1:
            last_column = np.zeros(n + 1)
        last_column[i] = best[m]
    i, j = (int(last_column.argmax()), m) if last_column.max() > best.max() else (n, int(best.argmax()))
    letters = np.full(n, UNALIGNED)
    while i > 0 and j > 0:
        if from_side[i, j]:
            j -= from_side[i, j]
        elif from_above[i, j]:
            i -= from_above[i, j]
        else:
            i, j = i - 1, j - 1
            letters[i] = relative[j]
    return letters


class LetterTable:
    """p(residue | aligned letter), [22, 20], counted over (query, aligned letters) of pairs of relatives."""

    def __init__(self, pairs: Iterable[tuple[np.ndarray, np.ndarray]]):
        counts = np.full((22, 20), PSEUDOCOUNT)
        for query, letters in pairs:
            known = query < 20
            np.add.at(counts, (letters[known], query[known]), 1)
        self.rows = counts / counts.sum(1, keepdims=True)
        self.frequencies = counts.sum(0) / counts.sum()

    def losses(self, residues: np.ndarray, letters: np.ndarray) -> np.ndarray:
        """The loss in nats of n residues int64 [n], from the letters of k relatives beside each, int64 [k, n]; from
        the frequencies of residues for k = 0."""
        if not len(letters):
            return -np.log(self.frequencies[residues])
        return -np.log(self.rows[letters].mean(0)[np.arange(len(residues)), residues])
