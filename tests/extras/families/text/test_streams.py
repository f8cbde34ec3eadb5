"""Text read as it is: every token once an epoch and in order, the same contexts for everybody, resumable anywhere."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from common.cli import UserError
from common.data.loader import TrainLoader, merge_positions
from common.distributed.world import Mesh
from extras.families.text.contexts import CausalCollator
from extras.prepare.sources.sequence_files import ROW_BITS
from extras.prepare.sources.streams import StreamedOrder
from tests.extras.families.text.fixtures import decoded, flow, plan_of, texts, write_c4, write_jsonl

EACH = 40  # documents in a file


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """A few documents each: contexts, packs and epochs end in all possible ways within windows and between them."""
    monkeypatch.setattr("extras.families.text.streams.WINDOW_BYTES", 700)
    monkeypatch.setattr("extras.families.text.streams.WINDOW_DOCUMENTS", 9)


@pytest.mark.parametrize("packs", [1, 2, 5])  # 5: more streams than files, which share them by rows
def test_text_stream_reads_every_token_once_in_order(tmp_path, packs):
    expected = write_c4(tmp_path, each=EACH)
    plan = plan_of(tmp_path, packs, "en")
    assert plan.num_streams == (2 if packs == 1 else packs)
    read = {0: [], 1: []}
    for index in range(plan.num_streams):
        found = iter(flow(islice(plan.stream(index), 200)))
        for epoch, documents in read.items():
            for unit, part, parts in plan.shares(index, epoch):
                own = sorted((unit << ROW_BITS) + row for row in range(part, EACH, parts))
                some = list(islice(found, len(own)))
                assert sorted(record for record, _ in some) == own, "a document of another stream, or one twice"
                documents += [decoded(tokens) for _, tokens in some]
    assert sorted(read[0]) == sorted(read[1]) == sorted(expected)
    assert read[0] != read[1], "the same order in every epoch"


def test_window_is_independent_of_read_blocks(tmp_path, monkeypatch):
    table = pa.table({"text": texts(200)})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    packs = [ids.tolist() for _, ids, _ in islice(plan_of(tmp_path, 1).stream(0), 60)]
    monkeypatch.setattr("extras.prepare.sources.parquet_texts.ROWS_AT_ONCE", 7)
    assert [ids.tolist() for _, ids, _ in islice(plan_of(tmp_path, 1).stream(0), 60)] == packs


def test_stream_resumes_at_any_position(tmp_path):
    """In a window, at its end, and where a document is longer than a context, a pack or a window."""
    path = write_jsonl(tmp_path / "a.jsonl", [*texts(20), "long " * 300, "", *texts(20, seed=2), "longer " * 200])
    plan = plan_of(path, 1)
    made = list(islice(plan.stream(0), 60))
    assert made[-1][2].epoch > 0
    for (*_, position), (pack, ids, after) in zip(made, made[1:], strict=False):
        again, same, then = next(plan.stream(0, json.loads(json.dumps(position))))
        assert np.array_equal(same, ids)
        assert all(np.array_equal(getattr(again, name), getattr(pack, name)) for name in ("records", "starts"))
        assert then == after


def steps_of(plan, packs: int, number: int, ranks: int = 1, workers: int = 0, first: int = 0, position=None):
    """[(input_ids and labels of each pack of a step, in the order of the packs; position)], over all ranks."""
    order, collator = StreamedOrder(plan, packs), CausalCollator(plan.context, document_masks=True)
    loaders = [
        TrainLoader(order, collator, Mesh(rank, ranks), first, position, number, num_workers=workers)
        for rank in range(ranks)
    ]
    steps = []
    for of_ranks in zip(*loaders, strict=True):
        batches = [None] * packs
        for rank, step in enumerate(of_ranks):
            batches[rank::ranks] = [
                [batch[name].tolist() for name in ("input_ids", "labels", "cu_seqlens")]
                for batch in step.micro_batches
            ]
        steps.append((batches, merge_positions([step.position for step in of_ranks])))
    return steps


def test_text_stream_is_independent_of_ranks_and_workers(tmp_path):
    write_c4(tmp_path, files=8, each=10)  # 2 lanes of 4 streams
    plan = plan_of(tmp_path, 4, "en")
    assert plan.num_streams == 8
    whole = steps_of(plan, 4, 16)
    assert len({str(batches) for batches, _ in whole}) == 16
    for ranks, workers in ((2, 0), (4, 0), (2, 2)):
        assert steps_of(plan, 4, 16, ranks, workers) == whole
    for done, ranks, workers in ((1, 2, 0), (7, 1, 2), (12, 4, 0)):
        position = json.loads(json.dumps(whole[done - 1][1]))  # as a checkpoint keeps it
        went_on = steps_of(plan, 4, 16 - done, ranks, workers, first=done, position=position)
        assert [batches for batches, _ in went_on] == [batches for batches, _ in whole[done:]]


@pytest.mark.parametrize("some", [["one", "two"], ["", "", "", ""]])
def test_text_stream_rejects_fewer_documents_than_packs(tmp_path, some):
    plan = plan_of(write_jsonl(tmp_path / "a.jsonl", some), 4)
    with pytest.raises(UserError, match="do not have a document for each of the 4 packs of a step"):
        [next(plan.stream(index)) for index in range(4)]
