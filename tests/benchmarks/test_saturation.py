"""benchmarks/saturation.py on curves whose growth is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.saturation import baseline, draw, growth, names_of, table
from common.cli import UserError
from extras.compare.runs import Group, Run


def test_growth_of_known_curves():
    steps = list(range(100, 1300, 100))
    ends = [200, 400, 600, 800, 1000, 1200]
    loss = 3.0 - 0.1 * np.arange(12)
    losses = np.stack([loss + 0.01, loss - 0.01])
    stops = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4])
    grown = growth(steps, np.stack([stops, stops + 0.02]), losses, ends, falls=False)
    assert np.allclose(grown.parts, [0.06, 0.26, 0.41, 0.41, 0.41, 0.41])
    assert ends[grown.reached] == 600
    assert np.isclose(grown.seeds, 0.02 / 2**0.5)
    assert grown.by_loss > 0.8
    falling = growth(steps, losses, losses, ends, falls=True)
    assert ends[falling.reached] == 1200
    assert np.isclose(falling.by_loss, 1)
    assert np.isclose(falling.by_step, 1)
    still = growth(steps, np.ones_like(losses), losses, ends, falls=False)
    assert np.isnan(still.by_loss)
    turns = growth(steps, np.stack([stops - 0.001 * np.arange(12) ** 2] * 2), losses, ends, falls=False)
    assert ends[turns.reached] == 600
    # a figure that follows a loss which rises again, and not the steps
    rises = np.stack([3.0 - 0.1 * np.array([0, 1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1])] * 2)
    followed = growth(steps, -rises, rises, ends, falls=False)
    assert np.isclose(followed.by_loss, 1)
    assert followed.by_step < 0.3
    never = growth(steps, np.stack([-stops] * 2), losses, ends, falls=False)
    assert never.reached == 0


def test_groups_have_the_same_parts(tmp_path):
    steps = range(100, 900, 100)
    rows = [{"step": step, "eval_loss_masked": 3 - step / 1e4, "eval_mutations_a": step / 1e4} for step in steps]
    without = [{k: v for k, v in row.items() if row["step"] != 300 or k != "eval_mutations_a"} for row in rows]
    whole, lacking, half = (
        Group("A", "one seed", (Run(tmp_path, each, each[-1], {"arguments": {"seed": 1}}, {}, False, None),))
        for each in (rows, without, rows[:4])
    )
    first = "| mutations_a | – | 0.0100 | 0.0200 | 0.0300 | 0.0400 |"
    assert table(whole, 800)[-1].startswith(first + " 0.0500 | 0.0600 | 0.0700 | 0.0800 | – | 800 |")
    assert table(half, 800)[-1].startswith(first + " – | 400 |")
    assert table(half, 1200)[-1].startswith("| mutations_a | – | 0.0100 | 0.0250 | 0.0400 | – | 400 |")
    with pytest.raises(UserError, match="eval_mutations_a: each 100 steps, an eighth of the longest run, need an"):
        table(lacking, 800)


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
