"""The five metrics of ProteinGym (Notin et al. 2023, NeurIPS) of an assay: of scores beside measured effects."""

from __future__ import annotations

import math

import numpy as np

from extras.after.downstream.metrics import auroc
from extras.after.inference.correlation import spearman

METRICS = ("spearman", "auc", "mcc", "ndcg", "top_recall")
TOP = 10  # percent of the variants: of NDCG and of the recall


def metrics_of(scores: np.ndarray, measured: np.ndarray, fit: np.ndarray) -> dict[str, float]:
    """{metric: value}; NaN where it is not defined.

    scores, measured: [variants], higher is better; fit: bool [variants], the binary label of AUC and MCC.
    """
    return {
        "spearman": spearman(scores, measured),
        "auc": auroc(fit, scores),
        "mcc": matthews(fit, scores >= np.median(scores)),
        "ndcg": ndcg(measured, scores),
        "top_recall": top_recall(measured, scores),
    }


def matthews(true: np.ndarray, predicted: np.ndarray) -> float:
    """Matthews' correlation of two boolean arrays; 0 where one of them is constant, as in scikit-learn."""
    both, neither = float((true & predicted).sum()), float((~true & ~predicted).sum())
    only_predicted, only_true = float((~true & predicted).sum()), float((true & ~predicted).sum())
    positive, negative = both + only_true, neither + only_predicted
    scale = positive * negative * (both + only_predicted) * (neither + only_true)
    return (both * neither - only_predicted * only_true) / math.sqrt(scale) if scale else 0.0


def ndcg(measured: np.ndarray, scores: np.ndarray) -> float:
    """Normalised discounted cumulative gain of the top `TOP` percent by score; NaN below 10 variants.

    Gains are the measured effects scaled to [0, 1], discounts 1 / log2(rank + 1). Variants of equal scores share the
    mean of their discounts, as in scikit-learn; ProteinGym's own order of ties is arbitrary.
    """
    top, range_ = len(measured) * TOP // 100, float(np.ptp(measured))
    if not top or not range_:
        return math.nan
    gains = (measured - measured.min()) / range_
    discounts = np.where(np.arange(len(gains)) < top, 1 / np.log2(np.arange(len(gains)) + 2), 0)
    tied = np.unique(-scores, return_inverse=True)[1]
    counts = np.bincount(tied)
    ends = np.cumsum(counts)
    summed = np.concatenate([[0], np.cumsum(discounts)])
    found = (np.bincount(tied, gains) / counts * (summed[ends] - summed[ends - counts])).sum()
    return float(found / (np.sort(gains)[::-1] * discounts).sum())


def top_recall(measured: np.ndarray, scores: np.ndarray) -> float:
    """Of the variants above the 90th percentile of what was measured, the part above that of the scores; NaN if there
    are none, as of binary measurements."""
    best, chosen = (values > np.percentile(values, 100 - TOP) for values in (measured, scores))
    return float((best & chosen).sum() / best.sum()) if best.any() else math.nan
