"""The neighbour baseline beside a dictionary model in plain Python, its limits, and what it must and must not find."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from common.data.collators import mask_tokens
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training import neighbours
from common.training.neighbours import FOLDS, PLACES, STRENGTHS, Neighbours
from extras.families.amplify.alphabet import ALPHABET
from tests.models.toy_family.family import FAMILY

LETTERS = "LAGVSERTIDPKQNFYMHWC"


def encode(texts, tokens=ESM2_TOKENS):
    return tokens.encode_many(np.frombuffer("".join(texts).encode(), np.uint8), np.cumsum([0, *map(len, texts)]))


def random_proteins(count, seed=0, letters=LETTERS):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(len(letters), 5.0))
    return ["".join(rng.choice(list(letters), rng.integers(1, 60), p=weights)) for _ in range(count)]


def with_rule(count, seed=0):
    """Random proteins in which C follows three of four W."""
    rng = np.random.default_rng(seed)
    made = []
    for text in random_proteins(count, seed):
        letters = list(text)
        for place in range(1, len(letters)):
            if letters[place - 1] == "W" and rng.random() < 0.75:
                letters[place] = "C"
        made.append("".join(letters))
    return made


def hidden(texts, tokens=ESM2_TOKENS):
    """Input ids, offsets, positions of `<mask>` and what they were."""
    ids, offsets = encode(texts, tokens)
    inputs, labels = mask_tokens(
        *(ids, np.arange(len(texts)), np.zeros(len(texts), np.int64), np.diff(offsets), tokens), seed=0, epoch=0
    )
    positions = np.flatnonzero((labels >= 0) & (inputs == tokens.mask))
    return inputs, offsets, positions, labels[positions]


def losses(model, inputs, offsets, positions, labels):
    """Per residue: of the model, of the frequencies."""
    log_p = model.log_p(inputs, offsets, positions)
    return -log_p[np.arange(len(labels)), labels], -model.log_frequencies[labels]


class DictionaryModel:
    """The same by loops over texts; a place that is not visible is None, the edge '|'."""

    def __init__(self, texts):
        single = Counter(letter for letter in "".join(texts) if letter in ESM2_TOKENS.letters)
        total = sum(single.values()) + ESM2_TOKENS.residues[1] - ESM2_TOKENS.residues[0] + 1
        self.frequency = {letter: (single[letter] + 1) / total for letter in ESM2_TOKENS.letters if len(letter) == 1}
        self.share = sum(self.frequency[letter] for letter in LETTERS)
        sums = dict.fromkeys(neighbours.STRENGTHS, 0.0)
        for fold in range(FOLDS):
            self.pairs = self.count([text for number, text in enumerate(texts) if number % FOLDS != fold])
            for text in texts[fold::FOLDS]:
                for place, letter in enumerate(text):
                    for w in sums if letter in LETTERS else ():
                        sums[w] += self.log_p(self.around(text, place), w)[letter]
        self.w = max(sums, key=sums.get)
        self.pairs = self.count(texts)

    @staticmethod
    def around(text, place):
        found = {}
        for step in PLACES:
            at = place + step
            symbol = text[at] if 0 <= at < len(text) else "|" if at in (-1, len(text)) else None
            found[step] = symbol if symbol in (*LETTERS, "|") else None
        return found

    def count(self, texts):
        pairs = Counter()
        for text in texts:
            for place, letter in enumerate(text):
                if letter in LETTERS:
                    for step, symbol in self.around(text, place).items():
                        pairs.update([(step, symbol), (step, symbol, letter)])
        return pairs

    def log_p(self, around, w=None):
        w = self.w if w is None else w
        scores = {}
        for letter in LETTERS:
            f = self.frequency[letter] / self.share
            scores[letter] = math.log(f)
            for step, symbol in around.items():
                if symbol is not None:
                    p = (self.pairs[step, symbol, letter] + 20 * f) / (self.pairs[step, symbol] + 20)
                    scores[letter] += w * math.log(p / f)
        total = sum(map(math.exp, scores.values()))
        standard = {letter: score - math.log(total / self.share) for letter, score in scores.items()}
        return {letter: math.log(p) for letter, p in self.frequency.items()} | standard


def test_neighbours_equal_a_dictionary_model(monkeypatch):
    monkeypatch.setattr(neighbours, "STRENGTHS", STRENGTHS[::3])  # in plain Python each takes its time
    texts = with_rule(60)
    texts[3] += "XBAJ"  # other letters, and one that is unknown
    blocks = [encode(texts[first : first + 17]) for first in range(0, 60, 17)]
    model, expected = Neighbours.fit(blocks, ESM2_TOKENS), DictionaryModel(texts)
    assert model.strength == expected.w > 0
    shown = [*with_rule(20, seed=1), "XAUCB", "W", "WC"]
    inputs, offsets = encode(shown)
    rng = np.random.default_rng(0)
    inputs[(rng.random(len(inputs)) < 0.3) & (inputs >= 4)] = ESM2_TOKENS.mask
    positions = np.setdiff1d(np.arange(len(inputs)), [*offsets[:-1], *(offsets[1:] - 1)])
    log_p = model.log_p(inputs, offsets, positions)
    row = 0
    for first, last in zip(offsets[:-1] + 1, offsets[1:] - 1, strict=True):
        visible = [ESM2_TOKENS.letters[token] for token in inputs[first:last].tolist()]
        for place in range(last - first):
            for letter, value in expected.log_p(expected.around(visible, place)).items():
                assert log_p[row, ESM2_TOKENS.letters.index(letter)] == pytest.approx(value, abs=1e-9)
            row += 1
    assert row == len(positions)


@pytest.mark.parametrize("tokens", [ESM2_TOKENS, ALPHABET, FAMILY.tokens], ids=["esm2", "amplify", "toy"])
def test_neighbours_probabilities_sum_to_one(tokens):
    rng = np.random.default_rng(0)
    ids = rng.choice(np.array(tokens.replacements, np.uint8), 3000)
    offsets = np.arange(0, 3001, 100)
    model = Neighbours.fit([(ids, offsets)], tokens)
    size = len(tokens.replacements)
    assert model.scores.shape == (4, size + 2, size)
    ids[rng.random(3000) < 0.5] = tokens.mask
    log_p = model.log_p(ids, offsets, np.arange(3000))
    assert log_p.shape == (3000, tokens.vocab_size)
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1)


def test_neighbours_without_a_visible_one_are_the_frequencies():
    model = Neighbours.fit([encode(with_rule(300))], ESM2_TOKENS)
    assert model.strength > 0
    ids = np.full(9, ESM2_TOKENS.mask, np.uint8)
    log_p = model.log_p(ids, np.array([0, 9]), np.arange(9))  # a crop: beyond its ends is not visible
    np.testing.assert_allclose(log_p, np.repeat(model.log_frequencies[None], 9, 0))


def test_neighbours_do_not_look_into_the_next_sequence():
    model = Neighbours.fit([encode(with_rule(300))], ESM2_TOKENS)
    texts = ["WW", "A", "W", "CWCW"]
    ids, offsets = encode(texts)
    together = model.log_p(ids, offsets, np.arange(len(ids)))
    apart = [model.log_p(*encode([text]), np.arange(len(text) + 2)) for text in texts]
    assert np.array_equal(together, np.concatenate(apart))
    crops = model.log_p(ids[1:5], np.array([0, 2, 4]), np.arange(4))  # WW, <eos> <cls>
    np.testing.assert_array_equal(crops[:2], model.log_p(ids[1:3], np.array([0, 2]), np.arange(2)))


def test_neighbours_do_not_read_the_token_itself():
    model = Neighbours.fit([encode(with_rule(300))], ESM2_TOKENS)
    ids, offsets = encode(["ACDEF"])
    other = ids.copy()
    other[3] = ESM2_TOKENS.mask
    assert np.array_equal(model.log_p(ids, offsets, np.array([3])), model.log_p(other, offsets, np.array([3])))


def test_neighbours_find_a_planted_rule():
    model = Neighbours.fit([encode(with_rule(2000))], ESM2_TOKENS)
    ids, offsets = encode(["AWAAA"])
    p = np.exp(model.log_p(ids, offsets, np.array([3])))[0, ESM2_TOKENS.letters.index("C")]
    assert p == pytest.approx(0.75, abs=0.1)
    own, unigram = losses(model, *hidden(with_rule(500, seed=1)))
    assert unigram.mean() - own.mean() > 0.02


@pytest.mark.parametrize("count", [1, 3, 10, 30, 100, 400])
def test_neighbours_are_not_worse_than_frequencies(count):
    """Of residues that do not depend on each other."""
    texts = random_proteins(600)
    model = Neighbours.fit([encode(texts[:count])], ESM2_TOKENS)
    own, unigram = losses(model, *hidden(texts[-200:]))
    assert own.mean() < unigram.mean() + 0.005


def test_neighbours_fit_in_blocks_and_on_part_of_the_residues(monkeypatch):
    texts = with_rule(400)
    whole = Neighbours.fit([encode(texts)], ESM2_TOKENS)
    for most in (neighbours.MAX_FITTED, 500):
        monkeypatch.setattr(neighbours, "MAX_FITTED", most)
        once = Neighbours.fit([encode(texts)], ESM2_TOKENS)
        blocks = Neighbours.fit((encode([text]) for text in texts), ESM2_TOKENS)
        assert np.array_equal(blocks.scores, once.scores)
        assert once.strength == pytest.approx(whole.strength, abs=0.3)
    assert Neighbours.fit([], ESM2_TOKENS).strength == 0
