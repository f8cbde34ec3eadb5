"""The ESM-2 alphabet: 33 tokens in the order of the published checkpoints. Prepared data are stored in it.

Source of the order: `vocab.txt` of facebook/esm2_t6_8M_UR50D (the same file for all six sizes).
"""

from __future__ import annotations

import numpy as np

from common.data.alphabet import ESM2, Alphabet

TOKENS = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
CLS, PAD, EOS, UNK = 0, 1, 2, 3
CHAIN_END = 31  # <null_1>, which no ESM-2 uses: in prepared data it stands between the chains of a record
MASK = 32
VOCAB_SIZE = len(TOKENS)
FIRST_RESIDUE, LAST_RESIDUE = 4, 30  # L .. '-': every one-character token; only these are ever masked
STANDARD_RESIDUES = np.arange(4, 24, dtype=np.uint8)  # the 20 amino acids, L .. C

ESM2_TOKENS = Alphabet(
    name=ESM2,
    vocab_size=VOCAB_SIZE,
    pad=PAD,
    mask=MASK,
    unknown=UNK,
    begin=CLS,
    end=EOS,
    letters=TOKENS,
    residues=(FIRST_RESIDUE, LAST_RESIDUE),
    replacements=tuple(STANDARD_RESIDUES.tolist()),
)
BYTE_TO_ID = ESM2_TOKENS.byte_to_id
encode, encode_many = ESM2_TOKENS.encode, ESM2_TOKENS.encode_many
