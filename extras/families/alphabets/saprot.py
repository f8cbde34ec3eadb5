"""SaProt's alphabet (Su et al. 2024): a token is an amino acid and the 3Di letter of its structure, as in `MdEvKp`.

`#` stands for an amino acid, or a structure, that is not known. A masked token becomes `#` with its own structure.
"""

from __future__ import annotations

from extras.families.alphabets.declared import declare

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
STRUCTURES = "pynwrqhgdlvtmfsaeikc"  # of Foldseek (van Kempen et al. 2024), in lower case
UNKNOWN = "#"
KNOWN = [residue + structure for residue in AMINO_ACIDS for structure in STRUCTURES + UNKNOWN]

ALPHABET = declare(
    {
        "name": "saprot",
        "tokens": ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *KNOWN, *(UNKNOWN + s for s in STRUCTURES + UNKNOWN)],
        "maskable": KNOWN,
        "replacements": KNOWN,
        "masked_as": {token: UNKNOWN + token[1] for token in KNOWN},
        "amino_acids": {token: token[0] for token in KNOWN},
        "ignore_case": False,
    },
    {"name": "saprot"},
)
