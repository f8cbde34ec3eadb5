"""extras/inference/encoder.py: every residue once, from a window that sees as much as can be to both of its sides."""

from __future__ import annotations

import pytest

from extras.inference.encoder import windows


@pytest.mark.parametrize("longest", [6, 7, 62, 1022])
@pytest.mark.parametrize("times", [0.5, 1, 1.01, 1.5, 2, 2.3, 7.7])
def test_windows_use_each_residue_once_near_a_centre(longest, times):
    residues = max(1, int(longest * times))
    found = list(windows(residues, longest))
    taken = [window.start + n for window in found for n in range(window.begin, window.end)]
    assert taken == list(range(residues))
    assert {window.length for window in found} == {min(residues, longest)}
    for window in found:
        assert 0 <= window.start <= residues - window.length
        # Away from the protein's own ends, a quarter of a window is seen on both sides.
        if window.start:
            assert window.begin >= longest // 4 - 1
        if window.start + window.length < residues:
            assert window.length - window.end >= longest // 4 - 1
