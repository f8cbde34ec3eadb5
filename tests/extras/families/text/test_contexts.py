"""Batches of text: each token asks for the next one of its own sequence, and counts say what is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.crops import Pack
from extras.families.text.contexts import CausalCollator
from extras.families.text.tokenizers import Pieces

IDS = np.arange(40000, 40000 + 23, dtype=np.uint16)  # two contexts of 8 and a shorter one
PIECES = Pieces(np.array([7, 8, 9]), np.array([3, 0, 0]), np.array([5, 12, 6])).cut(8)
PACK = Pack(*PIECES, epoch=0)


def test_pieces_cut_at_contexts():
    assert PIECES.lengths.tolist() == [5, 3, 8, 1, 6]
    assert PIECES.records.tolist() == [7, 8, 8, 8, 9]
    assert PIECES.starts.tolist() == [3, 0, 3, 11, 0]


@pytest.mark.parametrize(("document_masks", "bounds"), [(False, [0, 8, 16, 23]), (True, [0, 5, 8, 16, 17, 23])])
def test_causal_collator_labels_are_the_next_token(document_masks, bounds):
    batch = CausalCollator(8, document_masks)(PACK, IDS)
    assert batch["cu_seqlens"].tolist() == bounds
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["input_ids"].tolist() == IDS.tolist()
    expected = [*IDS[1:].tolist(), -100]
    for end in bounds[1:]:
        expected[end - 1] = -100
    assert batch["labels"].tolist() == expected
    lengths = np.diff(bounds)
    assert batch["max_seqlen"] == 8
    assert batch["num_targets"] == 23 - len(lengths)
    assert batch["num_tokens"] == 23
    assert batch["sum_squared_lengths"] == (lengths**2).sum()
    assert batch["num_sequences"] == 3
    assert batch["num_unknown"] == 0


@pytest.mark.parametrize("document_masks", [False, True])
def test_causal_collator_of_empty_pack(document_masks):
    batch = CausalCollator(8, document_masks)(Pack.empty(), IDS[:0])
    assert batch["labels"].tolist() == [-100]
    assert batch["cu_seqlens"].tolist() == [0, 1]
    assert not any(batch[name] for name in ("num_targets", "num_tokens", "sum_squared_lengths", "num_sequences"))
