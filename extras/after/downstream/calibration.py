"""Whether probabilities mean what they say, and one number, a temperature, that corrects them."""

from __future__ import annotations

import numpy as np

BINS = 15  # as in Guo et al. 2017
LARGEST = 20.0  # temperature; the smallest is its inverse


def probabilities_of(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Softmax of logits over the temperature, float64 [N, C]."""
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def log_loss(logits: np.ndarray, truth: np.ndarray, temperature: float = 1.0) -> float:
    """Mean negative log probability of the true classes, in nats. logits: [N, C]; truth: int [N]."""
    scaled = logits.astype(np.float64) / temperature
    highest = scaled.max(1)
    total = highest + np.log(np.exp(scaled - highest[:, None]).sum(1))
    return float((total - scaled[np.arange(len(truth)), truth]).mean())


def temperature_of(logits: np.ndarray, truth: np.ndarray) -> float:
    """The temperature of the lowest log loss (Guo et al. 2017, arXiv:1706.04599). logits: of examples that the fit has
    not seen, [N, C]; truth: int [N]."""
    from scipy.optimize import minimize_scalar

    bound = np.log(LARGEST)
    found = minimize_scalar(lambda x: log_loss(logits, truth, float(np.exp(x))), bounds=(-bound, bound))
    return float(np.exp(found.x))


def brier_score(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """Mean squared distance to the true class's indicator, summed over the classes (Brier 1950): 0 to 2."""
    return float(((probabilities - np.eye(probabilities.shape[1])[truth]) ** 2).sum(1).mean())


def calibration_error(probabilities: np.ndarray, truth: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: |accuracy - confidence| of bins of equal width of the likeliest class's probability,
    weighted by their examples."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == truth
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, right - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(truth))


def calibration(logits: np.ndarray, truth: np.ndarray, temperature: np.ndarray | float) -> dict[str, float]:
    """For results.json: of held-out examples, as they come and by temperature; that is one, or of each, [N, 1]."""
    found: dict[str, float] = {}
    for name, scale in (("", 1.0), ("_by_temperature", temperature)):
        probabilities = probabilities_of(logits, scale)
        found[f"brier{name}"] = brier_score(probabilities, truth)
        found[f"calibration_error{name}"] = calibration_error(probabilities, truth)
    return found
