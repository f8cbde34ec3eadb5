"""How fast the loader alone delivers masked, packed batches, and how full they are.

    python benchmarks/loader_throughput.py --fasta proteins.fasta.gz
    python benchmarks/loader_throughput.py --dataset_dir processed/arrow
    python benchmarks/loader_throughput.py --dataset proteins.parquet
    python benchmarks/loader_throughput.py --fasta proteins.fasta.gz --planned_packs 2048

The third is the way without preparation: read, encoded and packed on the fly. Prints a table: tokens of real sequences
a second, for packs of 8k and 16k tokens and 0, 1 and 2 worker processes (0: built in the main process), each measured
for `--seconds` after a warm-up.

The last measures planning alone: every process walks through the order of all packs, whoever makes them. CPU seconds
that this takes for each step of so many packs, of which the process makes one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa

from common.cli import UserError, run
from common.data.collators import MaskingCollator
from common.data.loader import PlannedOrder, TrainLoader, TrainStep
from common.data.packing import BatchPlan
from common.data.token_store import open_split
from common.distributed.world import Mesh
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS, encode
from extras.prepare.dataset_writer import TOKEN_FEATURES, DatasetWriter
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.streams import StreamedOrder, plan_streams


@dataclass
class BenchmarkArguments(Flags):
    fasta: str | None = flag(None, "FASTA file (plain or .gz) to tokenise and read")
    dataset_dir: str | None = flag(None, "tokenised dataset; its train split is read")
    dataset: str | None = flag(None, "file, directory or glob to stream, as for training")
    max_seq_length: int = flag(1024, "longest sequence in tokens")
    tokens_per_pack: list[int] = field(default_factory=lambda: [8192, 16384], metadata={"help": "sizes to measure"})
    num_workers: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "worker counts to measure"})
    planned_packs: int | None = flag(None, "packs of a step whose planning is measured")
    seconds: float = flag(5.0, "of every measurement")

    def missing(self) -> Iterator[Missing]:
        if not (self.fasta or self.dataset_dir or self.dataset):
            yield Missing("--fasta", "or --dataset_dir, or --dataset: the proteins", "proteins.fasta")

    def check(self) -> None:
        if sum(map(bool, (self.fasta, self.dataset_dir, self.dataset))) != 1:
            raise UserError("--fasta, --dataset_dir and --dataset exclude each other: give one")
        if self.planned_packs and self.dataset:
            raise UserError("--planned_packs: a --dataset is read, not planned: give --fasta or --dataset_dir")


def tokenise(fasta: str, directory: Path) -> None:
    """Write the proteins of a FASTA file as one split."""
    names, sequences = zip(*read_fasta(fasta), strict=True)
    ids = [encode(sequence) for sequence in sequences]
    offsets = np.concatenate(([0], np.cumsum([len(i) for i in ids]))).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(ids)))
    writer = DatasetWriter(directory, TOKEN_FEATURES)
    writer.write(pa.record_batch([pa.array([name.decode() for name in names]), column], names=["id", "input_ids"]))
    writer.close()


def loader(where: str, args: BenchmarkArguments, tokens_per_pack: int, num_workers: int) -> TrainLoader:
    """Of one pack a step."""
    packing = {"seed": 0, "max_seq_length": args.max_seq_length, "tokens_per_pack": tokens_per_pack}
    if args.dataset:
        plan = plan_streams(open_source(args.dataset, streaming=False).splits["train"], 1, **packing)
        order = StreamedOrder(plan, packs_per_step=1)
    else:
        store = open_split(where, "train", ESM2_TOKENS)
        order = PlannedOrder(store, BatchPlan(store.lengths, len(store), **packing), packs_per_step=1)
    return TrainLoader(order, MaskingCollator(ESM2_TOKENS, 0), num_workers=num_workers, prefetch_factor=4)


def measure(steps: Iterator[TrainStep], seconds: float) -> tuple[float, float]:
    """Tokens of real sequences delivered a second, and in a pack."""
    for _ in range(50):
        next(steps)
    tokens, packs, started = 0, 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        tokens += sum(batch["num_tokens"] for batch in next(steps).micro_batches)
        packs += 1
    rate = tokens / (time.perf_counter() - started)
    steps.close()
    return rate, tokens / packs


def planning_seconds(where: str, args: BenchmarkArguments, tokens_per_pack: int) -> float:
    """CPU seconds that a process takes to walk past a step of `--planned_packs`."""
    store = open_split(where, "train", ESM2_TOKENS)
    plan = BatchPlan(store.lengths, len(store), 0, args.max_seq_length, tokens_per_pack)
    order = PlannedOrder(store, plan, args.planned_packs)
    steps = order.steps(Mesh(0, args.planned_packs), {}, 0, count(), lambda number: True)
    next(steps)
    taken, began, started = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() < started + args.seconds:
        next(steps)
        taken += 1
    return (time.process_time() - began) / taken


def main() -> None:
    args = parse_arguments(__doc__, BenchmarkArguments)
    with tempfile.TemporaryDirectory() as scratch:
        if args.fasta:
            tokenise(args.fasta, Path(scratch) / "train")
        print(f"crops of {args.max_seq_length:,}\n")
        if args.planned_packs:
            print("| tokens a pack | packs a step | tokens a step, million | planning a step, CPU s | packs/s |")
            print("|---|---|---|---|---|")
            for tokens_per_pack in args.tokens_per_pack:
                packs, seconds = (
                    args.planned_packs,
                    planning_seconds(args.dataset_dir or scratch, args, tokens_per_pack),
                )
                tokens = packs * tokens_per_pack / 1e6
                print(f"| {tokens_per_pack:,} | {packs:,} | {tokens:.1f} | {seconds:.3f} | {packs / seconds:,.0f} |")
            return
        print("| tokens a pack | workers | million tokens/s | fill |\n|---|---|---|---|")
        for tokens_per_pack in args.tokens_per_pack:
            for num_workers in args.num_workers:
                steps = iter(loader(args.dataset_dir or scratch, args, tokens_per_pack, num_workers))
                rate, in_a_pack = measure(steps, args.seconds)
                fill = in_a_pack / tokens_per_pack
                print(f"| {tokens_per_pack:,} | {num_workers} | {rate / 1e6:.1f} | {fill:.2%} |", flush=True)


if __name__ == "__main__":
    run(main)
