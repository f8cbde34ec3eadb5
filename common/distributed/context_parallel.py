"""How the ranks of a context-parallel group share the sequences of a pack: which tokens each of them has.

Two layouts, both tested against the same numbers:
- `dual_chunk`: a sequence is padded to a multiple of 2 * cp and cut into 2 * cp chunks; rank r has chunks r and
  2 * cp - 1 - r. So every rank has as many tokens, and with a causal mask as much work. Transformer Engine's layout.
- `contiguous`: rank r has the tokens from length * r // cp up to length * (r + 1) // cp. No padding; the ranks' shares
  of a sequence differ by one token at most. Attention that looks both ways is as evenly shared so.

On each rank the sequences follow in the order of the pack, and a sequence's tokens in theirs: those that are real come
before its padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

LAYOUTS = ("dual_chunk", "contiguous")


class CpPack(NamedTuple):
    """What a rank knows of a pack of B sequences that it shares with cp - 1 others. T: its own tokens.

    positions int64 [T]: in their sequences; bounds int64 [cp, B + 1]: between which tokens of each rank a sequence
    lies, padding included; real int64 [cp, B]: how many tokens of that are real; lengths int64 [B]: of the whole
    sequences; masks int64 [B]: how many tokens of the whole sequences are <mask>.
    """

    positions: Tensor
    bounds: Tensor
    real: Tensor
    lengths: Tensor
    masks: Tensor


@dataclass(frozen=True)
class CpSplit:
    """A pack of sequences with these lengths (int64 [B]), shared by `size` ranks.

    multiple: sequences are padded to a multiple of it; with dual_chunk it is one of 2 * size, with contiguous 1.
    """

    lengths: np.ndarray
    size: int
    layout: str = "dual_chunk"
    multiple: int = 1

    def __post_init__(self) -> None:
        assert self.multiple == 1 if self.layout == "contiguous" else self.multiple % (2 * self.size) == 0

    @property
    def chunks(self) -> np.ndarray:
        """Tokens of a chunk, of each sequence; dual_chunk only."""
        return -(-self.lengths // self.multiple) * (self.multiple // (2 * self.size))

    def counts(self) -> np.ndarray:
        """Tokens of each sequence that each rank has, padding included; int64 [size, B]."""
        if self.layout == "contiguous":
            return np.diff(self._cuts(), axis=0)
        return np.repeat(2 * self.chunks[None], self.size, axis=0)

    def real(self) -> np.ndarray:
        """Of `counts`, those that are no padding."""
        if self.layout == "contiguous":
            return self.counts()
        numbers = np.arange(2 * self.size)[:, None]
        of_chunks = np.clip(self.lengths - numbers * self.chunks, 0, self.chunks)  # [2 * size, B]
        return of_chunks[: self.size] + of_chunks[: self.size - 1 : -1]

    def bounds(self) -> np.ndarray:
        """Where each sequence begins among each rank's tokens, and where the last one ends; int64 [size, B + 1]."""
        return np.pad(self.counts().cumsum(axis=1), ((0, 0), (1, 0)))

    def positions(self, rank: int) -> np.ndarray:
        """Of a rank's tokens in their sequences, padding included; int64 [T]."""
        counts = self.counts()[rank]
        ends = counts.cumsum()
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        if self.layout == "contiguous":
            return within + np.repeat(self._cuts()[rank], counts)
        chunk = np.repeat(self.chunks, counts)
        second = within >= chunk
        return within + chunk * np.where(second, 2 * self.size - 2 - rank, rank)

    def sequences(self, rank: int) -> np.ndarray:
        """To which sequence each of a rank's tokens belongs; int64 [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.counts()[rank])

    def _cuts(self) -> np.ndarray:
        return self.lengths * np.arange(self.size + 1)[:, None] // self.size  # [size + 1, B]
