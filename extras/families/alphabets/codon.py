"""Codons: a token is three nucleotides of a coding sequence, in the order of ACGT. U is read as T.

A stop codon is a token and may only be the last; it is never masked. A codon with a letter for several nucleotides (N)
is `<unk>`. No start codon is demanded. Amino acids are those of the standard genetic code (NCBI's table 1).
"""

from __future__ import annotations

from itertools import product

from extras.families.alphabets.declared import declare

NUCLEOTIDES = "ACGT"
CODONS = ["".join(letters) for letters in product(NUCLEOTIDES, repeat=3)]
GENETIC_CODE = dict(zip(CODONS, "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF", strict=True))
STOPS = [codon for codon in CODONS if GENETIC_CODE[codon] == "*"]
SENSE = [codon for codon in CODONS if codon not in STOPS]

ALPHABET = declare(
    {
        "name": "codon",
        "tokens": ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *CODONS],
        "maskable": SENSE,
        "replacements": SENSE,
        "amino_acids": {codon: GENETIC_CODE[codon] for codon in SENSE},
        "synonyms": {"U": "T"},
        "ambiguous": "NRYSWKMBDHV",
        "last_only": STOPS,
    },
    {"name": "codon"},
)
