"""The metrics of an assay beside scipy's and scikit-learn's."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import matthews_corrcoef, ndcg_score, roc_auc_score

from extras.after.proteingym.metrics import metrics_of, ndcg, top_recall


def drawn(rows: int, decimals: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scores, measured, fit), which are related; few decimals give ties."""
    generator = np.random.default_rng(rows)
    measured = generator.normal(size=rows).round(decimals)
    scores = (measured + generator.normal(size=rows)).round(decimals)
    return scores, measured, measured > 0.3


@pytest.mark.parametrize(("rows", "decimals"), [(10, 9), (57, 9), (200, 9), (57, 1), (200, 0)])
def test_metrics_equal_scipy_and_scikit_learn(rows, decimals):
    scores, measured, fit = drawn(rows, decimals)
    gains = (measured - measured.min()) / (measured.max() - measured.min())
    found = metrics_of(scores, measured, fit)
    expected = {
        "spearman": spearmanr(scores, measured).statistic,
        "auc": roc_auc_score(fit, scores),
        "mcc": matthews_corrcoef(fit, scores >= np.median(scores)),
        "ndcg": ndcg_score([gains], [scores], k=rows // 10),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_ndcg_and_top_recall_of_a_hand_made_assay():
    """20 variants: the top tenth by score are numbers 19 and 0, which measured 19 and 0 of 0 to 19."""
    measured = np.arange(20.0)
    scores = np.where(measured == 0, 18.5, measured)
    best = 1 + (18 / 19) / math.log2(3)  # numbers 19 and 18 in order
    assert ndcg(measured, scores) == pytest.approx(1 / best)
    assert top_recall(measured, scores) == 0.5
    assert top_recall(measured, measured) == 1


def test_what_is_not_defined_is_nan_but_mcc():
    """One class alone, constant scores, fewer than 10 variants, binary measurements."""
    few, constant = np.arange(9.0), np.zeros(9)
    found = metrics_of(constant, few, few >= 0)
    assert found["mcc"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert matthews_corrcoef(few >= 0, constant >= 0) == 0
    assert all(math.isnan(found[name]) for name in ("spearman", "auc", "ndcg"))
    assert found["top_recall"] == 0
    assert math.isnan(top_recall(np.array([0.0] * 5 + [1.0] * 5), np.arange(10.0)))
