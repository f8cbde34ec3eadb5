"""Packed and padded batches: the same tokens and labels in both, layouts, paddings, counts, empty packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.batches.collators import PackedCollator, PaddedCollator
from common.batches.packing import Pack
from common.cli import UserError
from common.files.alphabet import CLS, EOS, PAD

COUNTS = ("num_masked", "num_tokens", "sum_squared_lengths", "num_sequences")


def random_pack(lengths, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, dtype=np.int64)
    records, starts = rng.integers(0, 1000, len(lengths)), rng.integers(0, 50, len(lengths))
    return Pack(records, starts, lengths, epoch=2), rng.integers(4, 24, lengths.sum()).astype(np.uint8)


def test_packed_batch():
    pack, ids = random_pack([7, 100, 1, 42])
    batch = PackedCollator(seed=3, max_seq_length=100)(pack, ids)
    assert batch["input_ids"].shape == batch["labels"].shape == (150,)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == [0, 7, 107, 108, 150]
    assert batch["max_seqlen"] == 100
    selected = batch["labels"] != -100
    assert 0 < selected.sum() < 60
    original = torch.where(selected, batch["labels"], batch["input_ids"])
    assert np.array_equal(original.numpy(), ids)
    assert {name: batch[name] for name in COUNTS} == {
        "num_masked": int(selected.sum()),
        "num_tokens": 150,
        "sum_squared_lengths": 49 + 10_000 + 1 + 1764,
        "num_sequences": 4,
    }


def test_padded_batch_holds_what_the_packed_one_holds():
    pack, ids = random_pack([7, 100, 1, 42])
    packed = PackedCollator(seed=3, max_seq_length=100)(pack, ids)
    for arguments, width in (({}, 100), ({"pad_to_max_length": True}, 128), ({"pad_to_multiple_of": 16}, 112)):
        padded = PaddedCollator(seed=3, max_seq_length=128, **arguments)(pack, ids)
        real = padded["attention_mask"].bool()
        assert real.shape == padded["input_ids"].shape == padded["labels"].shape == (4, width)
        assert {padded[name].dtype for name in ("input_ids", "labels", "attention_mask")} == {torch.int64}
        assert real.sum(1).tolist() == [7, 100, 1, 42]
        assert (padded["attention_mask"].diff(dim=1) <= 0).all()  # padded on the right
        for name in ("input_ids", "labels"):
            assert torch.equal(padded[name][real], packed[name])
        assert (padded["input_ids"][~real] == PAD).all()
        assert (padded["labels"][~real] == -100).all()
        assert [padded[name] for name in COUNTS] == [packed[name] for name in COUNTS]


@pytest.mark.parametrize(
    ("padding", "mock"),
    [
        ({"pad_to": 150}, []),
        ({"pad_to": 151}, [1]),
        ({"pad_to": 512}, [100, 100, 100, 62]),
        ({"pad_to_multiple_of": 32}, [10]),
        ({"pad_to_multiple_of": 150}, []),
        ({"pad_to": 512, "pad_to_multiple_of": 32}, [100, 100, 100, 62]),
    ],
)
def test_mock_sequences(padding, mock):
    pack, ids = random_pack([7, 100, 1, 42])
    plain = PackedCollator(seed=3, max_seq_length=100)(pack, ids)
    batch = PackedCollator(seed=3, max_seq_length=100, **padding)(pack, ids)
    assert batch["cu_seqlens"].diff().tolist() == [7, 100, 1, 42, *mock]
    assert batch["max_seqlen"] == 100
    for name, filler in (("input_ids", PAD), ("labels", -100)):
        assert torch.equal(batch[name][:150], plain[name])
        assert batch[name].shape == (150 + sum(mock),)
        assert (batch[name][150:] == filler).all()
    assert [batch[name] for name in COUNTS] == [plain[name] for name in COUNTS]


def test_the_longest_may_be_a_mock_sequence():
    pack, ids = random_pack([3, 4])
    assert PackedCollator(seed=0, max_seq_length=100, pad_to=64)(pack, ids)["max_seqlen"] == 57


@pytest.mark.parametrize("padding", [{}, {"pad_to": 64}, {"pad_to_multiple_of": 16}])
def test_empty_pack_packed(padding):
    batch = PackedCollator(seed=0, max_seq_length=40, **padding)(Pack.empty(), np.zeros(0, dtype=np.uint8))
    size = padding.get("pad_to") or padding.get("pad_to_multiple_of") or 1
    assert (batch["input_ids"] == PAD).all()
    assert (batch["labels"] == -100).all()
    assert len(batch["input_ids"]) == len(batch["labels"]) == batch["cu_seqlens"][-1] == size
    assert batch["max_seqlen"] == min(size, 40)
    assert [batch[name] for name in COUNTS] == [0, 0, 0, 0]


@pytest.mark.parametrize(("to_longest", "width"), [(True, 2), (False, 40)])
def test_empty_pack_padded(to_longest, width):
    collator = PaddedCollator(seed=0, max_seq_length=40, pad_to_max_length=not to_longest)
    batch = collator(Pack.empty(), np.zeros(0, dtype=np.uint8))
    assert batch["input_ids"].shape == (1, width)
    assert batch["input_ids"][0, :2].tolist() == [CLS, EOS]
    assert batch["attention_mask"].sum() == 2
    assert (batch["labels"] == -100).all()
    assert [batch[name] for name in COUNTS] == [0, 0, 0, 0]


def test_bad_arguments():
    with pytest.raises(UserError, match="between 0 and 1"):
        PackedCollator(seed=0, max_seq_length=10, mlm_probability=15)
    with pytest.raises(UserError, match="between 0 and 1"):
        PaddedCollator(seed=0, max_seq_length=10, mlm_probability=-0.1)
    with pytest.raises(UserError, match="no multiple"):
        PackedCollator(seed=0, max_seq_length=10, pad_to=100, pad_to_multiple_of=32)
