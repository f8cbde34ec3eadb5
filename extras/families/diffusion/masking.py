"""Batches of masked diffusion (Sahoo et al. 2024, arXiv 2406.07524; Shi et al. 2024, arXiv 2406.04329).

Each sequence has a time t of its own. At the rate m(t) its residues become `<mask>`, and stay it: the absorbing state.
The loss, divided by the residues that may be masked,

    integral over t from 0 to 1 of  m'(t) / m(t) * E[sum over the masked residues of -log p(residue | the visible)]

is an upper bound of -log p(sequence | its length), whatever the schedule m: it is the loss of predicting the residues
one by one, averaged over all orders. The model is not told t: the number of `<mask>` says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from common.cli import UserError
from common.data import TokenSet
from common.data.collators import Batch, Collator, MaskingCollator, MaskRates
from common.data.counter_rng import MASK_RATE, derive_key, hash_counters
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.training_data import rank_batches, with_linkers
from common.distributed.world import Mesh

# The times of training are above it, as Sahoo et al.'s: no weight is above 1000, and a thousandth of the integral is
# left out.
FIRST_TIME = 1e-3
ALWAYS_MASK = MaskRates(mask_replace_prob=1.0, random_replace_prob=0.0)
SPARE = 1 / 6  # of the tokens: more are predicted in a batch than on average where lengths are few or uneven


class Schedule(NamedTuple):
    """rate: m(t), float64 [n] of times in (0, 1]; weight: m'(t) / m(t), above 0; mean_rate: over the times."""

    rate: Callable[[np.ndarray], np.ndarray]
    weight: Callable[[np.ndarray], np.ndarray]
    mean_rate: float


SCHEDULES = {
    "linear": Schedule(lambda t: t, lambda t: 1 / t, 1 / 2),
    "cosine": Schedule(
        lambda t: np.sin(math.pi / 2 * t), lambda t: math.pi / 2 / np.tan(math.pi / 2 * t), 2 / math.pi
    ),
}


def uniform(seed: int, epoch: int, records: np.ndarray) -> np.ndarray:
    """float64 [n] in (0, 1], a number of each record, of 53 bits."""
    hashes = hash_counters(derive_key(seed, epoch, MASK_RATE), records)
    return ((hashes >> np.uint64(11)).astype(np.float64) + 1) / 2.0**53


class DiffusionCollator(MaskingCollator):
    """Batches of masked diffusion. seed: of times and masks; schedule: a name in `SCHEDULES`."""

    def __init__(self, tokens: TokenSet, seed: int, schedule: str = "linear"):
        super().__init__(tokens, seed, ALWAYS_MASK)
        self.schedule = SCHEDULES[schedule]

    def times(self, pack: Pack) -> np.ndarray:
        """t of each sequence, float64 [B]."""
        return FIRST_TIME + (1 - FIRST_TIME) * uniform(self.seed, pack.epoch, pack.records)

    def probabilities(self, pack: Pack) -> np.ndarray:
        return self.schedule.rate(self.times(pack))

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """As `MaskingCollator`, with weights float32 [T]: those of the schedule at residues that may be masked, 0 at
        others. num_targets counts the residues that may be masked."""
        batch = super().__call__(pack, ids, step)
        may_be_masked = self.tokens.is_maskable[ids]
        weights = np.repeat(self.schedule.weight(self.times(pack)), pack.lengths) * may_be_masked
        batch["weights"] = torch.zeros(len(batch["labels"]))
        batch["weights"][: len(ids)] = torch.from_numpy(weights)
        batch["num_targets"] = int(np.count_nonzero(may_be_masked))
        return batch


def diffusion_batches(flags: DataFlags, tokens: TokenSet, mesh: Mesh, static_shape: bool = False) -> Collator:
    """The collator of a rank; static_shape: as `masked_batches`."""
    collator = DiffusionCollator(tokens, flags.seed, flags.diffusion_schedule)
    filled_to, most = flags.pack_tokens if static_shape else 0, collator.schedule.mean_rate + SPARE
    return rank_batches(with_linkers(collator, tokens), flags, mesh, tokens.pad, tokens.mask, filled_to, most)


def check_flags(flags: DataFlags) -> None:
    """UserError for flags of masked language modelling: here rates are drawn, and all selected residues hidden."""
    plain = DataFlags()
    for name in ("mlm_probability", "mlm_probability_end", "mask_replace_prob", "random_replace_prob"):
        given = getattr(flags, name)
        if given not in (getattr(plain, name), {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}.get(name)):
            raise UserError(f"--objective mdlm draws its mask rates, and hides what it masks: drop {name} {given}")
    if flags.set_tokens is not None:
        raise UserError(
            f"--objective mdlm: sequences of a set (--set_tokens {flags.set_tokens}) would have rates of their own, "
            "and their loss would bound no likelihood: drop one of the two"
        )
