"""Numbers and positions of tokens in their sets; sequences that follow a context that was read once."""

from __future__ import annotations

import pytest
import torch

from extras.families.sets.layout import Context, SetLayout
from tests.extras.families.sets.cases import inputs_of, layout_of


def test_numbers_and_positions_count_in_the_set():
    layout = layout_of([[2, 0, 3], [1, 2]], fillers=2)
    assert layout.numbers.tolist() == [0, 0, 2, 2, 2, 0, 1, 1, 0, 0]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]


def test_without_sets_each_sequence_is_a_set():
    layout = SetLayout.of(None, torch.tensor([0, 2, 5], dtype=torch.int32), 6)
    assert layout.numbers.tolist() == [0] * 6
    assert layout.positions.tolist() == [0, 1, 0, 1, 2, 0]


def test_no_tokens():
    layout = SetLayout.of(None, torch.tensor([0], dtype=torch.int32), 0)
    assert layout.numbers.shape == layout.positions.shape == (0,)
    assert layout.attention(torch.zeros(0, 2, 3, 4), torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 8)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_following_a_context_equals_being_last_in_the_set(dtype, bound):
    """In each of two layers, whose keys differ; two sequences follow the same context. Fillers are in neither."""
    members, followers = [5, 9, 3], [8, 4]
    before = sum(members)
    layers = [inputs_of(before + sum(followers) + n, dtype) for n in (2, 2)]
    layers[1] = tuple(x.flip(0) for x in layers[0])
    context = Context(sequences=len(members), tokens=before)
    bounds = [0, 5, 14, 17]
    sets = torch.tensor([bounds, [0, 3, 3, 3]], dtype=torch.int32)
    reading = SetLayout.of(sets, sets[0], before + 2, context)
    rows = [*range(before), 0, 0]
    for n, (qkv, _, cos, sin) in enumerate(layers):
        reading.of_layer(n).attention(qkv[rows], cos[rows], sin[rows])
    assert len(context.keys_values) == 2

    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    following = SetLayout.of(None, cu_seqlens, 14, context)
    assert following.numbers.tolist() == [3] * 14
    assert following.positions.tolist() == [17 + n for n in (*range(8), *range(4), *range(2))]
    for n, (qkv, _, cos, sin) in enumerate(layers):
        together = following.of_layer(n).attention(*(x[before:] for x in (qkv, cos, sin)))
        for begin, end in ((0, 8), (8, 12)):
            chosen = [*range(before), *range(before + begin, before + end)]
            alone = layout_of([[*members, end - begin]]).attention(qkv[chosen], cos[chosen], sin[chosen])
            torch.testing.assert_close(together[begin:end], alone[before:], rtol=bound, atol=bound)
