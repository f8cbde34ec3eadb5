"""extras/prepare/partitions.py: a uniform random order, independent of the memory; resumed after a kill."""

import itertools
from collections import Counter
from unittest import mock

import pyarrow as pa
import pytest

from extras.prepare import partitions
from extras.prepare.output_directory import Build, Journal
from extras.prepare.partitions import in_random_order

LINES = [b"P%d\t%s\n" % (i, b"M" * (i % 50 + 1)) for i in range(6000)]


def build_in(directory) -> Build:
    (directory / "scratch").mkdir(parents=True, exist_ok=True)
    return Build({}, directory / "scratch", Journal(directory / "journal"))


def batches(lines, size):
    return (pa.array(lines[i : i + size], pa.large_binary()) for i in range(0, len(lines), size))


def shuffled(build, lines=LINES, seed=3, size=1000, written=lambda: 0, memory_bytes=None) -> list[bytes]:
    with mock.patch.object(partitions, "MEMORY_BYTES", memory_bytes or partitions.MEMORY_BYTES):
        order = in_random_order(batches(lines, size), build, seed, written)
        return list(itertools.chain.from_iterable(part.to_pylist() for part in order))


def test_shuffle_is_uniform_over_permutations(tmp_path):
    lines = [b"a\t1\n", b"b\t1\n", b"c\t1\n", b"d\t1\n"]
    orders = Counter(b"".join(shuffled(build_in(tmp_path), lines, seed, size=3)) for seed in range(1200))
    assert len(orders) == 24
    chi_square = sum((n - 50) ** 2 / 50 for n in orders.values())  # 23 degrees of freedom
    assert chi_square < 55


# Files of 1 kB: with 400 bytes each is read several times.
@pytest.mark.parametrize(
    ("memory_bytes", "batch_bytes"),
    [(100_000, 500), (5_000, partitions.BATCH_BYTES), (5_000, 500), pytest.param(400, 500, marks=pytest.mark.slow)],
)
def test_shuffle_order_is_independent_of_memory(tmp_path, monkeypatch, memory_bytes, batch_bytes):
    in_memory = shuffled(build_in(tmp_path / "a"))
    monkeypatch.setattr(partitions, "BATCH_BYTES", batch_bytes)
    bounded_build = build_in(tmp_path / "b")
    assert not list((tmp_path / "a/scratch").iterdir())
    assert shuffled(bounded_build, size=77, memory_bytes=memory_bytes) == in_memory != LINES
    assert len(list(bounded_build.scratch.iterdir())) == 256
    assert sorted(in_memory) == sorted(LINES)
    assert shuffled(build_in(tmp_path / "c"), seed=4) != in_memory
    assert shuffled(build_in(tmp_path / "d"), lines=[]) == []


@pytest.mark.parametrize("memory_bytes", [None, 50_000])
def test_shuffle_resumes_after_written_records(tmp_path, memory_bytes):
    whole = shuffled(build_in(tmp_path), memory_bytes=memory_bytes)
    for written in (1, 2500, 5999, 6000):
        again = build_in(tmp_path)
        lines = LINES if memory_bytes is None else []  # once all are scattered, the input is not needed
        assert shuffled(again, lines, written=lambda n=written: n, memory_bytes=memory_bytes) == whole[written:]


def test_shuffle_ignores_an_incomplete_scatter(tmp_path):
    build = build_in(tmp_path)
    for number in range(256):
        (build.scratch / f"{number:03d}.bucket").write_bytes(b"half a batch")
    assert sorted(shuffled(build, memory_bytes=50_000)) == sorted(LINES)


def test_shuffle_removes_written_buckets(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "MEMORY_BYTES", 50_000)
    build = build_in(tmp_path)
    seen, left = [0], []
    for part in in_random_order(batches(LINES, 1000), build, 3, lambda: seen[0] // 1000 * 1000):
        seen[0] += len(part)
        left.append(len(list(build.scratch.iterdir())))
    assert seen == [6000]
    assert left[0] == 256
    assert left[len(left) // 2] < 180
    assert left[-1] < 60
    needed = build.done(partitions.SCATTERED)["counts"][-1]
    assert (build.scratch / "255.bucket").exists(), f"its {needed} records are not known to be written"


def test_shuffle_ignores_buckets_of_another_boot(tmp_path, monkeypatch):
    """They were never flushed: after a power failure, or seen from another node, they may be anything."""
    build = build_in(tmp_path)
    whole = shuffled(build, memory_bytes=50_000)
    for path in build.scratch.iterdir():
        path.write_bytes(b"")
    monkeypatch.setattr(partitions, "boot_id", lambda: "another")
    assert shuffled(build, memory_bytes=50_000) == whole
