"""The picture of predicted contacts: which pairs are marked, what its title says, and what is drawn."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from common.figures import ONE_COLUMN, FigureFlags, figure_style
from extras.after.downstream.complexes import joined, likeliest
from extras.after.downstream.contact_picture import FALSE, TRUE, draw, figure_of, title_of
from extras.after.downstream.contacts import RANGES, precisions, top_pairs
from extras.after.downstream.structures import Chain


def chain_of(length: int, scale: float | None = 8.0, name: str = "a") -> Chain:
    """scale: of normally distributed coordinates; None: without coordinates."""
    beta = np.full((length, 3), np.nan, np.float32)
    if scale is not None:
        beta[:] = np.random.default_rng(1).normal(scale=scale, size=(length, 3))
    return Chain(name, "A" * length, beta)


def scores_of(length: int) -> np.ndarray:
    scores = np.random.default_rng(2).random((length, length))
    return (scores + scores.T) / 2


@pytest.mark.parametrize("ties", [False, True])
def test_top_pairs_are_those_of_the_table(ties):
    chain, scores = chain_of(60), scores_of(60) * (not ties)
    chain.beta[7] = np.nan
    top, table = top_pairs(chain, scores), precisions(chain, scores)
    assert (top.range, len(top.i)) == ("long", 59)  # residues with coordinates
    assert top.contact.mean() == pytest.approx(table["long_p_at_l"])
    assert top.chance == pytest.approx(table["long_chance"])
    share = f"{table['long_p_at_l']:.1%}".replace("%", " %")
    assert f"{int(top.contact.sum())} are contacts: P@L {share}, chance" in title_of(chain, top)


@pytest.mark.parametrize(
    ("chain", "name", "count", "said"),
    [
        (chain_of(20), "medium", 20, "of the 20 likeliest medium-range pairs (12 to 23 residues apart)"),
        (chain_of(60, scale=1e4), "long", 60, "the structure has none of that range"),
        (chain_of(60, None), "long", 60, "marked: the 60 likeliest long-range pairs"),
        (chain_of(26, None), "medium", 26, "no structure to compare with"),  # 3 pairs are 24 or more apart
        (chain_of(8, None), "short", 3, "marked: the 3 likeliest short-range pairs"),
    ],
)
def test_top_pairs_of_short_chains_and_of_such_without_contacts(chain, name, count, said):
    top = top_pairs(chain, scores_of(len(chain.sequence)))
    nearest, beyond = RANGES[name]
    assert (top.range, len(top.i)) == (name, count)
    assert ((top.j - top.i >= nearest) & (top.j - top.i < beyond)).all()
    assert said in title_of(chain, top)


def pixels_of(image: np.ndarray, colour: str) -> int:
    return int((np.abs(image - to_rgb(colour)).max(-1) < 0.05).sum())


def test_map_has_true_and_false_pairs_and_is_not_blank(tmp_path):
    """With a highest probability of 0.2, too: the darkest pair is black, as with one of 1."""
    dark = []
    for highest in (1.0, 0.2):
        scores = scores_of(60) ** 4
        draw(chain_of(60), scores / scores.max() * highest, tmp_path / "a")
        image = matplotlib.image.imread(tmp_path / "a.png")[..., :3]
        assert min(pixels_of(image, TRUE), pixels_of(image, FALSE)) > 100
        dark.append((image.max(-1) < 0.5).mean())
    assert dark[0] == pytest.approx(dark[1], rel=0.02)


def test_map_without_structure_or_pairs_has_no_true_and_false(tmp_path):
    draw(chain_of(60, None), scores_of(60) * 0.1, tmp_path / "a")
    image = matplotlib.image.imread(tmp_path / "a.png")[..., :3]
    assert pixels_of(image, TRUE) > 100
    assert pixels_of(image, FALSE) == 0
    draw(chain_of(4, None), scores_of(4), tmp_path / "b")
    assert "no pairs" in title_of(chain_of(4, None), None)


def test_map_is_a_column_wide_with_its_texts_inside():
    for chain in (chain_of(300, name="x" * 60), chain_of(60, None), chain_of(30)):
        with figure_style():
            figure = figure_of(chain, scores_of(len(chain.sequence)))
            width, height = figure.get_size_inches()
            figure.canvas.draw()
            whole = figure.get_tightbbox()
        assert width == pytest.approx(ONE_COLUMN)
        assert (whole.x0 >= 0, whole.y0 >= 0, whole.x1 <= width, whole.y1 <= height) == (True,) * 4


def test_map_of_a_complex_has_borders_letters_and_the_likeliest_pairs_of_its_table(tmp_path):
    whole = joined("pair", [chain_of(40, None), chain_of(25, None)])
    scores = scores_of(65)
    scores[38, 41] = scores[41, 38] = 2.0  # three apart in the record, yet of two chains
    with figure_style():
        axes, *_ = figure_of(whole, scores).axes
    assert [set(map(float, line.get_xdata())) for line in axes.lines] == [{0.0, 1.0}, {40.5}]
    assert [set(map(float, line.get_ydata())) for line in axes.lines] == [{40.5}, {0.0, 1.0}]
    points = (np.asarray(axes.collections[0].get_offsets()) - 1).astype(int)
    first = {"A": 0, "B": 40}
    rows = likeliest(whole, scores)
    assert {(int(i), int(j)) for j, i in points} == {
        (first[row["chain_i"]] + row["i"] - 1, first[row["chain_j"]] + row["j"] - 1) for row in rows
    }
    assert (38, 41) in {(int(i), int(j)) for j, i in points}
    for child in axes.child_axes:
        letters = [label.get_text() for label in child.get_xticklabels() + child.get_yticklabels()]
        assert {"A", "B"} <= set(letters)
    numbers = dict(zip(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()], strict=True))
    assert (numbers[1], numbers[41]) == ("1", "1")
    [path] = draw(whole, scores, tmp_path / "pair", FigureFlags(["svg"]))
    assert path.name == "pair.svg"
    assert "the 65 likeliest pairs" in path.read_text()
