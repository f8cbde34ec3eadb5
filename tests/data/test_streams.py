"""Files read as they are: every protein once an epoch, the same batches for everybody, resumable at any step."""

from __future__ import annotations

import json
from itertools import islice, takewhile

import numpy as np
import pytest

from common.cli import UserError
from common.data.collators import MaskingCollator
from common.data.loader import TrainLoader, merge_positions
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.sources.streams import Stream, StreamedOrder, StreamPosition
from tests.data.stream_fixtures import PACKED, PADDED, first_epoch, plan_of, proteins, texts_of, write


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.fasta", "a.fa.gz"]
)
@pytest.mark.parametrize("packing", [PACKED, PADDED])
def test_stream_reads_every_protein_once_an_epoch(tmp_path, name, packing):
    plan = plan_of(write(tmp_path / name, proteins()), **packing)
    assert sorted(first_epoch(plan)) == sorted(proteins())


SHAPES = [(1, 1000, 4), (1, 50, 4), (3, 20, 2), (40, 5, 4), (3, 99, 5)]


@pytest.mark.parametrize(("files", "row_group", "packs"), SHAPES)
def test_assignment_covers_every_row_once(tmp_path, files, row_group, packs):
    for number, part in enumerate(np.array_split(proteins(), files)):
        write(tmp_path / f"train-{number:05d}.parquet", part.tolist(), row_group=row_group)
    plan = plan_of(tmp_path, packs)
    assert sorted(first_epoch(plan)) == sorted(proteins())
    for epoch in (0, 1):
        dealt = sorted(s for stream in range(plan.num_streams) for s in plan.shares(stream, epoch))
        whole = [unit for unit, part, parts in dealt if part == 0]
        assert whole == list(range(len(plan.units)))  # each unit, and all its parts
        assert all((unit, p, parts) in dealt for unit, _, parts in dealt for p in range(parts))
    if files == 40:
        assert plan.shares(0, 0) != plan.shares(0, 1), "the same files for the same stream in every epoch"


def test_window_is_independent_of_read_blocks(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", proteins(), row_group=600)
    packs = [ids for (_, ids, _), _ in zip(Stream(plan_of(path, 1), 0), range(40), strict=False)]
    monkeypatch.setattr("extras.prepare.sources.parquet_texts.ROWS_AT_ONCE", 7)
    again = [ids for (_, ids, _), _ in zip(Stream(plan_of(path, 1), 0), range(40), strict=False)]
    assert all(np.array_equal(a, b) for a, b in zip(packs, again, strict=True))


@pytest.mark.parametrize("window_tokens", [3000, 1 << 20])
def test_stream_resumes_at_any_position(tmp_path, monkeypatch, window_tokens):
    monkeypatch.setattr(
        "extras.prepare.sources.streams.WINDOW_TOKENS", window_tokens
    )  # several windows in a unit, or one
    monkeypatch.setattr("extras.prepare.sources.streams.PACKS_PER_WINDOW", 2)
    plan = plan_of(write(tmp_path / "a.parquet", proteins(200)), 1)
    stream = Stream(plan, 0)
    made = [next(stream) for _ in range(60)]  # more than an epoch
    assert made[-1][0].epoch > 0
    for done in range(1, 60):
        pack, ids, position = next(Stream(plan, 0, made[done - 1][2]))
        assert np.array_equal(ids, made[done][1])
        assert np.array_equal(pack.records, made[done][0].records)
        assert position == made[done][2]


def steps_of(plan, packs: int, number: int, ranks: int = 1, workers: int = 0, first: int = 0, position=None):
    """[(input_ids and labels of each pack of the step, in the order of the packs; position)], over all ranks."""
    loaders = [
        TrainLoader(
            *(StreamedOrder(plan, packs), MaskingCollator(ESM2_TOKENS, 0), Mesh(r, ranks), first, position, number),
            num_workers=workers,
        )
        for r in range(ranks)
    ]
    steps = []
    for of_ranks in zip(*loaders, strict=True):
        batches = [None] * packs
        for rank, step in enumerate(of_ranks):
            batches[rank::ranks] = [(b["input_ids"].tolist(), b["labels"].tolist()) for b in step.micro_batches]
        steps.append((batches, merge_positions([step.position for step in of_ranks])))
    return steps


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])  # 12 row groups: two lanes; one file: one lane
def test_streamed_order_is_independent_of_ranks_and_workers(tmp_path, name):
    plan = plan_of(write(tmp_path / name, proteins()))
    expected = steps_of(plan, 4, 30)
    for ranks, workers in ((2, 0), (4, 0), (1, 1), (2, 2), (1, 3)):
        assert steps_of(plan, 4, 30, ranks, workers) == expected
    assert len({str(batches) for batches, _ in expected}) == 30


def test_streamed_order_resumes_on_any_ranks_and_workers(tmp_path):
    plan = plan_of(write(tmp_path / "a.parquet", proteins()))
    whole = steps_of(plan, 4, 40)
    for done, ranks, workers in ((1, 2, 0), (7, 1, 2), (20, 4, 0), (33, 2, 1)):
        position = json.loads(json.dumps(whole[done - 1][1]))  # as a checkpoint keeps it
        went_on = steps_of(plan, 4, 40 - done, ranks, workers, first=done, position=position)
        assert [batches for batches, _ in went_on] == [batches for batches, _ in whole[done:]]


@pytest.mark.parametrize(("ranks", "cp_size"), [(1, 1), (2, 1), (4, 2)])
def test_streamed_order_tracks_own_streams_after_resume(tmp_path, ranks, cp_size):
    """What it would have to send at a save; the streams of all ranks together are all there are."""
    plan = plan_of(write(tmp_path / "a.parquet", proteins()))
    position = steps_of(plan, 4, 7)[-1][1]
    assert len(position) == plan.num_streams == 8
    order, parts = StreamedOrder(plan, 4), []
    for rank in range(ranks):
        mesh = Mesh(rank, ranks, cp_size)
        (step,) = TrainLoader(order, MaskingCollator(ESM2_TOKENS, 0), mesh, 7, position, 1)
        assert sorted(int(stream) % 4 for stream in step.position) == sorted(
            2 * list(range(mesh.dp_rank, 4, mesh.dp_size))
        )
        parts.append(step.position)
    (after,) = (position for _, position in steps_of(plan, 4, 1, first=7, position=position))
    assert merge_positions(parts) == after
    assert after.keys() == position.keys()


LONG = {"seed": 3, "max_seq_length": 4000, "tokens_per_pack": 4096}


@pytest.fixture
def small_windows(monkeypatch):
    """About 31 proteins, or 4,960 tokens."""
    for name, value in (("WINDOW_TOKENS", 8000), ("PACKS_PER_WINDOW", 1), ("LONG_PROTEIN", 160)):
        monkeypatch.setattr(f"extras.prepare.sources.streams.{name}", value)


def lengths_of(count: int, long: int) -> list[str]:
    """Proteins of 50 residues, of which a third in the middle have `long`."""
    third = range(count // 3, 2 * count // 3)
    return ["MKVLAGTYRS" * ((long if number in third else 50) // 10) for number in range(count)]


@pytest.mark.parametrize("rows_at_once", [7, 4096])
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_window_has_fewer_long_proteins(tmp_path, monkeypatch, small_windows, name, rows_at_once):
    monkeypatch.setattr("extras.prepare.sources.parquet_texts.ROWS_AT_ONCE", rows_at_once)
    texts = [*lengths_of(300, 1000), "M" * 9000, *lengths_of(60, 50)]
    plan = plan_of(write(tmp_path / name, texts, row_group=999), 1, **LONG)
    stream, held, packs = Stream(plan, 0), [], []
    for pack, ids, position in stream:
        if pack.epoch > 0:
            break
        packs.append((ids.tolist(), list(position)))
        held.append((len(stream._buffer.ids), len(stream._buffer.window.records)))
    assert max(records for _, records in held) == plan.window_records
    assert max(tokens for tokens, _ in held) <= plan.window_tokens
    assert sum(len(ids) for ids, _ in packs) == sum(min(len(text) + 2, 4000) for text in texts)
    for (_, position), (ids, _) in zip(packs, packs[1:], strict=False):  # from every position
        assert next(Stream(plan, 0, StreamPosition.of(position)))[1].tolist() == ids


def test_window_of_usual_proteins_equals_earlier_version(tmp_path, monkeypatch, small_windows):
    """A bound that does not bite changes no bit; nor does holding crops alone."""
    texts = [*proteins(300), "MKVLA" * 2000, *lengths_of(90, 120)]
    plan = plan_of(write(tmp_path / "a.csv", texts), 1)
    some = [(ids.tolist(), pack.starts.tolist()) for pack, ids, _ in islice(Stream(plan, 0), 100)]
    monkeypatch.setattr("extras.prepare.sources.streams.LONG_PROTEIN", 1 << 40)
    monkeypatch.setattr("extras.prepare.sources.streams.Block.cropped", lambda block, *_: block)
    assert [(ids.tolist(), pack.starts.tolist()) for pack, ids, _ in islice(Stream(plan, 0), 100)] == some


def test_stream_resumes_earlier_versions_position(tmp_path, monkeypatch, small_windows):
    """In the middle of a window that would have fewer proteins now: to its end as it was, then as they are now."""
    texts = lengths_of(300, 1000)
    plan = plan_of(write(tmp_path / "a.csv", texts), 1, **LONG)
    with monkeypatch.context() as before:
        before.setattr("extras.prepare.sources.streams.LONG_PROTEIN", 1 << 40)
        old = [(ids.tolist(), list(position)[:4]) for _, ids, position in islice(Stream(plan, 0), 30)]
    number = next(n for n, (_, position) in enumerate(old) if position[2] >= 90 and position[3] == 2)
    assert len(StreamPosition.of(json.loads(json.dumps(old[number][1])))) == 5
    stream = Stream(plan, 0, StreamPosition.of(old[number][1]))
    went_on = [ids.tolist() for _, ids, _ in islice(stream, 3)]
    assert went_on == [ids for ids, _ in old[number + 1 : number + 4]]
    left = went_on + [ids.tolist() for pack, ids, _ in takewhile(lambda made: made[0].epoch == 0, stream)]
    done = [ids for ids, _ in old[: number + 1]]
    assert sorted(texts_of(np.array(sum(done + left, [])))) == sorted(texts)


def test_streamed_order_rejects_other_global_batch(tmp_path):
    path = write(tmp_path / "a.csv", proteins())
    position = steps_of(plan_of(path, 4), 4, 1)[0][1]
    with pytest.raises(UserError, match="packs_per_step"):
        TrainLoader(StreamedOrder(plan_of(path, 2), 2), MaskingCollator(ESM2_TOKENS, 0), position=position)


def test_stream_changes_masks_not_proteins_each_epoch(tmp_path):
    plan = plan_of(write(tmp_path / "a.csv", proteins(8)), 1)
    epochs: dict[int, list] = {}
    collate = MaskingCollator(ESM2_TOKENS, 0)
    for pack, ids, _ in Stream(plan, 0):
        if pack.epoch > 1:
            break
        epochs.setdefault(pack.epoch, []).append((sorted(texts_of(ids)), collate(pack, ids)["labels"].tolist()))
    assert sorted(t for texts, _ in epochs[0] for t in texts) == sorted(t for texts, _ in epochs[1] for t in texts)
    assert [labels for _, labels in epochs[0]] != [labels for _, labels in epochs[1]]


def test_stream_rejects_fewer_proteins_than_packs(tmp_path):
    plan = plan_of(write(tmp_path / "a.csv", proteins(3)), 8)
    with pytest.raises(UserError, match="do not have a protein for each"):
        [next(Stream(plan, index)) for index in range(8)]
