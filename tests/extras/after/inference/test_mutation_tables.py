"""Tables with missing values, and rows of MaveDB that have no score."""

from __future__ import annotations

import math

import pytest

from common.cli import UserError
from extras.after.inference.mutation_tables import kept_lines, kind_of, measured_of


def test_words_for_a_missing_value_are_not_measured():
    words = ("", "NA", " N/A", "nan", "NaN", "None", "null", "NULL", "<NA>", "#N/A")
    values = measured_of("y", [{"y": word} for word in (*words, "0", "-1.5")], "a.csv")
    assert all(math.isnan(value) for value in values[:-2])
    assert values[-2:] == [0, -1.5]
    with pytest.raises(UserError, match=r"a.csv, row 3: y 'absent' is not a number"):
        measured_of("y", [{"y": "1"}, {"y": "absent"}], "a.csv")


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("stops", ["p.Trp24Ter", "p.(Trp24Ter)", "W24*", "p.Trp24*", "p.Arg97ProfsTer23", "p.Ala5fs", "A5G:W24*"]),
        ("synonymous", ["_sy", "p.=", "p.(=)", "Ala24=", "p.Ala24=", "p.(Ala24=)", "A24A", "p.[Ala24=;Lys3=]"]),
        ("wild_type", ["_wt", "WT", "", " "]),
        (
            None,
            ["A24G", "p.Ala24Gly", "p.[Ala24=;Lys3Arg]", "A24_K27del", "p.Lys2_Val3insGln", "nonsense", "A24", "S5F"],
        ),
    ],
)
def test_kinds_of_rows(kind, cells):
    assert {cell: kind_of(cell) for cell in cells} == dict.fromkeys(cells, kind)


def test_rows_without_a_score_are_left_out_by_the_flag_or_refused(caplog):
    caplog.set_level("INFO")
    cells = ["p.Ala2Gly", "p.Ala2Ter", "_sy", "p.Ala2=", "_wt", "p.Ala2Val"]
    rows = [{"hgvs_pro": cell} for cell in cells]
    every = ["wild_type", "stops", "synonymous"]
    assert kept_lines(every, "hgvs_pro", rows, "a.csv") == ([2, 7], {"wild_type": 1, "stops": 1, "synonymous": 2})
    assert "a.csv: left out: 1 wild_type, 1 stops, 2 synonymous; scored: 2 rows" in caplog.text
    assert kept_lines(["stops"], "hgvs_pro", rows[:2] + rows[3:4], "a.csv") == ([2, 4], {"stops": 1})
    for kinds, said in (
        ([], "row 3: 'p.Ala2Ter' is a stop or frameshift, which has no score: give --leave_out stops"),
        (["stops"], "row 4: '_sy' is a synonymous variant, which has no score: give --leave_out synonymous"),
        (["stops", "synonymous"], "row 6: '_wt' is the wild type, which has no score: give --leave_out wild_type"),
    ):
        with pytest.raises(UserError, match=said):
            kept_lines(kinds, "hgvs_pro", rows, "a.csv")
    with pytest.raises(UserError, match="--leave_out stops leaves no row"):
        kept_lines(["stops"], "hgvs_pro", rows[1:2], "a.csv")
