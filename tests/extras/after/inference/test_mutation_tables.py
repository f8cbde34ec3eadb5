"""Tables with missing values."""

from __future__ import annotations

import math

import pytest

from common.cli import UserError
from extras.after.inference.mutation_tables import measured_of


def test_words_for_a_missing_value_are_not_measured():
    words = ("", "NA", " N/A", "nan", "NaN", "None", "null", "NULL", "<NA>", "#N/A")
    values = measured_of("y", [{"y": word} for word in (*words, "0", "-1.5")], "a.csv")
    assert all(math.isnan(value) for value in values[:-2])
    assert values[-2:] == [0, -1.5]
    with pytest.raises(UserError, match=r"a.csv, row 3: y 'absent' is not a number"):
        measured_of("y", [{"y": "1"}, {"y": "absent"}], "a.csv")
