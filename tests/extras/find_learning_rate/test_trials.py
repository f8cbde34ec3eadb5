"""The search for a learning rate on losses that are known: which rates are tried, which one is recommended."""

from __future__ import annotations

import math

import pytest

from extras.find_learning_rate.report import advice, table
from extras.find_learning_rate.trials import FLAT, MOST_TRIALS, Trial, has_diverged, next_rate, recommended


def trial(rate: float, loss: float, held_out: bool = True) -> Trial:
    """A trial with this loss; inf: diverged."""
    if loss == math.inf:
        return Trial(rate, [3.5, 9.0], None, True, 20)
    return Trial(rate, [3.5, loss], loss if held_out else None, False, 20)


def search(start: float, loss_at, held_out: bool = True) -> list[Trial]:
    trials = []
    while (rate := next_rate(start, trials)) is not None:
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
    lines = table(trials)
    assert lines[2:] == [
        "| 0.25 | 2.6000 | 2.6000 | 0.1000 |",
        "| 0.5 | 2.5000 | 2.5000 | 0.0000 |",
        "| 1 | diverged after 2 steps |  |  |",
    ]
    text = "\n".join(advice(trials, 1000, 2.9, unfinished=False))
    assert "Recommended: --learning_rate 0.5\n" in text
    assert "3 trials of 2 steps (20 tokens)" in text
    assert "They saw 0.2 % of the run's 1,000 steps" in text
    assert "Too short" not in text
    assert "Not complete" not in text
    text = "\n".join(advice(trials[:2], 2, 2.52, unfinished=True))
    assert "Too short to tell" in text
    assert "Not complete: rates beyond those of the table may be better. The same command continues" in text
    assert "They saw" not in text
    assert "Start from another rate" in advice(search(1.0, lambda rate: -rate), None, None, unfinished=False)[-1]
    assert advice([trial(1.0, math.inf)], None, None, unfinished=False) == ["Every trial diverged: no recommendation."]
