"""How long a tokenised dataset of UniRef50's size takes to its first batch, and how much memory a process needs.

    python benchmarks/open_dataset.py --records 69000000

Makes such a dataset in a scratch directory: Arrow files whose metadata and offsets are real (lengths distributed as in
UniRef) and whose tokens are a hole in a sparse file, so that 25 GB take 1 GB; and clusters of 1 to many members. Then
measures, each in a process of its own and with the files put out of the page cache first:

- seconds from `open_split` to the first batch (one pack of 16,384 tokens, no worker processes), with and without
  clusters; in the middle of a later epoch, as after a restart; and of the passes that look at the whole dataset;
- memory: growth of the process's private (anonymous) memory, RssAnon in /proc/self/status, after imports. Pages of the
  memory-mapped files are shared by all processes of a node and given back when memory is short; they do not count.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa

from common.cli import run
from common.data.clusters import open_clusters
from common.data.collators import MaskingCollator
from common.data.loader import PlannedOrder, TrainLoader
from common.data.packing import BatchPlan, Position
from common.data.token_store import open_split
from common.flags import flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training.baselines import Baselines
from extras.prepare.dataset_writer import (
    ROWS_PER_BATCH,
    TOKEN_FEATURES,
    arrow_schema,
    shard_name,
    write_dataset_dict,
    write_dataset_files,
)

RECORDS_PER_SHARD = 500_000
HOLE = 1 << 16  # bytes: what is written in larger pieces is tokens


@dataclass
class BenchmarkArguments:
    records: int = flag(69_000_000, "records of the dataset")
    max_seq_length: int = flag(1024, "longest sequence in tokens")
    tokens_per_pack: int = flag(16_384, "tokens in a pack")


class SparseFile:
    """A file to write to that leaves holes for large buffers (all zeros: `<cls>`)."""

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115
        self.closed = False

    def write(self, data) -> int:
        size = len(memoryview(data))
        if size > HOLE:
            self.file.seek(size, os.SEEK_CUR)
        else:
            self.file.write(data)
        return size

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.truncate()
        self.file.close()
        self.closed = True


def make_dataset(directory: Path, records: int) -> None:
    """DIRECTORY/train: `records` records of UniRef-like lengths without contents, and clusters."""
    split = directory / "train"
    (split / "clusters").mkdir(parents=True)
    generator = np.random.default_rng(0)
    schema = arrow_schema(TOKEN_FEATURES)
    zeros = np.zeros(64 << 20, np.uint8)
    no_name = pa.array([""] * ROWS_PER_BATCH)
    shards = -(-records // RECORDS_PER_SHARD)
    for shard in range(shards):
        sink = SparseFile(split / shard_name(shard, shards))
        with pa.ipc.new_stream(sink, schema) as stream:
            for first in range(
                shard * RECORDS_PER_SHARD, min(records, (shard + 1) * RECORDS_PER_SHARD), ROWS_PER_BATCH
            ):
                count = min(ROWS_PER_BATCH, records - first)
                # log-normal, 2 % above 1,024: close to UniRef's distribution
                lengths = np.clip(generator.lognormal(5.6, 0.66, count), 12, 36_000).astype(np.int32) + 2
                offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
                tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(zeros[: offsets[-1]]))
                stream.write_batch(pa.RecordBatch.from_arrays([no_name.slice(0, count), tokens], schema=schema))
        sink.close()
    write_dataset_files(split, TOKEN_FEATURES, shards, records)
    write_dataset_dict(directory, ["train"])
    begins = np.flatnonzero(generator.random(records) < 0.4)  # 2.5 members a cluster
    begins[:1] = 0
    np.save(split / "clusters/offsets.npy", np.append(begins, records).astype(np.uint32))
    np.save(split / "clusters/members.npy", np.arange(records, dtype=np.uint32))


def forget_pages(directory: Path) -> None:
    """Put the files out of the page cache (what is not yet on the disk stays)."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def private_bytes() -> int:
    """This process's own memory, without pages of files."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def first_batch(directory: Path, args: BenchmarkArguments, by_clusters: bool, start: Position) -> tuple:
    store = open_split(directory, "train", ESM2_TOKENS)
    clusters = open_clusters(directory / "train", len(store)) if by_clusters else None
    size = {"tokens_per_pack": args.tokens_per_pack, "clusters": clusters}
    plan = BatchPlan(store.lengths, len(store), 0, args.max_seq_length, **size)
    if start.window:
        start = Position(start.epoch, plan.num_windows // 2, start.pack_in_window)
    order = PlannedOrder(store, plan, packs_per_step=1)
    loader = TrainLoader(order, MaskingCollator(ESM2_TOKENS, 0), position=asdict(start))
    steps = iter(loader)
    return next(steps), steps, loader  # in memory together


def count_packs(directory: Path, args: BenchmarkArguments) -> tuple:
    store = open_split(directory, "train", ESM2_TOKENS)
    plan = BatchPlan(store.lengths, len(store), 0, args.max_seq_length, args.tokens_per_pack)
    return plan.packs_per_epoch(), plan


MEASUREMENTS: dict[str, Callable] = {
    "open_split": lambda directory, args: open_split(directory, "train", ESM2_TOKENS),
    "first batch": lambda directory, args: first_batch(directory, args, False, Position()),
    "first batch, by clusters": lambda directory, args: first_batch(directory, args, True, Position()),
    "first batch in the middle of epoch 3": lambda directory, args: first_batch(
        directory, args, False, Position(3, 1, 5)
    ),
    "... by clusters": lambda directory, args: first_batch(directory, args, True, Position(3, 1, 5)),
    "number of packs of an epoch": count_packs,
    "baselines of an evaluation": lambda directory, args: Baselines(
        open_split(directory, "train", ESM2_TOKENS), ESM2_TOKENS
    ),
}


def measure(name: str, directory: Path, args: BenchmarkArguments, results: multiprocessing.Queue) -> None:
    before, started = private_bytes(), time.perf_counter()
    kept = MEASUREMENTS[name](directory, args)
    seconds = time.perf_counter() - started
    results.put((seconds, private_bytes() - before))
    del kept  # only now


def measure_all(
    directory: Path, args: BenchmarkArguments, names: Iterable[str] = MEASUREMENTS
) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and bytes of the measurements, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    for name in names:
        forget_pages(directory)
        results = context.Queue()
        process = context.Process(target=measure, args=(name, directory, args, results))
        process.start()
        yield name, *results.get()
        process.join()


def main() -> None:
    args = parse_arguments(__doc__, BenchmarkArguments)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "arrow"
        make_dataset(directory, args.records)
        sizes = [path.stat() for path in directory.rglob("*") if path.is_file()]
        apparent, real = sum(s.st_size for s in sizes), sum(s.st_blocks * 512 for s in sizes)
        print(f"{args.records:,} records in {len(list((directory / 'train').glob('*.arrow')))} shards, ", end="")
        print(f"{apparent / 1e9:.1f} GB ({real / 1e9:.1f} GB without the holes)\n", flush=True)
        print("| | seconds | private memory, MB |\n|---|---|---|")
        for name, seconds, size in measure_all(directory, args):
            print(f"| {name} | {seconds:.2f} | {size / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    run(main)
