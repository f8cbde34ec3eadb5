"""docs/afternoon.md: the files that it lists are there, and no more than an afternoon's reading."""

from __future__ import annotations

import re

from tests.conftest import ROOT

MOST_FILES, MOST_LINES = 33, 5_000


def test_afternoon_is_short():
    files = dict.fromkeys(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "afternoon.md").read_text()))
    files = [name for name in files if "/" in name or name.startswith("train_")]
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    assert len(files) > 20
    assert (len(files) <= MOST_FILES, lines <= MOST_LINES) == (True, True), f"{len(files)} files, {lines} lines"
