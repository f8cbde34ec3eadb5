"""Masks: bit for bit against a plain per-token reference, the statistics they promise, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest

from common.data.collators import MaskRates, mask_tokens
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS, MASK, PAD, TOKENS, UNK

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix(x):
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def reference_token(token, record, position, seed, epoch, probability=0.15, masked=0.8, random=0.1):
    """(input id, label) of one token, by the definition, one Python integer at a time."""
    key = 0
    for part in (seed, epoch, 6):
        key = splitmix((key + GOLDEN) ^ splitmix(part + GOLDEN))
    number = splitmix(splitmix(key + record * GOLDEN) + position * GOLDEN)
    if not 4 <= token <= 30 or number / 2**64 >= probability:
        return token, -100
    fate = splitmix(number ^ 0x5851F42D4C957F2D)
    which = (fate >> 32) / 2**32
    if which < masked:
        return MASK, token
    if which < masked + random:
        return 4 + (fate % 2**32) * 20 // 2**32, token
    return token, token


def mask(ids, records, starts, lengths, seed=0, epoch=0, **rates):
    arrays = (np.asarray(array, dtype=np.int64) for array in (records, starts, lengths))
    return mask_tokens(np.asarray(ids, dtype=np.uint8), *arrays, ESM2_TOKENS, seed, epoch, MaskRates(**rates))


@pytest.mark.parametrize("seed", [0, 42, 2**63 + 11, -1])
@pytest.mark.parametrize("rates", [(0.15, 0.8, 0.1), (0.5, 0.8, 0.1), (0.3, 0.6, 0.4), (0.3, 0.0, 0.0), (0.3, 1.0, 0)])
def test_mask_tokens_equals_reference_bit_for_bit(seed, rates):
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 200, 40)
    records = rng.integers(0, 2**40, 40)
    starts = rng.integers(0, 40_000, 40)
    ids = rng.integers(0, len(TOKENS), lengths.sum()).astype(np.uint8)
    names = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
    found = mask(ids, records, starts, lengths, seed, epoch=3, **dict(zip(names, rates, strict=True)))
    input_ids, labels = found
    at = 0
    for record, start, length in zip(records.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        for position in range(start, start + length):
            expected = reference_token(int(ids[at]), record, position, seed, 3, *rates)
            assert (input_ids[at], labels[at]) == expected
            at += 1
    assert (labels != -100).any()


def within(count, trials, probability, sigmas=4):
    return abs(count - trials * probability) <= sigmas * (trials * probability * (1 - probability)) ** 0.5


@pytest.fixture(scope="module")
def many():
    """2 million residues (all of them L) in 4,000 records: input ids and labels, [4000, 500]."""
    ids = np.full(2_000_000, 4, dtype=np.uint8)
    input_ids, labels = mask(ids, np.arange(4000), np.zeros(4000), np.full(4000, 500))
    return input_ids.reshape(4000, 500), labels.reshape(4000, 500)


def test_mask_tokens_rates(many):
    input_ids, labels = many
    selected = labels != -100
    count = int(selected.sum())
    assert within(count, labels.size, 0.15)
    assert within(int((input_ids[selected] == MASK).sum()), count, 0.8)
    # 10 % random and one twentieth of them the original again, 10 % kept
    assert within(int((input_ids[selected] == 4).sum()), count, 0.1 + 0.1 / 20)
    for residue in range(5, 24):
        assert within(int((input_ids[selected] == residue).sum()), count, 0.1 / 20)
    assert set(np.unique(input_ids)) == {*range(4, 24), MASK}
    assert (input_ids[~selected] == 4).all()
    assert (labels[selected] == 4).all()


def test_mask_tokens_of_neighbours_are_independent(many):
    selected = many[1] != -100
    hidden = many[0] == MASK
    for of in (selected, hidden):
        rate = of.mean()
        for along, by in ((0, 1), (1, 1), (1, 2), (0, 2)):
            both = np.take(of, range(by, of.shape[along]), along) & np.take(of, range(of.shape[along] - by), along)
            assert within(int(both.sum()), both.size, rate**2)
    # No position and no record is favoured: chi-square of the counts, within 4 sigma of its degrees of freedom.
    for axis, trials in ((0, 4000), (1, 500)):
        counts = selected.sum(axis)
        chi_square = ((counts - trials * 0.15) ** 2 / (trials * 0.15 * 0.85)).sum()
        assert abs(chi_square - len(counts)) < 4 * (2 * len(counts)) ** 0.5


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}, {"epoch": 2**20}, {"seed": 2**32}])
def test_mask_tokens_of_epochs_and_seeds_are_independent(many, other):
    ids = np.full(2_000_000, 4, dtype=np.uint8)
    _, labels = mask(ids, np.arange(4000), np.zeros(4000), np.full(4000, 500), **other)
    both = (labels.reshape(4000, 500) != -100) & (many[1] != -100)
    assert within(int(both.sum()), both.size, 0.15**2)


def test_mask_tokens_of_a_lower_rate_are_a_subset(many):
    ids = np.full(500_000, 4, dtype=np.uint8)
    arrays = ids, np.arange(1000), np.zeros(1000), np.full(1000, 500)
    at_15 = [each[:1000].reshape(-1) for each in many]
    for lower, higher in ((mask(*arrays, mlm_probability=0.05), at_15), (at_15, mask(*arrays, mlm_probability=0.3))):
        chosen = lower[1] != -100
        assert (higher[1] != -100)[chosen].all()
        assert np.array_equal(higher[0][chosen], lower[0][chosen])
        assert chosen.sum() < (higher[1] != -100).sum()


def test_mask_tokens_never_selects_special_tokens():
    ids = np.tile(np.array([CLS, PAD, EOS, UNK, 31, MASK], dtype=np.uint8), 100)
    input_ids, labels = mask(ids, [7], [0], [600], mlm_probability=1.0)
    assert np.array_equal(input_ids, ids)
    assert (labels == -100).all()
    ids = np.arange(4, 31, dtype=np.uint8)
    assert np.array_equal(mask(ids, [7], [0], [27], mlm_probability=1.0)[1], ids)
    assert (mask(ids, [7], [0], [27], mlm_probability=0.0)[1] == -100).all()


def test_mask_tokens_is_independent_of_packing_and_crop():
    rng = np.random.default_rng(2)
    sequences = [rng.integers(4, 24, n).astype(np.uint8) for n in (700, 3, 120, 1)]
    records, lengths = [10, 5, 2**33, 0], [700, 3, 120, 1]
    together = mask(np.concatenate(sequences), records, [0] * 4, lengths)
    parts = np.cumsum([0, *lengths])
    for i in (3, 1, 0, 2):
        alone = mask(sequences[i], [records[i]], [0], [lengths[i]])
        for whole, one in zip(together, alone, strict=True):
            assert np.array_equal(whole[parts[i] : parts[i + 1]], one)
    crop = mask(sequences[0][250:500], [10], [250], [250])
    for whole, one in zip(together, crop, strict=True):
        assert np.array_equal(whole[250:500], one)


def test_mask_tokens_without_residues():
    input_ids, labels = mask([], [], [], [])
    assert (len(input_ids), len(labels)) == (0, 0)


def test_mask_tokens_keeps_its_input():
    ids = np.full(100, 4, dtype=np.uint8)
    mask(ids, [1], [0], [100], mlm_probability=1.0)
    assert (ids == 4).all()
