"""Which tokens of a pack each rank of a context-parallel group has, in both layouts."""

from __future__ import annotations

import numpy as np
import pytest

from extras.speed.context_parallel import CpSplit

LENGTHS = np.array([1, 2, 3, 7, 8, 9, 16, 31, 64, 8000])


def tokens_of(slices: CpSplit, rank: int) -> list[list[int]]:
    """Positions of each sequence's real tokens on a rank, in their order there."""
    positions, bounds, real = slices.positions(rank), slices.bounds()[rank], slices.real()[rank]
    return [positions[start : start + count].tolist() for start, count in zip(bounds, real, strict=False)]


def test_cp_split_matches_the_guide():
    """The recipe's own example: DP0 has 1..8, DP1 9..16, cp 2; tokens are numbered from 1 there."""
    slices = CpSplit(np.array([8]), 2, "dual_chunk", 4)
    for first, expected in ((1, [{1, 2, 7, 8}, {3, 4, 5, 6}]), (9, [{9, 10, 15, 16}, {11, 12, 13, 14}])):
        assert [{first + p for p in slices.positions(rank).tolist()} for rank in range(2)] == expected


def test_cp_split_splits_each_sequence_separately():
    """And its positions begin anew: rank 0 of [0, 4, 8] has [0, 3, 0, 3], tokens 0, 3, 4, 7 of the pack."""
    slices = CpSplit(np.array([4, 4]), 2, "dual_chunk", 4)
    assert [slices.positions(rank).tolist() for rank in range(2)] == [[0, 3, 0, 3], [1, 2, 1, 2]]
    pack = [slices.positions(rank) + 4 * slices.sequences(rank) for rank in range(2)]
    assert [tokens.tolist() for tokens in pack] == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_cp_split_gives_each_rank_two_chunks():
    slices = CpSplit(np.array([16, 5]), 4, "dual_chunk", 8)
    assert [slices.positions(rank).tolist() for rank in range(4)] == [
        [0, 1, 14, 15, 0, 7],
        [2, 3, 12, 13, 1, 6],
        [4, 5, 10, 11, 2, 5],
        [6, 7, 8, 9, 3, 4],
    ]
    assert [tokens_of(slices, rank)[1] for rank in range(4)] == [[0], [1], [2], [3, 4]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["dual_chunk", "padded", "contiguous"])
def test_cp_split_puts_each_token_on_one_rank_before_padding(size, layout):
    multiple = {"dual_chunk": 2 * size, "padded": 16 * size, "contiguous": 1}[layout]
    slices = CpSplit(LENGTHS, size, "contiguous" if layout == "contiguous" else "dual_chunk", multiple)
    parts = [tokens_of(slices, rank) for rank in range(size)]
    for number, length in enumerate(LENGTHS):
        assert sorted(p for part in parts for p in part[number]) == list(range(length))
        assert all(part[number] == sorted(part[number]) for part in parts)
    counts = slices.counts()
    if layout == "contiguous":
        assert (counts.max(0) - counts.min(0) <= 1).all()
        assert counts.sum() == LENGTHS.sum()
    else:
        assert (counts == counts[0]).all(), "every rank has as many tokens"
        assert (counts.sum(0) % multiple == 0).all()
        assert (counts.sum(0) - LENGTHS < multiple).all()
    for rank in range(size):
        positions, of, bounds = slices.positions(rank), slices.sequences(rank), slices.bounds()[rank]
        padding = positions >= LENGTHS[of]
        for start, count, end in zip(bounds, slices.real()[rank], bounds[1:], strict=False):
            assert not padding[start : start + count].any()
            assert padding[start + count : end].all()
