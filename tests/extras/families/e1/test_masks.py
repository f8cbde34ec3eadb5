"""E1's masks: of the same residues as ESM-2's, although a sequence has more tokens around them."""

from __future__ import annotations

import numpy as np

from common.data.collators import MaskingCollator
from common.data.crops import Pack
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.families.e1.alphabet import ALPHABET


def test_families_are_asked_for_the_same_residues():
    generator = np.random.default_rng(0)
    proteins = ["".join(generator.choice(list("ACDEFGHIKLMNPQRSTVWY"), size)) for size in (40, 7, 90)]
    hidden = []
    for alphabet in (ESM2_TOKENS, ALPHABET):
        ids = [alphabet.encode(protein) for protein in proteins]
        lengths = np.array([len(each) for each in ids])
        pack = Pack(np.arange(3), np.zeros(3, np.int64), lengths, 0)
        masked = (MaskingCollator(alphabet, 0)(pack, np.concatenate(ids))["input_ids"] == alphabet.mask).numpy()
        starts, head = np.cumsum(lengths) - lengths, len(alphabet.head)
        hidden.append([masked[a + head :][: len(protein)] for a, protein in zip(starts, proteins, strict=True)])
    assert sum(each.sum() for each in hidden[0]) > 5
    for ours, theirs in zip(*hidden, strict=True):
        assert np.array_equal(ours, theirs)
