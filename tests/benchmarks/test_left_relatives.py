"""benchmarks/left_relatives.py: the rows of its table."""

from __future__ import annotations

from benchmarks.left_relatives import ROWS, Relative, by_chance, row_of, table


def test_rows_by_identity_and_coverage():
    relatives = [
        Relative(0.5, 0.8, 1.0),
        Relative(0.9, 0.1, 0.9),
        Relative(0.99, 0.5, 0.6),
        Relative(0.4, 0.8, 0.8),
        Relative(0.3, 0.9, 0.9),
        Relative(0.49, 0.7, 1.0),
    ]
    assert [row_of(each) for each in relatives] == list(range(len(ROWS)))
    lines = table({"validation": [[each] for each in relatives] + [[], relatives[::-1]], "test": [[]]})
    assert lines[2] == f"| {ROWS[0]} | 2 | 0 |"
    assert lines[-1] == "| none | 1 | 1 |"
    assert len(lines) == 2 + len(ROWS) + 1


def test_chance_falls_by_the_score():
    """E = K m n exp(-lambda S): a score of 1 / 0.267 more has e times fewer by chance; m n of them at S = 0, by K."""
    assert by_chance(0, 100, 1000) / (0.041 * 100 * 1000) - 1 < 1e-12
    assert abs(by_chance(60 + 1 / 0.267, 300, 10**6) / by_chance(60, 300, 10**6) - 1 / 2.718281828) < 1e-9
