"""Which proteins show another's residues."""

from __future__ import annotations

import pytest

from extras.prepare.sources.copies import shows


@pytest.mark.parametrize(
    ("shown", "does"),
    [
        ("MKVLA", True),
        ("KVL", True),
        ("WWMKVLAWW", True),
        ("MXVLA", True),
        ("XXXXX", True),
        ("WWMKXLAWW", True),
        ("KVX", True),
        ("MKVLG", False),
        ("MXVLG", False),
        ("WMKVL", False),
        ("WMKVXAG", True),
        ("WMKVXGG", False),
    ],
)
def test_equal_ones_and_stretches_show_residues(shown, does):
    assert shows(shown.encode(), b"MKVLA") is does
    assert shows(b"MKVLA", shown.encode()) is does


def test_unknown_residues_of_the_asked_are_any():
    assert shows(b"MKVLA", b"MXVLA")
    assert not shows(b"MKVLA", b"MXVLG")


def test_ids_are_letters_too():
    """Bytes that mean something in a pattern, and ends of lines."""
    ids = bytes(range(64, 100)) + b"\n\\]^-"
    assert shows(ids, ids[:9] + b"\x00" + ids[10:], b"\x00")
    assert not shows(ids, ids[:9] + b"\x01\x00" + ids[11:], b"\x00")
