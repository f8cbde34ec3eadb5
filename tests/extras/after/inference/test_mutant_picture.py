"""The heat map of single mutants: its values, letters, rows, pages and sizes; and the table of best and worst."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from common.figures import ONE_COLUMN, PAGE, TWO_COLUMNS, FigureFlags
from extras.after.inference.mutant_matrix import SHOWN, extremes, extremes_table
from extras.after.inference.mutant_picture import LETTER, ORDER, POSITIONS, ROWS, draw, means_of, pages
from extras.after.inference.mutation_scores import RESIDUES


def matrix_of(text: str) -> np.ndarray:
    """Random; 0 of the wild type, NaN where it is no amino acid."""
    matrix = np.random.default_rng(1).normal(-2, 2, (len(text), 20))
    for n, letter in enumerate(text):
        matrix[n] = matrix[n] if letter in RESIDUES else np.nan
        matrix[n, np.array(list(RESIDUES)) == letter] = 0
    return matrix


def text_of(length: int) -> str:
    return "".join(np.random.default_rng(2).choice(list(RESIDUES), length))


def test_rows_have_all_positions_letters_and_means():
    text = "MX" + text_of(POSITIONS + 30)
    matrix = matrix_of(text)
    (figure,) = pages("a: masked_marginal", text.encode(), matrix, 11)
    maps, strips = figure.axes[0:4:2], figure.axes[1:4:2]
    shown = np.concatenate([np.ma.filled(axes.images[0].get_array(), np.nan) for axes in maps], 1)
    for row, letter in enumerate(ORDER):
        np.testing.assert_array_equal(shown[row], matrix[:, RESIDUES.index(letter)])
    labels = [label for axes in maps for label in axes.get_xticklabels()]
    assert "".join(label.get_text() for label in labels) == text
    assert {label.get_fontsize() for label in labels} == {LETTER}
    means = np.concatenate([np.ma.filled(axes.images[0].get_array(), np.nan)[0] for axes in strips])
    others = [matrix[n, [to != wild for to in RESIDUES]] for n, wild in enumerate(text)]
    np.testing.assert_allclose(means, [np.mean(row) for row in others])
    np.testing.assert_allclose(means_of("U", np.arange(20.0)[None]), [9.5])  # no substitution by itself
    dots = [tuple(point) for axes in maps for point in axes.lines[0].get_xydata()]
    assert dots == [(n, ORDER.index(letter)) for n, letter in enumerate(text) if letter != "X"]
    numbers = [label.get_text() for axes in strips for label in axes.get_xticklabels()]
    assert numbers == ["11", *(str(n) for n in range(20, 11 + len(text), 10))]


@pytest.mark.parametrize("length", [1, 40, POSITIONS + 1])
def test_picture_fits_a_column_or_the_page_and_its_texts_are_inside(length):
    text = text_of(length)
    title = "a long name of a protein of some family of enzymes: masked_marginal"
    for figure in pages(title, text.encode(), matrix_of(text), 1):
        width, height = figure.get_size_inches()
        assert ONE_COLUMN <= width <= TWO_COLUMNS + 1e-6
        assert height < PAGE
        figure.canvas.draw()
        whole = figure.get_tightbbox()
        assert (whole.x0 >= 0, whole.y0 >= 0, whole.x1 <= width, whole.y1 <= height) == (True,) * 4


def test_long_protein_has_pages_of_one_scale(tmp_path):
    text = text_of(POSITIONS * ROWS * 2 + 5)
    figures = list(pages("a", text.encode(), matrix_of(text), 1))
    assert [len(figure.axes) for figure in figures] == [2 * ROWS + 1, 2 * ROWS + 1, 3]
    assert len({image.get_clim() for figure in figures for axes in figure.axes[:-1] for image in axes.images}) == 1
    assert "page 3 of 3" in figures[2].texts[0].get_text()
    draw(tmp_path / "a", {"a", "a.page3"}, "a", text.encode(), matrix_of(text), 1, FigureFlags(["png"], dpi=50))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page2.png", "a.page3-1.png", "a.png"]
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[1] <= PAGE * 50


def test_extremes_equal_a_sort_by_hand():
    text = "MKXVLU" + text_of(20)
    matrix = matrix_of(text).round(1)  # many are equal
    matrix[5] = 0.3  # U is no amino acid that is scored, yet all 20 are substitutions
    rows = [
        (matrix[n, c], n, c)
        for n in range(len(text))
        for c in range(20)
        if np.isfinite(matrix[n, c]) and RESIDUES[c] != text[n]
    ]
    named = [(f"{text[n]}{n + 7}{RESIDUES[c]}", value) for value, n, c in rows]
    best, worst = extremes(text.lower().encode(), matrix, 7)
    assert [tuple(each) for each in best] == sorted(named, key=lambda each: -each[1])[:SHOWN]
    assert [tuple(each) for each in worst] == sorted(named, key=lambda each: each[1])[:SHOWN]
    lines = extremes_table(best, worst)
    assert lines[0].split() == ["best", "worst"]
    assert [line.split() for line in lines[1:]] == [
        [a.name, f"{a.score:+.2f}", b.name, f"{b.score:+.2f}"] for a, b in zip(best, worst, strict=True)
    ]


def test_extremes_of_few_mutants_are_not_in_both():
    matrix = np.full((1, 20), np.nan)
    matrix[0, :12] = np.arange(12.0)
    best, worst = extremes(b"V", matrix, 1)
    assert len({each.name for each in best + worst}) == len(best) + len(worst)
    assert (len(best) + len(worst), worst[0].score) == (12 - ("V" in RESIDUES[:12]), 0.0)
    assert extremes(b"X", np.full((1, 20), np.nan), 1) == ([], [])
