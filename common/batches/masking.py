"""BERT masking keyed by (seed, epoch, record, position): the same token gets the same fate in every batch.

Of the residues 15 % are selected; of those 80 % become `<mask>`, 10 % a random one of the 20 amino acids and 10 % stay
(Devlin et al. 2019; Lin et al. 2023 for ESM-2). Special tokens are never selected.
"""

from __future__ import annotations

import numpy as np

from common.files.alphabet import FIRST_RESIDUE, LAST_RESIDUE, MASK, STANDARD_RESIDUES
from common.files.hashing import GAMMA, MASKING, derive_key, hash_counters, mix

IGNORE = -100  # label of a token without loss: the default ignore_index of torch's cross-entropy
FATE = 0x5851F42D4C957F2D  # turns the hash that selected a token into the one that decides what becomes of it
MASKED_BELOW = np.uint64(0.8 * 2**32)
RANDOM_BELOW = np.uint64(0.9 * 2**32)


def mask_tokens(
    ids: np.ndarray,
    records: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    seed: int,
    epoch: int,
    mlm_probability: float = 0.15,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask the crops of n sequences, laid end to end.

    ids: uint8 [T]; records: int64 [n], the store's index of each sequence; starts: int64 [n], where in its sequence
    each crop begins; lengths: int64 [n], T in sum. Returns input ids uint8 [T] and labels int64 [T], the original id
    where a token was selected and -100 elsewhere.
    """
    # The counter of a token is its position in the whole sequence, so a crop elsewhere masks the same residues:
    # state = hash(record) + position * GAMMA, with position = start + (index in the batch - index of the crop).
    state = hash_counters(derive_key(seed, epoch, MASKING), records)
    state += (starts - (np.cumsum(lengths) - lengths)).astype(np.uint64) * np.uint64(GAMMA)
    hashes = np.repeat(state, lengths)
    hashes += np.arange(len(ids), dtype=np.uint64) * np.uint64(GAMMA)
    hashes = mix(hashes)

    is_residue = (ids >= FIRST_RESIDUE) & (ids <= LAST_RESIDUE)
    # 53 bits, so that a probability of 1.0 has a threshold
    selected = np.flatnonzero(((hashes >> np.uint64(11)) < np.uint64(round(mlm_probability * 2**53))) & is_residue)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[selected] = ids[selected]

    fate = mix(hashes[selected] ^ np.uint64(FATE))
    which, residue = fate >> np.uint64(32), fate & np.uint64(0xFFFFFFFF)
    amino_acids = STANDARD_RESIDUES[(residue * np.uint64(len(STANDARD_RESIDUES))) >> np.uint64(32)]
    input_ids = ids.copy()
    input_ids[selected] = np.where(
        which < MASKED_BELOW, np.uint8(MASK), np.where(which < RANDOM_BELOW, amino_acids, ids[selected])
    )
    return input_ids, labels
