"""E1's alphabet: 34 tokens in the order of its authors' tokenizer (Profluent-AI/E1).

A sequence is `<bos> 1 residues 2 <eos>`; `?` is the mask. All 26 letters are residues. There is no unknown token: X,
any amino acid, stands for '.', '-', '*' and other characters, and in prepared data for J, which ESM-2's alphabet has
not. `<bos_glm>` and `<eos_span>` are of decoders with the same tokens.
"""

from __future__ import annotations

from string import ascii_uppercase

from common.data.alphabet import Alphabet
from common.models.esm2.alphabet import ESM2_TOKENS

TOKENS = ("<pad>", "<bos>", "<eos>", "<bos_glm>", "<eos_span>", "?", "1", "2", *ascii_uppercase)
FIRST_RESIDUE = TOKENS.index("A")

ALPHABET = Alphabet(
    vocab_size=len(TOKENS),
    pad=TOKENS.index("<pad>"),
    unknown=TOKENS.index("X"),
    mask=TOKENS.index("?"),
    begin=TOKENS.index("<bos>"),
    end=TOKENS.index("<eos>"),
    after_begin=(TOKENS.index("1"),),
    before_end=(TOKENS.index("2"),),
    letters=TOKENS,
    # As of ESM-2: every letter may be masked, and the 20 amino acids replace one.
    residues=(FIRST_RESIDUE, len(TOKENS) - 1),
    replacements=tuple(TOKENS.index(letter) for letter in "ACDEFGHIKLMNPQRSTVWY"),
    prepared=ESM2_TOKENS,
)
