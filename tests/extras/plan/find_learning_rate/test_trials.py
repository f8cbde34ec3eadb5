"""The search for a learning rate on losses that are known: which rates are tried, which one is recommended."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.image import imread

from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.plan.find_learning_rate.report import Found, advice, draw, table
from extras.plan.find_learning_rate.trials import FLAT, MOST_TRIALS, Trial, has_diverged, next_rate, recommended


def trial(rate: float, loss: float, held_out: bool = True) -> Trial:
    """A trial with this loss; inf: diverged."""
    if loss == math.inf:
        return Trial(rate, [3.5, 9.0], None, True, 20)
    return Trial(rate, [3.5, loss], loss if held_out else None, False, 20)


def search(first: float, loss_at, held_out: bool = True, start: float | None = None) -> list[Trial]:
    trials = []
    while (rate := next_rate(first, trials, start)) is not None:
        trials.append(trial(rate, loss_at(rate), held_out))
    return trials


def valley(best: float, width: float = 0.1):
    """The loss rises with the square of the distance from the best rate, in factors of two."""
    return lambda rate: 2.5 + width * math.log2(rate / best) ** 2


@pytest.mark.parametrize(
    ("start", "loss_at", "tried", "chosen"),
    [
        (1.0, valley(1.0), [1.0, 2.0, 0.5], 1.0),
        (1.0, valley(4.0), [1.0, 2.0, 4.0, 8.0], 4.0),
        (1.0, valley(0.25), [1.0, 2.0, 0.5, 0.25, 0.125], 0.25),
        (1.0, valley(1.0, FLAT / 4.1), [1.0, 2.0, 0.5, 0.25, 0.125], 0.25),  # flat over a factor of four below
        (1.0, lambda rate: valley(0.5)(rate) if rate < 1 else math.inf, [1.0, 0.5, 0.25], 0.5),
        (1.0, lambda rate: valley(4.0)(rate) if rate < 4 else math.inf, [1.0, 2.0, 4.0], 2.0),
    ],
)
@pytest.mark.parametrize("held_out", [True, False])
def test_search_ends_where_the_loss_is_lowest(start, loss_at, tried, chosen, held_out):
    trials = search(start, loss_at, held_out)
    assert [each.learning_rate for each in trials] == tried
    assert recommended(trials).learning_rate == chosen


@pytest.mark.parametrize("loss_at", [lambda rate: math.inf, lambda rate: -rate, lambda rate: rate / 1e9])
def test_search_is_bounded(loss_at):
    assert len(search(1.0, loss_at)) == MOST_TRIALS


def test_recommendation_does_not_cross_a_gap():
    """A low loss by chance, below a rate that is worse."""
    trials = [trial(rate, loss) for rate, loss in ((1.0, 2.5), (0.5, 2.5 + 2 * FLAT), (0.25, 2.5 + FLAT / 2))]
    assert recommended(trials).learning_rate == 1.0


def test_divergence_needs_several_steps():
    assert not has_diverged([3.5, 9.0])
    assert not has_diverged([3.5, *[3.0] * 9, 5.4])
    assert has_diverged([3.5, 3.0, *[4.1] * 5])


def test_report_says_what_the_trials_saw():
    trials = search(1.0, lambda rate: valley(0.5)(rate) if rate < 1 else math.inf)
    lines = table(Found(trials, start=3.5))
    assert lines[2:] == [
        "| start | | 3.5000 | | 1.0000 |",
        "| 0.25 | 2.6000 | 2.6000 | 0.9000 | 0.1000 |",
        "| 0.5 | 2.5000 | 2.5000 | 1.0000 | 0 |",
        "| 1 | diverged after 2 steps | | | |",
    ]
    text = "\n".join(advice(Found(trials, baseline=2.9), 1000, unfinished=False))
    assert "Recommended: --learning_rate 0.5\n" in text
    assert "3 trials of 2 steps (20 tokens)" in text
    assert "They saw 0.2 % of the run's 1,000 steps" in text
    assert "Too short" not in text
    assert "Not complete" not in text
    text = "\n".join(advice(Found(trials[:2], baseline=2.52), 2, unfinished=True))
    assert "Too short to tell" in text
    assert "Not complete: rates beyond those of the table may be better. The same command continues" in text
    assert "They saw" not in text
    assert "Start from another rate" in advice(Found(search(1.0, lambda rate: -rate)), None, unfinished=False)[-1]
    assert advice(Found([trial(1.0, math.inf)]), None, unfinished=False) == [
        "Every trial diverged: no recommendation."
    ]


def test_recommendation_on_trained_weights_is_near_the_best():
    """All losses within 0.004 nats of the start, the best at 1: by a tolerance of 0.005 the lowest rate would do."""
    start = 2.5

    def loss_at(rate: float) -> float:
        return start - 0.004 + 0.0015 * math.log2(rate) ** 2

    trials = search(1.0, loss_at, start=start)
    assert recommended(trials, start).learning_rate == 1.0
    assert recommended(trials).learning_rate < 1.0
    assert min(trial.learning_rate for trial in trials) == 0.5
    far = search(1.0, loss_at, start=3.5)  # from random weights as before
    assert recommended(far, 3.5).learning_rate == recommended(search(1.0, loss_at)).learning_rate < 1.0


def of_proteins(mean: float, seed: int, proteins: int = 200) -> ProteinLosses:
    """Losses of proteins whose own difficulty is shared: rates differ by far less than proteins."""
    hard, own = np.random.default_rng(0), np.random.default_rng(seed)
    masked = hard.integers(1, 60, proteins)
    each = mean + hard.normal(0, 0.3, proteins) + own.normal(0, 0.01, proteins)
    return ProteinLosses(each * masked, masked)


def test_report_compares_in_pairs_over_proteins(tmp_path):
    rates, losses = (0.25, 0.5, 1.0), (2.499, 2.49, 2.52)
    proteins = {rate: of_proteins(loss, seed) for seed, (rate, loss) in enumerate(zip(rates, losses, strict=True), 1)}
    proteins[0.0] = of_proteins(2.5, 9)
    trials = [trial(rate, float(proteins[rate].loss_sum.sum() / proteins[rate].masked.sum())) for rate in rates]
    found = Found(trials, start=2.5, proteins=proteins)
    mean, error = mean_and_error(proteins[0.25].loss_sum - proteins[0.5].loss_sum, proteins[0.5].masked)
    assert f"| {mean:.4f} ± {error:.4f} |" in table(found)[3]
    alone = mean_and_error(proteins[0.25].loss_sum, proteins[0.25].masked)[1]
    assert error < alone / 5, "in pairs"
    text = "\n".join(advice(found, None, unfinished=False))
    assert "Recommended: --learning_rate 0.5" in text
    assert "No rate is better" not in text
    assert "Not told apart" not in text
    worse = Found(trials, start=2.4, proteins=proteins | {0.0: of_proteins(2.4, 9)})
    assert "No rate is better than the starting weights: the best by -0.0" in "\n".join(advice(worse, None, False))
    alike = Found(trials, start=2.5, proteins=proteins | {1.0: of_proteins(2.49, 7)})
    text = "\n".join(advice(alike, None, False))
    assert "Not told apart from the best, by two standard errors over proteins: 1." in text
    single = {rate: ProteinLosses(each.loss_sum[:1], each.masked[:1]) for rate, each in proteins.items()}
    unknown = Found(trials, start=2.5, proteins=single)  # an error over one protein
    assert not any("nan" in line or "No rate" in line for line in [*table(unknown), *advice(unknown, None, False)])
    draw(found, tmp_path / "found")
    assert imread(tmp_path / "found.png").std() > 0.05


def test_picture_of_few_trials_is_whole(tmp_path, recwarn):
    draw(Found([Trial(1e-3, [3.0, 2.9, 2.8], 2.7, False, 100)]), tmp_path / "one")
    assert (imread(tmp_path / "one.png")[:, :2] == 1).all(), "the label of the axis is within the picture"
    draw(Found([trial(1.0, math.inf)]), tmp_path / "none")
    assert not recwarn.list, "of a legend without lines"
