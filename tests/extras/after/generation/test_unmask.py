"""Samplers of masked language models beside exact distributions on a toy that can be enumerated."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare

from extras.after.generation.draws import Sampling, draw, uniforms
from extras.after.generation.unmask import Protein, Request, Schedule, run_all, unmask

MASK, LETTERS = 9, np.array([4, 5, 6])
LENGTH, SAMPLES = 4, 2000
STATES = np.array(list(product(range(len(LETTERS)), repeat=LENGTH)))
ALMOST_SURELY = 1e-5  # of a chi-square test's p-value: seeds are fixed, so a sampler passes always or never


def joint(seed: int = 3, strength: float = 1.0) -> np.ndarray:
    """Probabilities of STATES, with couplings of all pairs."""
    generator = np.random.default_rng(seed)
    fields, couplings = generator.normal(size=(LENGTH, 3)), generator.normal(size=(LENGTH, LENGTH, 3, 3))
    energy = sum(fields[i][STATES[:, i]] for i in range(LENGTH))
    energy = energy + strength * sum(
        couplings[i, j][STATES[:, i], STATES[:, j]] for i in range(LENGTH) for j in range(i + 1, LENGTH)
    )
    weights = np.exp(energy)
    return weights / weights.sum()


def exact_logits(p: np.ndarray):
    """A model that knows the distribution: logits of p(letter | the open ones), with <cls> before the residues."""

    def compute(requests: list[Request]) -> list[np.ndarray]:
        result = []
        for request in requests:
            known = request.ids[1:] != MASK
            agrees = (LETTERS[STATES] == request.ids[1:])[:, known].all(1)
            rows = [np.bincount(STATES[:, at - 1], p * agrees, minlength=3) for at in request.at]
            result.append(np.log(np.array(rows)))
        return result

    return compute


def sampled(p: np.ndarray, schedule: Schedule, how: Sampling, samples: int = SAMPLES, tokens: int = 400) -> np.ndarray:
    """Frequencies of STATES."""
    ids = np.array([0] + [MASK] * LENGTH, np.uint8)
    proteins = [Protein(ids, np.arange(1, LENGTH + 1), MASK, LETTERS, (7, n)) for n in range(samples)]
    begun = ((protein, unmask(protein, schedule, how)) for protein in proteins)
    found = [protein.ids[1:] - LETTERS[0] for protein in run_all(begun, exact_logits(p), tokens, lambda count: None)]
    return np.bincount(np.array(found) @ 3 ** np.arange(LENGTH)[::-1], minlength=len(STATES))


def test_masks_that_open_one_at_a_time_are_drawn_from_the_joint_distribution():
    p = joint()
    counts = sampled(p, Schedule(), Sampling())
    assert chisquare(counts, SAMPLES * p).pvalue > ALMOST_SURELY
    other = joint(seed=4)
    assert chisquare(counts, SAMPLES * other).pvalue < ALMOST_SURELY


def test_ancestral_steps_draw_what_opens_together_independently():
    """All in one step: the product of the marginals. In many steps nearly the joint distribution."""
    p = joint()
    marginals = np.array([np.bincount(STATES[:, i], p) for i in range(LENGTH)])
    independent = np.prod([marginals[i][STATES[:, i]] for i in range(LENGTH)], axis=0)
    counts = sampled(p, Schedule(steps=1), Sampling())
    assert chisquare(counts, SAMPLES * independent).pvalue > ALMOST_SURELY
    assert chisquare(counts, SAMPLES * p).pvalue < ALMOST_SURELY
    assert chisquare(sampled(p, Schedule(steps=1000), Sampling()), SAMPLES * p).pvalue > ALMOST_SURELY


def test_letters_that_close_again_keep_the_distribution_and_the_share_of_masks():
    """ReMDM's theorem: the marginals of every time are those without remasking."""
    p = joint()
    counts = sampled(p, Schedule(steps=20, remask=1.0), Sampling())
    # Few pairs still open together; without couplings there is no such error.
    free = joint(strength=0.0)
    assert chisquare(sampled(free, Schedule(steps=5, remask=1.0), Sampling()), SAMPLES * free).pvalue > ALMOST_SURELY
    assert abs(counts / SAMPLES - p).sum() < abs(sampled(p, Schedule(steps=5), Sampling()) / SAMPLES - p).sum()
    steps, ids = 10, np.array([0] + [MASK] * 100, np.uint8)
    protein = Protein(ids, np.arange(1, 101), MASK, LETTERS, (1,))
    asks, open_at = unmask(protein, Schedule(steps=steps, remask=1.0), Sampling()), []
    request = next(asks)
    while request is not None:
        open_at.append(int(protein.is_open.sum()))
        try:
            request = asks.send(np.zeros((len(request.at), 3)))
        except StopIteration:
            request = None
    expected = 100 * np.arange(steps) / steps
    assert (abs(np.array(open_at) - expected) < 5 * np.sqrt(100 * 0.25)).all()  # five standard deviations
    assert protein.is_open.all()


@pytest.mark.parametrize("remask", [0.0, 0.7])
def test_confidence_opens_the_most_probable_letters(remask):
    """So many that n (1 - k / steps) stay masked, whatever closes."""
    count, steps = 30, 7
    ids = np.array([0] + [MASK] * count, np.uint8)
    protein = Protein(ids, np.arange(1, count + 1), MASK, LETTERS, (2,))
    sharpness = np.linspace(0.1, 5, count)[np.random.default_rng(1).permutation(count)]
    asks = unmask(protein, Schedule(by_confidence=True, steps=steps, remask=remask), Sampling(temperature=0))
    request, step = next(asks), 0
    while step < steps:
        assert (protein.ids == MASK).sum() == len(request.at) == count * (steps - step) // steps
        if not remask:
            assert sharpness[~protein.is_open].max() < sharpness[protein.is_open].min(initial=np.inf)
        step += 1
        try:
            request = asks.send(np.stack([np.array([0, 1, 0]) * sharpness[at - 1] for at in request.at]))
        except StopIteration:
            break
    assert step == steps
    assert set(protein.ids[1:]) == {LETTERS[1]}


def test_a_protein_does_not_depend_on_others_of_its_batch():
    """Not even where the model's rounding does: near a tie, the logits of the protein alone decide."""
    p, ids = joint(), np.array([0] + [MASK] * LENGTH, np.uint8)
    asked_alone, generator = 0, np.random.default_rng(0)

    def compute(requests: list[Request]) -> list[np.ndarray]:
        nonlocal asked_alone
        asked_alone += sum(request.alone for request in requests)
        is_exact = len(requests) == 1 and requests[0].alone
        rounding = 0 if is_exact else generator.uniform(-2e-5, 2e-5)  # twenty times that of fp32
        return [rows + rounding * np.array([1, -1, 1]) for rows in exact_logits(p)(requests)]

    for schedule in (Schedule(), Schedule(steps=3, remask=0.5), Schedule(True, 2)):
        for how in (Sampling(), Sampling(temperature=0.5, top_p=0.8), Sampling(top_k=2)):
            results = []
            for tokens in (1, 60, 1000):
                proteins = [Protein(ids, np.arange(1, 5), MASK, LETTERS, (5, n)) for n in range(300)]
                begun = ((protein, unmask(protein, schedule, how)) for protein in proteins)
                done = run_all(begun, compute, tokens, lambda count: None)
                results.append([protein.ids.tobytes() for protein in done])
            assert results[0] == results[1] == results[2]
    assert asked_alone


def test_draw_follows_temperature_top_p_and_top_k():
    generator = np.random.default_rng(0)
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (20000, 1))
    uniform = generator.random(len(logits))
    for how, expected in (
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(temperature=0.5), np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
        (Sampling(top_p=0.7), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.81), np.array([0.5, 0.3, 0.15, 0]) / 0.95),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
    ):
        drawn = draw(logits, uniform, how)
        counts, expected = np.bincount(drawn.letters, minlength=4), np.array(expected)
        assert (counts[expected == 0] == 0).all()
        if (expected > 0).sum() > 1:
            assert chisquare(counts[expected > 0], len(logits) * expected[expected > 0]).pvalue > ALMOST_SURELY
        np.testing.assert_allclose(drawn.log_p, np.log([0.5, 0.3, 0.15, 0.05])[drawn.letters])


def test_uniforms_are_a_function_of_key_and_counter():
    drawn = uniforms((1, 2), np.arange(5000))
    assert (drawn == uniforms((1, 2), np.arange(5000)[::-1])[::-1]).all()
    assert not (drawn == uniforms((2, 1), np.arange(5000))).any()
    assert chisquare(np.histogram(drawn, 20, (0, 1))[0]).pvalue > ALMOST_SURELY
