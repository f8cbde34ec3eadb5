"""The batch plan: what an epoch holds, how full and how random its packs are, resuming, and its size in memory."""

from __future__ import annotations

import itertools
import json
import pickle
import time
import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest

from common.cli import UserError
from common.data import packing
from common.data.counter_rng import Permutation
from common.data.crops import fill_packs
from common.data.packing import BatchPlan, Pack, Position
from common.models.esm2.alphabet import encode
from extras.prepare.sources.fasta import read_fasta


def protein_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Tokens of `count` proteins, distributed as in UniRef (log-normal; 2 % above 1,024)."""
    drawn = np.random.default_rng(seed).lognormal(5.6, 0.66, count)
    return np.clip(drawn, 12, 36_000).astype(np.int64) + 2


def plan_of(lengths, seed=0, max_seq_length=1024, **size):
    size = size or {"tokens_per_pack": 8192}
    return BatchPlan(lambda records: lengths[records], len(lengths), seed, max_seq_length, **size)


def epoch_of(plan, epoch=0) -> list[Pack]:
    packs = itertools.takewhile(lambda item: item[0].epoch == epoch, plan.packs(Position(epoch)))
    return [pack for _, pack in packs]


def content(pack):
    return pack.epoch, pack.records.tolist(), pack.starts.tolist(), pack.lengths.tolist()


MODES = [{"tokens_per_pack": 8192}, {"sequences_per_pack": 88}]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 1000, 4097])
@pytest.mark.parametrize("key", [0, 1])
def test_permutation_is_a_bijection(size, key):
    images = Permutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_permutation_depends_on_key():
    first, second = (Permutation(4097, key)(np.arange(4097)) for key in (0, 1))
    assert (first == second).sum() < 10
    for images in (first, second):
        assert abs(np.corrcoef(np.arange(4097), images)[0, 1]) < 0.07  # 4 sigma
        assert (np.abs(np.diff(images)) == 1).sum() < 12


def test_permutation_handles_huge_range():
    size = 10**12 + 7
    images = Permutation(size, 5)(np.arange(0, size, size // 1000))
    assert len(set(images.tolist())) == len(images)
    assert 0 <= images.min() < images.max() < size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 5, 255, 256, 257, 3000, 40_000])
def test_plan_has_every_record_once_an_epoch(count, mode):
    plan = plan_of(protein_lengths(count), **mode)
    for epoch in (0, 1):
        records = np.concatenate([pack.records for pack in epoch_of(plan, epoch)])
        assert np.array_equal(np.sort(records), np.arange(count))
        assert plan.packs_per_epoch(epoch) == len(epoch_of(plan, epoch))


def test_pack_respects_token_limit():
    lengths = protein_lengths(20_000)
    for pack in epoch_of(plan_of(lengths, tokens_per_pack=2048)):
        assert 0 < pack.lengths.sum() <= 2048
        assert np.array_equal(pack.lengths, np.minimum(lengths[pack.records], 1024))


def test_crop_lies_inside_and_moves_each_epoch():
    lengths = np.full(3000, 5000)
    lengths[::2] = 300
    plan = plan_of(lengths)
    starts = []
    for epoch in (0, 1):
        packs = epoch_of(plan, epoch)
        records, start, length = (
            np.concatenate([getattr(pack, name) for pack in packs]) for name in ("records", "starts", "lengths")
        )
        assert (start >= 0).all()
        assert (start + length <= lengths[records]).all()
        starts.append(start[np.argsort(records)])
    assert (starts[0][::2] == 0).all()
    long = np.stack([epoch[1::2] for epoch in starts])
    assert (long[0] == long[1]).sum() < 8
    places = 5000 - 1024 + 1
    assert long.min() < places * 0.01
    assert long.max() > places * 0.99
    assert abs(long.mean() - (places - 1) / 2) < 4 * places / (12 * long.size) ** 0.5


def test_crop_reaches_every_start():
    plan = plan_of(np.full(4000, 12), max_seq_length=10, tokens_per_pack=100)
    starts = np.concatenate([pack.starts for pack in epoch_of(plan)])
    assert set(starts.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("mode", MODES)
def test_plan_order_depends_on_epoch_and_seed(mode):
    lengths = protein_lengths(40_000)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        packs = epoch_of(plan_of(lengths, seed, **mode), epoch)
        orders.append(np.concatenate([pack.records for pack in packs]))
        assert abs(np.corrcoef(np.arange(40_000), orders[-1])[0, 1]) < 0.3  # windows are few, blocks whole
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 15
    again = np.concatenate([pack.records for pack in epoch_of(plan_of(lengths, 0, **mode), 1)])
    assert np.array_equal(again, orders[1])


def test_window_takes_whole_blocks_from_everywhere():
    """Sequential reads for the filesystem, and yet every part of the data in every window."""
    plan = plan_of(np.full(1_000_000, 300))
    window = np.sort(plan._window(0, 3).records)
    runs = np.flatnonzero(np.diff(window) != 1)
    assert len(runs) <= packing.BLOCKS_PER_WINDOW + 2
    tenths = np.histogram(window, 10, (0, 1_000_000))[0]
    assert (tenths > 0).all()
    assert not np.array_equal(window, np.sort(plan._window(1, 3).records))


def test_plan_permutes_other_blocks_each_epoch():
    plan = plan_of(np.full(1_000_000, 300))
    begins = [plan._window_records(epoch, 3)[:: packing.RECORDS_PER_BLOCK] for epoch in (0, 1)]
    assert begins[0][0] % packing.RECORDS_PER_BLOCK != begins[1][0] % packing.RECORDS_PER_BLOCK
    steps = [np.diff(of) % plan.num_drawn for of in begins]
    assert (steps[0] == steps[1]).sum() < 3


@pytest.mark.parametrize(("tokens_per_pack", "least"), [(16_384, 0.99), (8192, 0.97)])
@pytest.mark.parametrize("count", [8000, 100_000])
def test_plan_fill_of_generated_lengths(tokens_per_pack, least, count):
    statistics = plan_of(protein_lengths(count), tokens_per_pack=tokens_per_pack).statistics()
    assert statistics.is_exact
    assert least <= statistics.fill <= 1


@pytest.mark.parametrize(("tokens_per_pack", "least"), [(16_384, 0.99), (8192, 0.97)])
def test_plan_fill_of_real_proteins(real_fasta, tokens_per_pack, least):
    lengths = np.array([len(encode(sequence)) for _, sequence in read_fasta(real_fasta)])
    for seed in range(3):
        plan = plan_of(lengths, seed, tokens_per_pack=tokens_per_pack)
        packs = epoch_of(plan)
        fill = sum(int(pack.lengths.sum()) for pack in packs) / (len(packs) * tokens_per_pack)
        assert fill >= least
        assert plan.statistics().fill == pytest.approx(fill)


def test_pack_mixes_lengths_at_random():
    """Neither the packs' mean lengths nor their order tell them from random draws."""
    lengths = np.minimum(protein_lengths(16_000), 1024)
    packs = epoch_of(plan_of(lengths, tokens_per_pack=16_384))
    means = np.array([pack.lengths.mean() for pack in packs])
    by_chance = lengths.std() / np.sqrt(len(lengths) / len(packs))
    assert 0.8 < means.std() / by_chance < 1.25
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 4 / len(means) ** 0.5


def test_window_shuffles_badly_filled_packs():
    plan = plan_of(np.full(1000, 300), tokens_per_pack=1200 * 3)  # 12 a pack, 83 packs and 4 over
    places = {int(np.argmin([len(pack.records) for pack in epoch_of(plan, epoch)])) for epoch in range(8)}
    assert len(places) > 4


@pytest.mark.parametrize("seed", range(20))
def test_fill_packs_keeps_every_sequence(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 3000))
    lengths = rng.integers(0, capacity + 1, rng.integers(0, 2000)) // rng.integers(1, 50)
    order, bounds = fill_packs(lengths, capacity)
    assert np.array_equal(np.sort(order), np.flatnonzero(lengths))
    assert bounds[0] == 0
    assert bounds[-1] == len(order)
    assert (np.diff(bounds) > 0).all()
    assert all(lengths[order[a:b]].sum() <= capacity for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(6))
def test_fill_packs_equals_reference(seed):
    """The rule, word for word: positions in checkpoints depend on every choice it makes."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(50, 3000))
    lengths = rng.integers(0, capacity + 1, 1500) // rng.integers(1, 50)
    queue, packs = np.flatnonzero(lengths).tolist(), []
    while queue:
        pack, free = [], capacity
        while queue and lengths[queue[0]] <= free:
            free -= lengths[queue[0]]
            pack.append(queue.pop(0))
        ahead = queue[:512]
        while fitting := [i for i in ahead if lengths[i] <= free]:
            best = max(fitting, key=lambda i: lengths[i])
            free -= lengths[best]
            pack.append(best)
            ahead.remove(best)
            queue.remove(best)
        packs.append(pack)
    order, bounds = fill_packs(lengths, capacity)
    assert [order[a:b].tolist() for a, b in itertools.pairwise(bounds)] == packs


def test_plan_skips_empty_records():
    lengths = protein_lengths(1000)
    lengths[[3, 500]] = 0
    for mode in MODES:
        plan = plan_of(lengths, **mode)
        records = np.concatenate([pack.records for pack in epoch_of(plan)])
        assert np.array_equal(np.sort(records), np.flatnonzero(lengths))
        assert plan.packs_per_epoch() == len(epoch_of(plan))
    with pytest.raises(UserError, match="every record"):
        next(plan_of(np.zeros(10, dtype=np.int64)).packs())


@pytest.mark.parametrize("batch", [1, 8, 88, 300, 20_000])
def test_padded_packs_are_full_except_last(batch):
    plan = plan_of(protein_lengths(40_001), sequences_per_pack=batch)
    sizes = [len(pack.records) for pack in epoch_of(plan)]
    assert len(sizes) == plan.packs_per_epoch() == -(-40_001 // batch)
    assert set(sizes[:-1]) == {batch}


@pytest.mark.parametrize("mode", MODES)
def test_plan_resumes_at_any_position(mode):
    """Three windows and the epochs' ends; the positions pass through JSON."""
    plan = plan_of(protein_lengths(50_000), **mode)
    assert plan.num_windows == 3
    everything = list(itertools.islice(plan.packs(), 2 * plan.packs_per_epoch() + 10))
    assert len({position for position, _ in everything}) == len(everything)
    rng = np.random.default_rng(0)
    for at in [0, *rng.integers(0, len(everything) - 5, 20).tolist()]:
        position = Position(**json.loads(json.dumps(asdict(everything[at][0]))))
        assert plan_of(protein_lengths(50_000), **mode).position_after(Position(), at) == position
        fresh = pickle.loads(pickle.dumps(BatchPlan(protein_lengths(50_000).take, 50_000, 0, 1024, **mode)))
        for expected, found in zip(everything[at : at + 5], fresh.packs(position), strict=False):
            assert expected[0] == found[0]
            assert content(expected[1]) == content(found[1])
        assert plan.position_after(everything[at][0], 4) == everything[at + 4][0]
    window = everything[0][0]
    end = sum((p.epoch, p.window) == (window.epoch, window.window) for p, _ in everything)
    assert plan.position_after(Position(0, 0, end), 0) == Position(0, 1, 0) == plan.position_after(Position(), end)
    epochs = [plan.epochs_before(position) for position, _ in everything]
    assert epochs == sorted(epochs)
    assert epochs[0] == 0
    assert 2 <= epochs[-1] < 2.1


@pytest.mark.parametrize("mode", MODES)
def test_position_at_end_of_epochs(mode):
    plan = plan_of(protein_lengths(50_000), **mode)
    packs = [plan.packs_per_epoch(epoch) for epoch in range(3)]
    for epochs in (1, 3.0):
        end = plan.position_at(epochs)
        assert end == Position(int(epochs))
        assert plan.count(Position(), end) == sum(packs[: int(epochs)])
        assert len(list(plan.places(Position(), end))) == sum(packs[: int(epochs)])
    for epochs in (1e-9, 0.5, 0.999999, 1 + 1 / 3):
        end = plan.position_at(epochs)
        assert plan.epochs_before(end) == pytest.approx(epochs, abs=0.6 / (packs[0] - 9) if epochs > 1e-3 else 0.01)
        walked = list(plan.places(Position(), end))
        assert len(walked) == plan.count(Position(), end) >= 1
        assert plan.position_after(Position(*walked[-1][:3]), 1) == end
    middle = plan.position_after(Position(), packs[0] + 7)
    assert plan.count(middle, Position(3)) == packs[1] - 7 + packs[2]
    assert len(list(plan.places(middle, Position(3)))) == packs[1] - 7 + packs[2]
    assert plan.count(Position(3), middle) == len(list(plan.places(Position(3), middle))) == 0


def test_count_estimates_only_packed_plans_of_many_windows(monkeypatch):
    plan = plan_of(protein_lengths(150_000))
    exact = plan.count(Position(), Position(2))
    monkeypatch.setattr(packing, "COUNTED_WINDOWS", 2 * plan.num_windows - 1)
    assert plan.count(Position(), Position(1)) == plan.packs_per_epoch()
    assert plan.count(Position(), Position(2)) == 2 * plan.packs_per_epoch() == pytest.approx(exact, rel=1e-3)
    millions = BatchPlan(lambda records: 1 / 0, 69_000_000, 0, 1024, sequences_per_pack=88)
    assert millions.count(Position(1, 0, 5), Position(1000)) == 999 * -(-69_000_000 // 88) - 5


def test_plan_resume_plans_no_earlier_window():
    lengths, asked = protein_lengths(300_000), []

    def lengths_of(records):
        asked.append(len(records))
        return lengths[records]

    plan = BatchPlan(lengths_of, len(lengths), 0, 1024, tokens_per_pack=8192)
    next(plan.packs(Position(7, plan.num_windows - 1, 3)))
    assert len(asked) == 1


@pytest.mark.parametrize("position", [Position(0, 0, 10**6), Position(0, 5, 0), Position(-1, 0, 0)])
def test_plan_rejects_position_of_other_data(position):
    with pytest.raises(UserError, match="other data"):
        plan_of(protein_lengths(1000)).position_after(position, 0)


def test_plan_without_shuffle_keeps_store_order():
    lengths = protein_lengths(40_000)
    plan = BatchPlan(lengths.take, len(lengths), 0, 1024, sequences_per_pack=16, shuffle=False)
    assert np.array_equal(np.concatenate([pack.records for pack in epoch_of(plan)]), np.arange(40_000))
    plan = BatchPlan(lengths.take, len(lengths), 0, 1024, tokens_per_pack=8192, shuffle=False)
    packs = epoch_of(plan)
    assert np.array_equal(np.sort(np.concatenate([pack.records for pack in packs])), np.arange(40_000))
    assert max(np.ptp(pack.records) for pack in packs[:100]) < 1500  # neighbours stay together


@pytest.mark.slow
def test_plan_of_69_million_records(monkeypatch):
    """Memory, time to the first pack, and the estimate of the epoch's packs against the true number."""
    lengths = protein_lengths(1 << 16)

    def lengths_of(records):
        return lengths[records & 0xFFFF]

    tracemalloc.start()
    started = time.perf_counter()
    plan = BatchPlan(lengths_of, 69_000_000, 0, 1024, tokens_per_pack=16_384)
    next(plan.packs())
    next(plan.packs(Position(3, 4000, 5)))
    assert time.perf_counter() - started < 5
    estimate = plan.packs_per_epoch()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6
    statistics = plan.statistics()
    assert not statistics.is_exact
    assert statistics.fill > 0.99
    assert estimate == pytest.approx(np.minimum(lengths, 1024).mean() * 69e6 / 16_384 / statistics.fill, rel=0.005)
    assert estimate == BatchPlan(lengths_of, 69_000_000, 0, 1024, tokens_per_pack=16_384).packs_per_epoch()

    small = BatchPlan(lengths_of, 500_000, 0, 1024, tokens_per_pack=16_384)
    exact = small.packs_per_epoch()
    monkeypatch.setattr(packing, "SAMPLED_WINDOWS", 10)
    sampled = BatchPlan(lengths_of, 500_000, 0, 1024, tokens_per_pack=16_384).statistics()
    assert not sampled.is_exact
    assert sampled.packs == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_per_pack": 1000}, "1000 tokens a pack do not hold"),
        ({"sequences_per_pack": 0}, "at least 1 sequence"),
        ({"tokens_per_pack": 8192, "max_seq_length": 0}, "max_seq_length"),
    ],
)
def test_plan_rejects_impossible_sizes(arguments, message):
    with pytest.raises(UserError, match=message):
        plan_of(protein_lengths(10), **arguments)
    with pytest.raises(UserError, match="no record"):
        plan_of(protein_lengths(0))
