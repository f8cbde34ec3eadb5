"""The ESM-2 alphabet: 33 tokens in the order of the published checkpoints, and look-up tables to encode with.

Source of the order: `vocab.txt` of facebook/esm2_t6_8M_UR50D (the same file for all six sizes).
"""

from __future__ import annotations

import numpy as np

from common.data import TokenSet

TOKENS = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
CLS, PAD, EOS, UNK = 0, 1, 2, 3
MASK = 32
VOCAB_SIZE = len(TOKENS)
FIRST_RESIDUE, LAST_RESIDUE = 4, 30  # L .. '-': every one-character token; only these are ever masked
STANDARD_RESIDUES = np.arange(4, 24, dtype=np.uint8)  # the 20 amino acids, L .. C

ESM2_TOKENS = TokenSet(
    vocab_size=VOCAB_SIZE,
    pad=PAD,
    mask=MASK,
    unknown=UNK,
    residues=(FIRST_RESIDUE, LAST_RESIDUE),
    replacements=tuple(STANDARD_RESIDUES.tolist()),
)

# byte -> token id. Lower case counts as upper case (UniRef marks low-complexity regions so); anything else is <unk>.
BYTE_TO_ID = np.full(256, UNK, dtype=np.uint8)
for _id in range(FIRST_RESIDUE, LAST_RESIDUE + 1):
    BYTE_TO_ID[ord(TOKENS[_id])] = BYTE_TO_ID[ord(TOKENS[_id].lower())] = _id


def encode(sequence: str | bytes) -> np.ndarray:
    """`<cls> residues <eos>` as uint8 ids, shape [len(sequence) + 2]."""
    raw = sequence.encode("latin-1", "replace") if isinstance(sequence, str) else sequence
    return np.concatenate(([CLS], BYTE_TO_ID[np.frombuffer(raw, np.uint8)], [EOS])).astype(np.uint8)


def encode_many(characters: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode many sequences at once, without a Python loop.

    characters: uint8 [C], the sequences' bytes end to end; offsets: int [N + 1], where each begins.
    Returns ids uint8 [C + 2 N] (`<cls> residues <eos>` each) and their offsets int64 [N + 1].
    """
    offsets = np.asarray(offsets, dtype=np.int64)
    characters = characters[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    out_offsets = offsets + 2 * np.arange(len(offsets))
    ids = np.empty(out_offsets[-1], dtype=np.uint8)
    is_residue = np.ones(len(ids), dtype=bool)
    for positions, token in ((out_offsets[:-1], CLS), (out_offsets[1:] - 1, EOS)):
        ids[positions] = token
        is_residue[positions] = False
    ids[is_residue] = BYTE_TO_ID[characters]
    return ids, out_offsets
