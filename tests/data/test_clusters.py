"""Sampling by clusters: the index, and what the batch plan draws."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest

from common.cli import UserError
from common.data.clusters import Clusters, clusters_to_draw, open_clusters
from common.data.loader import PlannedOrder
from common.data.packing import BatchPlan, Position
from common.distributed.world import Mesh


def write_clusters(split, sizes) -> Clusters:
    """Clusters of these sizes, of consecutive records."""
    (split / "clusters").mkdir(parents=True)
    np.save(split / "clusters/offsets.npy", np.concatenate(([0], np.cumsum(sizes))).astype(np.uint32))
    np.save(split / "clusters/members.npy", np.arange(sum(sizes), dtype=np.uint32))
    return open_clusters(split, sum(sizes))


def plan_of(clusters, lengths, seed=0, **size):
    size = size or {"tokens_per_pack": 4096}
    return BatchPlan(lengths.take, len(lengths), seed, 512, **size, clusters=clusters)


def drawn(plan, epoch):
    return np.concatenate([window.records for window in plan.windows(epoch)])


def test_clusters_epoch_draws_one_member_each(tmp_path):
    sizes = np.random.default_rng(0).geometric(0.3, 20_000)
    clusters = write_clusters(tmp_path, sizes)
    lengths = np.random.default_rng(1).integers(50, 900, sizes.sum())
    cluster_of = np.repeat(np.arange(len(sizes)), sizes)
    epochs = [drawn(plan_of(clusters, lengths, seed), epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    for records in epochs:
        assert np.array_equal(np.sort(cluster_of[records]), np.arange(len(sizes)))
    assert np.array_equal(epochs[0], epochs[3])
    large = np.flatnonzero(sizes >= 5)
    member = [np.sort(records) for records in epochs]  # one record a cluster: in the order of the clusters
    for one, other in itertools.combinations(member[:3], 2):
        assert (one[large] == other[large]).mean() < 0.25
    for mode in ({"tokens_per_pack": 4096}, {"sequences_per_pack": 16}):
        plan = plan_of(clusters, lengths, **mode)
        assert plan.packs_per_epoch() == sum(map(len, plan.windows(0)))


def test_clusters_draw_is_uniform_over_members(tmp_path):
    """Chi-square over 400 epochs, for every size; and neighbours are drawn independently."""
    sizes = np.tile([1, 2, 3, 5, 8], 60)
    clusters = write_clusters(tmp_path, sizes)
    plan = plan_of(clusters, np.full(sizes.sum(), 100))
    draws = np.stack([np.sort(drawn(plan, epoch)) for epoch in range(400)])  # [epochs, clusters]
    places = draws - np.concatenate(([0], np.cumsum(sizes)[:-1]))
    for size in (2, 3, 5, 8):
        of_size = places[:, sizes == size]
        counts = np.stack([(of_size == place).sum(axis=0) for place in range(size)])
        chi_square = ((counts - 400 / size) ** 2 / (400 / size)).sum()
        degrees = 60 * (size - 1)
        assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5
    twos = places[:, sizes == 2]
    assert abs((twos[:, :-1] == twos[:, 1:]).mean() - 0.5) < 4 * 0.5 / twos[:, 1:].size ** 0.5


def test_clusters_of_one_member_equal_the_plan_without_clusters(tmp_path):
    lengths = np.random.default_rng(1).integers(50, 900, 5000)
    clusters = write_clusters(tmp_path, np.ones(5000, dtype=int))
    for epoch in (0, 3):
        assert np.array_equal(drawn(plan_of(clusters, lengths), epoch), drawn(plan_of(None, lengths), epoch))


def test_clusters_plan_resumes_anywhere_and_pickles(tmp_path):
    sizes = np.random.default_rng(0).geometric(0.3, 40_000)
    lengths = np.random.default_rng(1).integers(50, 900, sizes.sum())
    plan = plan_of(write_clusters(tmp_path, sizes), lengths)
    everything = list(itertools.islice(plan.packs(), plan.packs_per_epoch() + 30))
    assert plan.num_windows > 1
    for at in (0, 17, len(everything) // 2, len(everything) - 20):
        fresh = pickle.loads(pickle.dumps(plan_of(Clusters(tmp_path / "clusters"), lengths)))
        assert fresh.position_after(Position(), at) == everything[at][0]
        for expected, found in zip(everything[at : at + 5], fresh.packs(everything[at][0]), strict=False):
            assert expected[0] == found[0]
            assert np.array_equal(expected[1].records, found[1].records)
            assert np.array_equal(expected[1].starts, found[1].starts)
    assert Counter(position.epoch for position, _ in everything).keys() == {0, 1}


class Lengths:
    """A store of proteins of these lengths, whose tokens nobody reads."""

    def __init__(self, lengths):
        self.lengths = lengths

    def gather(self, records, starts, lengths):
        return np.zeros(lengths.sum(), np.uint8), np.append(0, np.cumsum(lengths))


def epochs_of_ranks(plan, store, ranks: int, epochs: int) -> list[np.ndarray]:
    """The records of each epoch, as so many ranks take them in steps of 7 packs."""
    records: list[list[np.ndarray]] = [[] for _ in range(epochs)]
    for rank in range(ranks):
        order = PlannedOrder(store, plan, 7, end=Position(epochs))
        for _, taken, *_ in order.steps(Mesh(rank, ranks), {}, 0, itertools.count(), lambda number: True):
            for pack, _ in taken:
                records[pack.epoch].append(pack.records)
    return [np.sort(np.concatenate(parts)) for parts in records]


def test_clusters_recounted_over_50_epochs_on_1_and_3_ranks(tmp_path):
    """ESM-2's definition: each cluster once an epoch, and then one of its members uniformly.

    The draws of an epoch and of clusters are independent. Under the definition the sum over 300 clusters has a
    chi-square distribution of sum(size - 1) degrees, whose deviation is sqrt(2 degrees): within 4 of them.
    """
    sizes = np.tile([1, 2, 3, 5, 10], 60)
    shuffled = np.random.default_rng(3).permutation(sizes.sum())
    clusters = write_clusters(tmp_path, sizes)
    np.save(tmp_path / "clusters/members.npy", shuffled.astype(np.uint32))
    clusters = open_clusters(tmp_path, sizes.sum())
    lengths = np.random.default_rng(1).integers(50, 900, sizes.sum())
    plan = plan_of(clusters, lengths)
    epochs = epochs_of_ranks(plan, Lengths(lengths), 1, 50)
    assert all(map(np.array_equal, epochs, epochs_of_ranks(plan, Lengths(lengths), 3, 50)))
    cluster_of = np.empty(sizes.sum(), int)
    cluster_of[shuffled] = np.repeat(np.arange(len(sizes)), sizes)
    for records in epochs:
        assert np.array_equal(np.sort(cluster_of[records]), np.arange(len(sizes)))
    counts = np.bincount(np.concatenate(epochs), minlength=sizes.sum())
    expected = 50 / sizes[cluster_of]
    degrees = (sizes - 1).sum()
    assert abs(((counts - expected) ** 2 / expected).sum() - degrees) < 4 * (2 * degrees) ** 0.5


class Itself:
    """An index of more records than memory holds: place n has record n."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, places):
        return places


def test_clusters_above_4_billion_records(tmp_path):
    clusters = write_clusters(tmp_path, [1, 2])
    begin = (1 << 32) - 2  # of the first of 1,000 clusters, of 5 members
    clusters.offsets = begin + np.arange(1001) * 5
    clusters.members = Itself(int(clusters.offsets[-1]))
    for dtype in (np.int64, np.uint64):
        clusters.offsets = clusters.offsets.astype(dtype)
        drawn_now = clusters.draw(np.arange(1000), key=1)
        assert np.array_equal((drawn_now - begin) // 5, np.arange(1000))
        assert set((drawn_now - begin) % 5) == set(range(5))
    plan = BatchPlan(lambda records: np.full(len(records), 100), 5 << 30, 0, 512, tokens_per_pack=4096)
    records = np.concatenate([plan._window_records(0, number) for number in range(0, plan.num_windows, 9999)])
    assert len(np.unique(records)) == len(records) > 400_000
    assert records.max() < 5 << 30
    assert abs((records >= 1 << 32).mean() - 0.2) < 0.05  # uniform in blocks of 256


@pytest.mark.parametrize(
    ("asked", "records", "drawn_by", "line"),
    [
        (True, 6, 3, "clusters, then a member of each: 3 clusters of 6 proteins"),
        ("auto", 6, 3, "clusters, then a member of each: 3 clusters of 6 proteins"),
        ("auto", 5, 0, "proteins, uniformly: 5 proteins"),  # --max_train_samples
        (
            False,
            6,
            0,
            "proteins, uniformly: 6 proteins; this split has an index of 3 clusters: --sample_clusters draws them as "
            "ESM-2 did",
        ),
        (False, 5, 0, "proteins, uniformly: 5 proteins"),
    ],
)
def test_clusters_to_draw_says_which(tmp_path, asked, records, drawn_by, line):
    write_clusters(tmp_path, [1, 2, 3])
    clusters, said = clusters_to_draw(tmp_path, records, asked)
    assert (len(clusters or ()), said) == (drawn_by, line)


def test_clusters_to_draw_without_an_index(tmp_path):
    for asked in ("auto", False):
        assert clusters_to_draw(tmp_path, 7, asked) == (None, "proteins, uniformly: 7 proteins")
    with pytest.raises(UserError, match="tokenise with --cluster_table"):
        clusters_to_draw(tmp_path, 7, True)
    write_clusters(tmp_path, [1, 2, 3])
    (tmp_path / "clusters/members.npy").write_bytes(b"")  # nobody asked for it
    assert clusters_to_draw(tmp_path, 6, False) == (None, "proteins, uniformly: 6 proteins")


def test_open_clusters_refuses_a_missing_or_wrong_index(tmp_path):
    with pytest.raises(UserError, match="tokenise with --cluster_table"):
        open_clusters(tmp_path, 10)
    write_clusters(tmp_path, [1, 2, 3])
    with pytest.raises(UserError, match="--sample_clusters needs all of them"):
        open_clusters(tmp_path, 5)
    (tmp_path / "clusters/members.npy").write_bytes(b"")
    with pytest.raises(UserError, match="tokenise again"):
        open_clusters(tmp_path, 6)
