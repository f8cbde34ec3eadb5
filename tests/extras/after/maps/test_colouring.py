"""Colours of classes and numbers: what is counted, grouped and refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex

from common.cli import UserError
from common.figures import COLOURS
from extras.after.maps.colouring import MISSING, OTHER, of_classes, of_table
from tests.extras.after.downstream.tables import write_table

IDS = [f"P{n}" for n in range(6)]


def test_frequent_classes_have_a_colour_and_the_others_share_one(caplog):
    caplog.set_level(logging.INFO)
    texts = [name for place, name in enumerate("abcdefgh") for _ in range(9 - place)] + ["", ""]
    colouring = of_classes("family", texts)
    assert list(colouring.shown.items()) == [("a", 9), ("b", 8), ("c", 7), ("d", 6), ("e", 5), ("f", 4)]
    assert (colouring.others, colouring.missing) == (3 + 2, 2)
    assert colouring.legend()[-2:] == [("other classes", OTHER, 5), ("no value", MISSING, 2)]
    assert sum(count for *_, count in colouring.legend()) == len(texts)
    colours = colouring.of_points()
    assert (colours[0], colours[-3], colours[-1]) == (COLOURS[0], OTHER, MISSING)
    assert "family: 8 classes: the 6 most frequent have a colour" in caplog.text


def test_numbers_have_shades_between_the_percentiles(tmp_path):
    ids = [f"P{n}" for n in range(101)]
    rows = [(name, n if n < 100 else 1e9) for n, name in enumerate(ids[1:], 1)]
    colouring = of_table(str(write_table(tmp_path / "a.csv", ["id", "y"], rows)), "id", "y", None, ids)
    values = np.array([value for _, value in rows])
    assert colouring.limits() == tuple(np.percentile(values, (1, 99)))
    colours = colouring.of_points()
    assert (colours[0], colouring.missing) == (MISSING, 1)
    assert [colours[1], colours[-1]] == [to_hex(colormaps["viridis"](end)) for end in (0.0, 1.0)]


def test_values_that_are_no_numbers_are_classes_and_rows_are_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [("P0", "membrane"), ("P1", "NA"), ("P2", ""), ("P3", "soluble"), ("stranger", "soluble")]
    colouring = of_table(str(write_table(tmp_path / "a.csv", ["id", "y"], rows)), "id", "y", None, IDS)
    assert colouring.texts == ["membrane", "", "", "soluble", "", ""]
    assert "1 of 5 ids are not embedded, 'stranger' say: left out" in caplog.text
    assert "4 of 6 proteins have no y: grey" in caplog.text


@pytest.mark.parametrize(("asked", "classes"), [(None, False), ("classes", True), ("numbers", False)])
def test_numbers_can_be_classes(tmp_path, asked, classes):
    table = write_table(tmp_path / "a.csv", ["id", "y"], [(name, n % 3) for n, name in enumerate(IDS)])
    assert (of_table(str(table), "id", "y", asked, IDS).numbers is None) == classes


@pytest.mark.parametrize(
    ("names", "rows", "asked", "said"),
    [
        (["id", "z"], [("P0", 1)], None, "no column 'y', only 'id', 'z'"),
        (["name", "y"], [("P0", 1)], None, "no column 'id'"),
        (["id", "y"], [("Q0", 1), ("Q1", 2)], None, "none of its 2 ids is embedded, 'Q0' say"),
        (["id", "y"], [("P0", 1), ("P0", 2)], None, "row 3: a second row of 'P0': leave one"),
        (["id", "y"], [("P0", ""), ("Q1", 3)], None, "the column 'y' has no value of an embedded protein"),
        (["id", "y"], [("P0", "high"), ("P1", 3)], "numbers", "'high' is not a number: correct it; or, for classes"),
    ],
)
def test_table_that_does_not_fit_is_refused_in_a_line(tmp_path, names, rows, asked, said):
    with pytest.raises(UserError) as error:
        of_table(str(write_table(tmp_path / "a.csv", names, rows)), "id", "y", asked, IDS)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
