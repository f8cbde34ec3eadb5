"""A batch of a pack: tokens and labels, boundaries, counts, empty packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.cli import UserError
from common.data.collators import Counts, MaskingCollator
from common.data.packing import Pack
from common.models.esm2.alphabet import ESM2_TOKENS, PAD, UNK


def random_pack(lengths, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, dtype=np.int64)
    records, starts = rng.integers(0, 1000, len(lengths)), rng.integers(0, 50, len(lengths))
    return Pack(records, starts, lengths, epoch=2), rng.integers(4, 24, lengths.sum()).astype(np.uint8)


def test_collator_batch_of_a_pack():
    pack, ids = random_pack([7, 100, 1, 42])
    ids[[3, 20, 21]] = UNK
    batch = MaskingCollator(ESM2_TOKENS, seed=3)(pack, ids)
    assert batch["input_ids"].shape == batch["labels"].shape == (150,)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == [0, 7, 107, 108, 150]
    assert batch["max_seqlen"] == 100
    selected = batch["labels"] != -100
    assert 0 < selected.sum() < 60
    asked = batch["predicted"].tolist()
    assert len(asked) % 64 == 0
    assert asked == selected.nonzero().flatten().tolist() + [-1] * (len(asked) - int(selected.sum()))
    original = torch.where(selected, batch["labels"], batch["input_ids"])
    assert np.array_equal(original.numpy(), ids)
    assert Counts.of([batch]) == (int(selected.sum()), 150, 49 + 10_000 + 1 + 1764, 4, 3)


def test_collator_of_empty_pack():
    batch = MaskingCollator(ESM2_TOKENS, seed=0)(Pack.empty(), np.zeros(0, dtype=np.uint8))
    assert batch["input_ids"].tolist() == [PAD]
    assert batch["labels"].tolist() == [-100]
    assert batch["predicted"].tolist() == []
    assert batch["cu_seqlens"].tolist() == [0, 1]
    assert batch["max_seqlen"] == 1
    assert Counts.of([batch]) == (0, 0, 0, 0, 0)


def test_counts_sum_over_batches():
    batches = [MaskingCollator(ESM2_TOKENS, seed=0)(*random_pack(lengths)) for lengths in ([30, 20], [50], [])]
    counts = Counts.of(batches)
    assert counts.num_targets == sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert counts[1:] == (100, 900 + 400 + 2500, 3, 0)
    assert Counts.of([]) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("probability", [15, -0.1])
def test_collator_rejects_bad_probability(probability):
    with pytest.raises(UserError, match="between 0 and 1"):
        MaskingCollator(ESM2_TOKENS, seed=0, mlm_probability=probability)
