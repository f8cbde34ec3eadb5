"""A batch of a pack: tokens and labels, boundaries, counts, empty packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.cli import UserError
from common.data.collators import Counts, MaskingCollator, MaskRates
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
    assert Counts.of([batch]) == (int(selected.sum()), 150, 49 + 10_000 + 1 + 1764, 4, 3, 0)


def test_collator_of_empty_pack():
    batch = MaskingCollator(ESM2_TOKENS, seed=0)(Pack.empty(), np.zeros(0, dtype=np.uint8))
    assert batch["input_ids"].tolist() == [PAD]
    assert batch["labels"].tolist() == [-100]
    assert batch["predicted"].tolist() == []
    assert batch["cu_seqlens"].tolist() == [0, 1]
    assert batch["max_seqlen"] == 1
    assert Counts.of([batch]) == (0, 0, 0, 0, 0, 0)


def test_counts_sum_over_batches():
    batches = [MaskingCollator(ESM2_TOKENS, seed=0)(*random_pack(lengths)) for lengths in ([30, 20], [50], [])]
    counts = Counts.of(batches)
    assert counts.num_targets == sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert counts[1:] == (100, 900 + 400 + 2500, 3, 0, 0)
    assert Counts.of([]) == (0, 0, 0, 0, 0, 0)


def test_mask_rates_fall_linearly_to_the_last_step():
    rates = MaskRates(0.3, 0.7, 0.2, end=0.1, total_steps=5)
    found = [rates.at(step) for step in (0, 1, 2, 3, 4, 7)]  # a run may be a few steps longer than estimated
    assert [each.mlm_probability for each in found] == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.1])
    assert found[0].mlm_probability == 0.3
    assert {(each.mask_replace_prob, each.random_replace_prob) for each in found} == {(0.7, 0.2)}
    assert found[2].mask_ratio == pytest.approx(0.14)
    assert MaskRates(0.3, end=0.1).at(0).mlm_probability == 0.3  # a run of one step
    assert MaskRates().at(1000) == MaskRates()


def test_collator_masks_at_the_rate_of_the_step():
    pack, ids = random_pack([9000])
    collator = MaskingCollator(ESM2_TOKENS, 0, MaskRates(0.4, end=0.1, total_steps=11))
    batches = [collator(pack, ids, step) for step in (0, 5, 10)]
    assert [batch["num_targets"] / 9000 for batch in batches] == pytest.approx([0.4, 0.25, 0.1], rel=0.1)
    assert [batch["mask_ratio"] for batch in batches] == pytest.approx([0.32, 0.2, 0.08])
    for more, fewer in zip(batches, batches[1:], strict=False):
        assert (more["labels"] >= 0)[fewer["labels"] >= 0].all()
    evaluated = collator(pack, ids)
    assert "mask_ratio" not in evaluated  # the model computes as the exported one
    assert torch.equal(evaluated["labels"], batches[0]["labels"])
    assert MaskingCollator(ESM2_TOKENS, 0)(pack, ids, 3)["mask_ratio"] == 0.15 * 0.8


@pytest.mark.parametrize("probability", [15, -0.1])
def test_collator_rejects_bad_probability(probability):
    with pytest.raises(UserError, match="between 0 and 1"):
        MaskRates(probability)
