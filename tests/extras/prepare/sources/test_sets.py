"""Sets of homologs: what the plan draws against a plain loop, ranks, resume, budgets, and the collator's rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from common.cli import UserError
from common.data.clusters import Clusters
from common.data.collators import FillingCollator, MaskingCollator, to_device
from common.data.counter_rng import SET_ORDER, SET_SIZE, derive_key, hash_counters
from common.data.crops import Pack
from common.data.loader import PlannedOrder, TrainLoader, bundle, unbundle
from common.data.packing import Position
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.sources.sets import SetCollator, SetPlan, SetTokens, draw_sets, set_pairs
from extras.speed.cp_batches import SlicingCollator


def clusters_of(directory, sizes: np.ndarray, seed: int = 0) -> Clusters:
    """An index of clusters of these sizes, whose members are spread over the records."""
    directory.mkdir()
    members = np.random.default_rng(seed).permutation(int(sizes.sum())).astype(np.uint32)
    np.save(directory / "members.npy", members)
    np.save(directory / "offsets.npy", np.append(0, np.cumsum(sizes)).astype(np.uint32))
    return Clusters(directory)


@pytest.fixture
def homologs(tmp_path):
    """600 clusters of 1 to 40 members, and the tokens of the records."""
    generator = np.random.default_rng(1)
    clusters = clusters_of(tmp_path / "clusters", generator.integers(1, 41, 600))
    return clusters, generator.integers(4, 150, clusters.num_records)


def plan_of(homologs, tokens="512", size=16, seed=3, longest=100, pack=1024) -> SetPlan:
    clusters, lengths = homologs
    return SetPlan(lambda records: lengths[records], clusters, seed, longest, pack, SetTokens.of(tokens), size)


def packs_of(plan, epoch=0) -> list[Pack]:
    return [window.pack(number) for window in plan.windows(epoch) for number in range(len(window))]


def sets_of(packs: list[Pack]) -> list[tuple[int, ...]]:
    """The records of each set, in the order of the packs."""
    return [tuple(pack.records[a:b].tolist()) for pack in packs for a, b in itertools.pairwise(pack.sets.tolist())]


def drawn_by_loop(homologs, cluster: int, epoch: int, tokens: int, size: int, seed: int = 3, longest: int = 100):
    """The set of a cluster, by the definition."""
    clusters, lengths = homologs
    members = clusters.members[clusters.offsets[cluster] : clusters.offsets[cluster + 1]].astype(np.int64)
    hashes = hash_counters(derive_key(seed, epoch, SET_ORDER), members)
    members = [member for _, member in sorted(zip(hashes.tolist(), members.tolist(), strict=True))]
    share = int(hash_counters(derive_key(seed, epoch, SET_SIZE), np.array([cluster]))[0]) / 2**64
    chosen, total = [], 0
    for member in members[: int((size + 1) ** share)]:
        total += min(int(lengths[member]), longest)
        if total > tokens:
            break
        chosen.append(member)
    return tuple(chosen)


@pytest.mark.parametrize("tokens", [100, 512, 1024])
@pytest.mark.parametrize("epoch", [0, 2])
def test_epoch_has_the_set_of_each_cluster_once(homologs, tokens, epoch):
    plan = plan_of(homologs, str(tokens))
    expected = [drawn_by_loop(homologs, cluster, epoch, tokens, 16) for cluster in range(600)]
    packs = packs_of(plan, epoch)
    assert sorted(sets_of(packs)) == sorted(expected)
    assert max(map(len, expected)) > 1
    for pack in packs:
        assert pack.lengths.sum() <= 1024
        assert (pack.sets[0], pack.sets[-1]) == (0, len(pack.records))
        assert np.array_equal(pack.lengths, np.minimum(homologs[1][pack.records], 100))
        assert (pack.starts + pack.lengths <= homologs[1][pack.records]).all()


def test_epochs_and_seeds_draw_other_sets(homologs):
    first, second = (sets_of(packs_of(plan_of(homologs), epoch)) for epoch in (0, 1))
    assert len(set(first) & set(second)) < 100  # clusters of one, and sets of one
    assert sorted(first) != sorted(sets_of(packs_of(plan_of(homologs, seed=4))))


def test_packs_are_full(homologs):
    assert plan_of(homologs).statistics().fill > 0.95
    assert plan_of(homologs).packs_per_epoch() == len(packs_of(plan_of(homologs)))


@pytest.mark.parametrize("size", [1, 2, 16, 100])
def test_sizes_are_log_uniform(tmp_path, size):
    clusters = clusters_of(tmp_path / "clusters", np.full(20_000, 100))
    _, bounds = draw_sets(clusters, np.arange(20_000), 0, 0, size)
    sizes = np.diff(bounds)
    expected = [20_000 * math.log((k + 1) / k) / math.log(size + 1) for k in range(1, size + 1)]
    assert sizes.min() >= 1
    assert sizes.max() <= size
    assert size == 1 or chisquare(np.bincount(sizes, minlength=size + 1)[1:], expected).pvalue > 0.001


def test_members_are_drawn_alike_and_in_any_order(tmp_path):
    clusters = clusters_of(tmp_path / "clusters", np.full(6000, 5))
    records, bounds = draw_sets(clusters, np.arange(6000), 0, 0, 3)
    place = np.empty(30_000, np.int64)
    place[clusters.members] = np.arange(30_000) % 5
    for order in range(3):  # the first, second, third of each set
        chosen = records[(bounds[:-1] + order)[np.diff(bounds) > order]]
        assert chisquare(np.bincount(place[chosen], minlength=5)).pvalue > 0.001


class Store:
    """Tokens that say whose they are."""

    def __init__(self, lengths: np.ndarray):
        self.lengths_of_all = lengths

    def __len__(self):
        return len(self.lengths_of_all)

    def gather(self, records, starts, lengths):
        ids = np.repeat(5 + records % 20, lengths).astype(np.uint8)
        return ids, np.append(0, np.cumsum(lengths))


def loader_of(homologs, ranks=1, rank=0, workers=0, first=0, position=None):
    order = PlannedOrder(Store(homologs[1]), plan_of(homologs), 6, Position(2))
    collator = SetCollator(MaskingCollator(ESM2_TOKENS, 0))
    return TrainLoader(order, collator, Mesh(rank, ranks), first, position, num_workers=workers)


def content(batch):
    return batch["input_ids"].tolist(), batch["sets"].tolist(), batch["set_pairs"]


def test_ranks_workers_and_restarts_have_the_same_sets(homologs):
    alone = list(loader_of(homologs))
    whole = [[content(batch) for batch in step.micro_batches] for step in alone]
    assert len(whole) > 4
    for ranks in (2, 3):
        parts = [list(loader_of(homologs, ranks, rank, workers=ranks - 1)) for rank in range(ranks)]
        for number, expected in enumerate(whole):
            taken = [[content(b) for b in part[number].micro_batches] for part in parts]
            real = [batch for batch in itertools.chain(*zip(*taken, strict=True)) if batch[2]]
            assert real == expected
    middle = len(whole) // 2
    resumed = loader_of(homologs, first=middle, position=alone[middle - 1].position)
    assert [[content(b) for b in step.micro_batches] for step in resumed] == whole[middle:]


def test_budget_follows_its_schedule(homologs, monkeypatch):
    monkeypatch.setattr("common.data.packing.BLOCKS_PER_WINDOW", 1)  # windows of 256 clusters, three an epoch
    plan = plan_of(homologs, "0:100,0.5:512,1.25:1000", size=40)
    assert plan.num_windows == 3
    budgets = {}
    for position, pack in itertools.takewhile(lambda item: item[0].epoch < 3, plan.packs()):
        largest = max(pack.lengths[a:b].sum() for a, b in itertools.pairwise(pack.sets))
        where = (position.epoch, position.window)
        budgets[where] = max(budgets.get(where, 0), largest)
    assert list(budgets) == [(epoch, window) for epoch in range(3) for window in range(3)]
    expected = [100, 100, 512, 512, 1000, 1000, 1000, 1000, 1000]
    assert all(limit - 150 < most <= limit for most, limit in zip(budgets.values(), expected, strict=True)), budgets
    for start, end in [(Position(), Position(3)), (Position(0, 1, 2), Position(2, 0, 1)), (Position(2), Position(3))]:
        brute = sum(1 for _ in plan.places(start, end))
        assert plan.count(start, end) == brute
        with monkeypatch.context() as patch:
            patch.setattr("common.data.packing.COUNTED_WINDOWS", 0)  # an estimate, as of many windows
            assert abs(plan.count(start, end) - brute) < 0.15 * brute


@pytest.mark.parametrize("text", ["", "0", "x", "-5", "1:5", "0:5,0:6", "0:5,2:6,1:7", "0:0", "0:5,", "0:5;1:6"])
def test_wrong_budget(text):
    with pytest.raises(UserError, match="^--set_tokens .*: expected a number, or at most 100 epochs:tokens pairs"):
        SetTokens.of(text)


def test_sizes_that_cannot_work(homologs):
    with pytest.raises(UserError, match="--set_tokens 99 is less than one sequence of --max_seq_length 100: raise"):
        plan_of(homologs, "0:99,1:512")
    with pytest.raises(UserError, match="--set_tokens 1025: packs of 1024 tokens do not hold one set: raise"):
        plan_of(homologs, "0:512,1:1025")


def pack_of(lengths, sets) -> Pack:
    lengths = np.array(lengths, np.int64)
    return Pack(
        np.arange(len(lengths)), np.zeros_like(lengths), lengths, 0, sets=None if sets is None else np.array(sets)
    )


def ids_of(pack: Pack) -> np.ndarray:
    return np.resize(np.arange(4, 24, dtype=np.uint8), int(pack.lengths.sum()))


@pytest.mark.parametrize(("lengths", "sets"), [([3, 4, 5, 2], [0, 1, 4]), ([3, 4], None), ([], None), ([9], [0, 1])])
def test_rows_of_the_collator(lengths, sets):
    pack = pack_of(lengths, sets)
    batch = SetCollator(FillingCollator(MaskingCollator(ESM2_TOKENS, 0), 64, 8, 16, 16, ESM2_TOKENS.pad))(
        pack, ids_of(pack), 0
    )
    tokens, bounds = batch["sets"].tolist()
    assert batch["sets"].dtype == torch.int32
    assert tokens == batch["cu_seqlens"].tolist()
    expected, first = [], 0  # (sequences of each set)
    for end in [*(sets or range(len(lengths) + 1)), *range(len(lengths) + 1, 9)][1:]:
        expected.append(list(range(first, end)))
        first = end
    found = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    assert [sequences for sequences in found if sequences] == expected
    assert len(bounds) == 9
    of_sets = [[lengths[i] for i in sequences if i < len(lengths)] for sequences in expected]
    pairs = sum(
        before * length + length**2
        for each in of_sets
        for length, before in zip(each, [0, *np.cumsum(each)], strict=False)
    )
    assert batch["set_pairs"] == pairs


def test_sets_stay_on_the_host_and_survive_the_bundle():
    pack = pack_of([3, 4, 5], [0, 2, 3])
    batch = SetCollator(MaskingCollator(ESM2_TOKENS, 0))(pack, ids_of(pack), 0)
    (returned,) = unbundle(bundle([batch]))
    assert torch.equal(returned["sets"], batch["sets"])
    inputs = to_device(returned, torch.device("meta"))
    assert (inputs["sets"].device.type, inputs["input_ids"].device.type) == ("cpu", "meta")


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_ranks_that_share_a_pack_know_its_whole_sequences(layout):
    pack = pack_of([7, 12, 3, 9], [0, 3, 4])
    pairs = []
    for rank in (0, 1):
        mesh = Mesh(rank, 2, cp_size=2)
        sliced = SlicingCollator(MaskingCollator(ESM2_TOKENS, 0), mesh, layout, 4 if layout == "dual_chunk" else 1, 1)
        batch = SetCollator(sliced)(pack, ids_of(pack), 0)
        assert batch["sets"].tolist() == [[0, 7, 19, 22, 31], [0, 3, 4, 4, 4]]
        pairs.append(batch["set_pairs"])
    assert pairs == [set_pairs(pack.lengths, pack.sets), 0]


def test_position_belongs_to_the_plan(homologs):
    plan = plan_of(homologs)
    position = plan.position_after(Position(), 10)
    assert asdict(position) == {"epoch": 0, "window": 0, "pack_in_window": 10}
    assert plan.position_at(1.0) == Position(1)
