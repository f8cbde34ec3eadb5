"""AMPLIFY's alphabet: 27 tokens in the order of its authors' vocabulary (conf/tokenizer/amplify_vocab.txt).

It has no X, U, Z, O, '.' and '-': these become `<unk>`. `|` separates chains (--chains).
"""

from __future__ import annotations

from common.data.alphabet import Alphabet
from common.models.esm2.alphabet import ESM2_TOKENS

TOKENS = ("<pad>", "<unk>", "<mask>", "<bos>", "<eos>", "|", *"LAGVSERTIDPKQNFYMHWCB")
FIRST_RESIDUE = TOKENS.index("L")

ALPHABET = Alphabet(
    vocab_size=len(TOKENS),
    pad=0,
    unknown=1,
    mask=2,
    begin=3,
    end=4,
    letters=TOKENS,
    residues=(FIRST_RESIDUE, len(TOKENS) - 1),
    replacements=tuple(range(FIRST_RESIDUE, FIRST_RESIDUE + 20)),  # the 20 amino acids, L .. C
    prepared=ESM2_TOKENS,
)
