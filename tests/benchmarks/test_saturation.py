"""benchmarks/saturation.py on curves whose growth is known."""

from __future__ import annotations

import numpy as np

from benchmarks.saturation import baseline, draw, growth, names_of, smoothed
from extras.compare.runs import Group, Run


def test_growth_of_known_curves():
    steps = list(range(0, 1100, 100))
    loss = np.array([3.0 - 0.1 * n for n in range(11)])
    losses = np.stack([loss + 0.01, loss - 0.01])
    stops = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4])
    grown = growth(steps, np.stack([stops, stops + 0.02]), losses, falls=False)
    assert grown.reached == 400
    assert np.isclose(grown.last, 0.41)
    assert np.isclose(grown.seeds, 0.02 / 2**0.5)
    assert grown.by_loss[0] > 0.8  # both grow at first
    assert np.isnan(grown.by_loss[1])  # then one of them stands still
    falling = growth(steps, losses, losses, falls=True)
    assert (falling.reached, falling.at_best) == (1000, 1000)
    assert np.allclose(falling.by_loss, 1)
    turns = growth(steps, np.stack([stops - 0.001 * np.arange(11) ** 2] * 2), losses, falls=False)
    assert turns.at_best == 400
    assert turns.by_loss[1] < -0.9


def test_one_outlier_is_no_best():
    values = np.array([0.0, 0.1, 0.9, 0.2, 0.3])
    assert smoothed(values).tolist() == [0.0, 0.1, 0.2, 0.3, 0.3]


def test_figures_are_those_that_a_user_reads():
    row = dict.fromkeys(
        ["step", "eval_loss", "eval_loss_masked", "eval_contacts_long_p_at_l", "eval_contacts_long_nearest_p_at_l"]
        + ["eval_contacts_long_chance", "eval_mutations_GB1_masked", "eval_probe_GB1_spearman"]
    )
    assert names_of([row]) == [
        "eval_loss_masked",
        "eval_contacts_long_p_at_l",
        "eval_mutations_GB1_masked",
        "eval_probe_GB1_spearman",
    ]


def test_picture_has_a_panel_for_each_figure(tmp_path):
    losses = {"eval_loss_masked": 2.8, "eval_neighbours_loss_masked": 2.9}
    rows = [{"step": step, "eval_mutations_a": step / 1e4} | losses for step in (100, 200, 300)]
    runs = [Run(tmp_path, rows, rows[-1], {"arguments": {"seed": seed}}, {}, False, None) for seed in (1, 2)]
    group = Group("A", "two seeds", tuple(runs))
    assert baseline(group, "eval_loss_masked") == 2.9
    assert np.isnan(baseline(group, "eval_mutations_a"))
    draw([group], tmp_path / "curves")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
