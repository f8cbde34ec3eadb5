"""Pictures: formats and sizes that are written, the same bytes again, and colours for all readers and for grey."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from common import figures
from common.cli import UserError
from common.figures import ONE_COLUMN, FigureFlags, figure_style, save_figure, series_style
from common.flags import parse_arguments

# Simulations of deuteranopia and protanopia in linear RGB, severity 1: Machado, Oliveira and Fernandes 2009 ("A
# physiologically-based model for simulation of color vision deficiency", IEEE TVCG 15:1291), from the authors' page.
SEEN = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # of linear sRGB
WHITE = XYZ.sum(1)


def lab(rgb: np.ndarray, seen: str = "normal") -> np.ndarray:
    """CIE L*a*b* [N, 3] of sRGB in 0 to 1, as it is seen."""
    rgb = np.asarray(rgb, dtype=np.float64)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    ratio = (np.clip(linear @ SEEN[seen].T, 0, 1) @ XYZ.T) / WHITE
    root = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = root.T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


def picture() -> Figure:
    with figure_style():
        figure = Figure(figsize=(ONE_COLUMN, 2))
        axes = figure.subplots()
        for number in range(3):
            axes.plot([0, 1], [number, 1], label=f"series {number}", **series_style(number))
        axes.legend()
    return figure


def test_formats_are_written_with_their_sizes_and_text(tmp_path):
    flags = FigureFlags(["png", "svg", "pdf", "png"], dpi=100)
    paths = save_figure(picture(), tmp_path / "a.b", flags)
    assert [path.name for path in paths] == ["a.b.png", "a.b.svg", "a.b.pdf"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    with Image.open(paths[0]) as image:
        assert image.size == (350, 200)  # 89 mm are 3.504 inches
        assert image.info["dpi"] == pytest.approx((100, 100), abs=0.1)
    assert 'width="252.283465pt" height="144pt"' in paths[1].read_text()
    assert ">series 2</text>" in paths[1].read_text()
    pdf = paths[2].read_bytes()
    assert b"/MediaBox [ 0 0 252.28" in pdf
    assert b"/FontFile2" in pdf, "TrueType"


def test_same_picture_makes_the_same_bytes(tmp_path, monkeypatch):
    found = []
    for name, epoch in (("one", "0"), ("two", "1000000000")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        (tmp_path / name).mkdir()
        paths = save_figure(picture(), tmp_path / name / "a", FigureFlags(list(figures.FORMATS)))
        found.append([path.read_bytes() for path in paths])
    assert found[0] == found[1]


def test_very_large_picture_has_fewer_dots(tmp_path, caplog):
    with figure_style():
        figure = Figure(figsize=(0.2, 100))
    save_figure(figure, tmp_path / "long", FigureFlags(dpi=1200))
    with Image.open(tmp_path / "long.png") as image:
        assert image.size == (130, figures.MOST_PIXELS)
    assert "long.png: 650 dots per inch instead of 1200" in caplog.text


@pytest.mark.parametrize("seen", SEEN)
def test_colours_are_told_apart(seen):
    """by a distance of CIE 1976 of 15, where 2.3 are just noticed; on white paper, too."""
    colours = lab([to_rgb(colour) for colour in (*figures.COLOURS, "black", "white")], seen)
    assert min(np.linalg.norm(one - two) for one, two in combinations(colours, 2)) > 15


def test_first_colours_differ_in_grey_and_all_series_in_more_than_colour():
    lightness = lab([to_rgb(colour) for colour in ("black", *figures.COLOURS[:3], "white")])[:, 0]
    assert min(abs(one - two) for one, two in combinations(lightness, 2)) > 10
    for marker in (False, True):
        styles = [series_style(number, marker) for number in range(len(figures.COLOURS) * len(figures.LINES))]
        assert len(set(map(str, styles))) == len(styles)
        shapes = [str({**style, "color": None}) for style in styles]
        assert all(len(set(shapes[n : n + 4])) == 4 for n in range(len(shapes) - 3))


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("name", [figures.SEQUENTIAL, figures.DIVERGING])
def test_lightness_of_colour_maps_rises(name, seen):
    with figure_style():
        lightness = lab(colormaps[name](np.linspace(0, 1, 32))[:, :3], seen)[:, 0]
    assert np.diff(lightness).min() > 0
    assert np.ptp(lightness) > 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--figure_format", "jpg"], "--figure_format jpg: choose png, svg, pdf"),
        (["--figure_format", "svg", "PNG"], "--figure_format PNG: choose png, svg, pdf"),
        (["--dpi", "20"], "--dpi 20: must be from 50 to 1200"),
        (["--dpi", "1201"], "--dpi 1201: must be from 50 to 1200"),
    ],
)
def test_unknown_format_or_dpi_out_of_range(words, said):
    with pytest.raises(UserError) as refused:
        parse_arguments("", FigureFlags, words)
    assert str(refused.value) == said


def test_style_is_the_same_under_a_users_own(tmp_path):
    import matplotlib

    usual = save_figure(picture(), tmp_path / "usual")[0].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert save_figure(picture(), tmp_path / "own")[0].read_bytes() == usual


def test_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    figure = picture()
    figure.axes[0].set_title("$\\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        save_figure(figure, Path(tmp_path) / "a")
    assert list(tmp_path.iterdir()) == []
