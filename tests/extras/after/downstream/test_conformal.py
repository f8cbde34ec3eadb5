"""Intervals and sets hold the truth as often as they say: over many random splits, with scikit-learn's models."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss as sklearn_log_loss

from common.cli import UserError
from extras.after.downstream.calibration import brier_score, calibration_error, probabilities_of, temperature_of
from extras.after.downstream.conformal import (
    interval,
    prediction_sets,
    quantile,
    scores_of_classes,
    scores_of_numbers,
)

SPLITS = 200


def test_intervals_cover_ninety_percent_over_random_splits():
    """Also where the noise differs from example to example; scaled by it, the intervals are shorter."""
    generator = np.random.default_rng(0)
    covered, widths = [], []
    for _ in range(SPLITS):
        x = generator.normal(size=(400, 5))
        noise = np.exp(x[:, 4])
        y = x @ np.arange(5) + noise * generator.normal(size=400)
        train, held, new = slice(200), slice(200, 300), slice(300, 400)
        guess = Ridge().fit(x[train], y[train]).predict(x)
        for sigma in (None, noise):
            bound = quantile(scores_of_numbers(y[held], guess[held], None if sigma is None else sigma[held]), 0.9)
            low, high = interval(guess[new], bound, None if sigma is None else sigma[new])
            covered.append(((low <= y[new]) & (y[new] <= high)).mean())
            widths.append(np.median(high - low))
    covered, widths = (np.array(each).reshape(SPLITS, 2) for each in (covered, widths))
    assert covered.mean(0) == pytest.approx([0.9, 0.9], abs=0.02)
    assert widths[:, 1].mean() < 0.8 * widths[:, 0].mean()


def test_sets_of_classes_cover_ninety_percent_over_random_splits():
    generator = np.random.default_rng(1)
    covered, sizes = [], []
    for _ in range(SPLITS):
        x = generator.normal(size=(260, 4))
        truth = (x[:, :3] + 0.8 * generator.gumbel(size=(260, 3))).argmax(1)
        model = LogisticRegression().fit(x[:60], truth[:60])
        probabilities = model.predict_proba(x)
        bound = quantile(scores_of_classes(probabilities[60:160], truth[60:160]), 0.9)
        sets = prediction_sets(probabilities[160:], bound)
        covered.append(sets[np.arange(100), truth[160:]].mean())
        sizes.append(sets.sum(1).mean())
        assert sets[np.arange(100), model.predict(x[160:])].all()
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)
    assert 1 < np.mean(sizes) < 2.5


def test_quantile_is_the_textbooks_and_too_few_labels_are_refused():
    scores = np.random.default_rng(2).permutation(np.arange(1.0, 20))
    assert quantile(scores, 0.9) == 18  # ceil(20 x 0.9)
    assert quantile(scores[:9], 0.9) == scores[:9].max()
    with pytest.raises(UserError, match=r"^--coverage 0\.9: 8 held-out labels bound no more than 0\.889"):
        quantile(scores[:8], 0.9)


def test_temperature_and_scores_equal_brute_force():
    generator = np.random.default_rng(3)
    true_logits = generator.normal(size=(4000, 3)) * 2
    truth = np.array([generator.choice(3, p=row) for row in softmax(true_logits, 1)])
    logits = 2.5 * true_logits  # too sure
    found = temperature_of(logits, truth)
    assert found == pytest.approx(2.5, rel=0.1)
    grid = np.geomspace(0.5, 10, 2000)
    losses = [-log_softmax(logits / t, 1)[np.arange(4000), truth].mean() for t in grid]
    assert found == pytest.approx(grid[np.argmin(losses)], rel=5e-3)
    probabilities = probabilities_of(logits)
    np.testing.assert_allclose(probabilities, softmax(logits, 1), atol=1e-12)
    assert sklearn_log_loss(truth, probabilities_of(logits, found)) == pytest.approx(min(losses), abs=1e-6)

    by_hand, bins = 0.0, np.minimum((probabilities.max(1) * 15).astype(int), 14)
    for number in range(15):
        inside = bins == number
        if inside.any():
            right = (probabilities.argmax(1) == truth)[inside].mean()
            by_hand += inside.mean() * abs(right - probabilities.max(1)[inside].mean())
    assert calibration_error(probabilities, truth) == pytest.approx(by_hand)
    assert calibration_error(probabilities, truth) > 0.1 > 0.03 > calibration_error(softmax(true_logits, 1), truth)
    onehot = np.arange(3) == truth[:, None]
    assert brier_score(probabilities, truth) == pytest.approx(np.mean(np.sum((probabilities - onehot) ** 2, 1)))
