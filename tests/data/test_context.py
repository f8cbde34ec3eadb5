"""A rank's slices of a batch: the same packs on every rank of a group, each token once, counted once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.collators import IGNORE, Counts, MaskingCollator, MaskRates
from common.data.crops import Pack
from common.data.loader import PlannedOrder, TrainLoader
from common.data.packing import BatchPlan
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS, MASK, PAD
from extras.prepare.sources.streamed_data import MemoryStore
from extras.speed.cp_batches import SlicingCollator

LENGTHS = np.array([40, 3, 1, 77, 22])


def a_pack() -> tuple[Pack, np.ndarray]:
    ids = np.random.default_rng(0).integers(4, 24, LENGTHS.sum()).astype(np.uint8)
    return Pack(np.arange(5), np.zeros(5, dtype=np.int64), LENGTHS, epoch=2), ids


@pytest.mark.parametrize(("layout", "multiple"), [("dual_chunk", 4), ("dual_chunk", 16), ("contiguous", 1)])
def test_slicing_collator_covers_the_batch(layout, multiple):
    collator = MaskingCollator(ESM2_TOKENS, seed=3)
    whole = collator(*a_pack())
    slices = [SlicingCollator(collator, Mesh(rank, 2, 2), layout, multiple, PAD, MASK) for rank in range(2)]
    parts = [collate(*a_pack()) for collate in slices]
    back = {name: torch.full_like(whole[name], -1) for name in ("input_ids", "labels")}
    for rank, part in enumerate(parts):
        bounds, real = part["cp_bounds"][rank], part["cp_real"][rank]
        assert part["cu_seqlens"].tolist() == bounds.tolist()
        taken = torch.zeros(len(part["input_ids"]), dtype=torch.bool)
        asked = part["predicted"][part["predicted"] >= 0]
        assert torch.equal(asked, (part["labels"] != IGNORE).nonzero().flatten())
        for number, start in enumerate(whole["cu_seqlens"][:-1]):
            own = slice(int(bounds[number]), int(bounds[number] + real[number]))
            for name in back:
                back[name][start + part["cp_positions"][own]] = part[name][own]
            taken[own] = True
        assert (part["input_ids"][~taken] == PAD).all()
        assert (part["labels"][~taken] == IGNORE).all()
        assert part["cp_lengths"].tolist() == LENGTHS.tolist()
        starts = whole["cu_seqlens"].tolist()
        masks = [int((whole["input_ids"][a:b] == MASK).sum()) for a, b in zip(starts, starts[1:], strict=False)]
        assert part["cp_masks"].tolist() == masks
    for name, values in back.items():
        assert torch.equal(values, whole[name])
    assert Counts.of(parts) == Counts.of([whole])


def test_slicing_collator_slices_the_masks_of_the_step():
    collator = MaskingCollator(ESM2_TOKENS, 3, MaskRates(0.5, end=0.1, total_steps=3))
    for step in range(3):
        whole = collator(*a_pack(), step)
        parts = [SlicingCollator(collator, Mesh(r, 2, 2), "contiguous", 1, PAD, MASK)(*a_pack(), step) for r in (0, 1)]
        assert sum(part["num_targets"] for part in parts) == whole["num_targets"]
        assert {part["mask_ratio"] for part in parts} == {whole["mask_ratio"]}
        assert whole["mask_ratio"] == pytest.approx((0.5 - 0.2 * step) * 0.8)
        for part in parts:
            assert part["cp_masks"].sum() == (whole["input_ids"] == MASK).sum()


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_slicing_collator_fills_empty_pack(layout):
    multiple = 1 if layout == "contiguous" else 8
    for rank in range(4):
        collator = SlicingCollator(MaskingCollator(ESM2_TOKENS, 0), Mesh(rank, 4, 4), layout, multiple, PAD, MASK)
        batch = collator(Pack.empty(), np.zeros(0, dtype=np.uint8))
        assert (batch["input_ids"] == PAD).all()
        assert len(batch["input_ids"]) >= 1
        assert batch["cu_seqlens"][-1] == len(batch["input_ids"])
        assert Counts.of([batch]) == Counts(0, 0, 0, 0, 0)


def test_loader_reads_each_record_once_with_context_parallelism():
    lengths = np.random.default_rng(1).integers(3, 90, 200)
    store = MemoryStore(np.full(lengths.sum(), 5, dtype=np.uint8), np.append(0, lengths.cumsum()))
    plan = BatchPlan(store.lengths, len(store), seed=1, max_seq_length=96, tokens_per_pack=256)
    order = PlannedOrder(store, plan, 2, plan.position_at(1.0))
    seen = []
    for rank in range(4):
        seen.append([])
        list(TrainLoader(order, _Recorder(seen[rank]), Mesh(rank, 4, 2)))
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(200))


class _Recorder:
    """Notes the records of the packs it is given."""

    def __init__(self, records: list):
        self.records, self.collator = records, MaskingCollator(ESM2_TOKENS, 0)

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None):
        self.records += pack.records.tolist()
        return self.collator(pack, ids, step)
