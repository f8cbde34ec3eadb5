"""Data read from files as they are (`--dataset`, `--eval_dataset`): streamed training data and held-out files."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np

from common.cli import UserError
from common.data import TokenSet
from common.data.alphabet import Alphabet
from common.data.flags import BatchFlags, ProteinFlags
from common.data.loader import Order, ProteinStore
from common.data.packs_per_step import PacksPerStep
from common.data.token_store import open_for_model
from common.data.training_data import Makers, PreparedData, ProteinData, check_eval_sets
from common.distributed.world import World
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.sources.find_files import (
    File,
    Source,
    check_same_files,
    held_out_files,
    open_source,
    with_contents,
)
from extras.prepare.sources.formats import Content, proteins
from extras.prepare.sources.record_counts import count_records
from extras.prepare.sources.sequence_files import check_columns, read_sequences, units_of
from extras.prepare.sources.streamed_clusters import StreamedClusters, clusters_of, have_clusters
from extras.prepare.sources.streams import LONG_PROTEIN, StreamedOrder, check_divisible, plan_streams

logger = logging.getLogger(__name__)

HELD_OUT_RECORDS = 10_000  # read into memory, unless --max_eval_samples is given
SAMPLE_RECORDS = 20_000  # that the unigram baseline is fitted on
SAMPLE_TOKENS = SAMPLE_RECORDS * LONG_PROTEIN  # or fewer records: files may begin with the longest proteins


class MemoryStore:
    """Proteins in memory, with the interface of a TokenStore: the held-out proteins of streamed files.

    Token ids of n records, end to end: ids uint8 [T], offsets int64 [n + 1]. alphabet: of the ids.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, alphabet: Alphabet = ESM2_TOKENS):
        self.ids, self.offsets, self.alphabet = ids, offsets, alphabet

    @classmethod
    def read(
        cls,
        files: tuple[File, ...],
        max_records: int,
        max_tokens: float = math.inf,
        alphabet: Alphabet = ESM2_TOKENS,
    ) -> MemoryStore:
        """The first `max_records` proteins of some files, empty rows left out; fewer once they have `max_tokens`."""
        ids, lengths, missing = [], [], max_records
        sequences = (block for unit in units_of(files, wanted=1) for block in read_sequences(unit, 0))
        for characters, offsets in sequences:
            proteins, offsets = alphabet.encode_many(characters, offsets)
            sizes = np.diff(offsets)
            kept = sizes > 2  # not only <cls> and <eos>
            kept &= np.cumsum(kept) <= missing
            ids.append(proteins[np.repeat(kept, sizes)])
            lengths.append(sizes[kept])
            missing -= int(kept.sum())
            max_tokens -= len(ids[-1])
            if not missing or max_tokens <= 0:
                break
        offsets = np.append(0, np.cumsum(np.concatenate(lengths or [np.zeros(0, np.int64)])))
        return cls(np.concatenate(ids or [np.zeros(0, np.uint8)]), offsets, alphabet)

    def unknown(self) -> tuple[int, int]:
        """Number of unknown residues, and of the records that have one."""
        positions = np.flatnonzero(self.ids == self.alphabet.unknown)
        return len(positions), len(np.unique(np.searchsorted(self.offsets, positions, side="right")))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of the records int64 [n], `<cls>` and `<eos>` included."""
        return self.offsets[np.asarray(indices) + 1] - self.offsets[indices]

    def gather(self, indices: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n records, end to end: ids uint8, offsets int64 [n + 1]."""
        begin = (self.offsets[indices] + starts).tolist()
        pieces = [self.ids[a : a + n] for a, n in zip(begin, lengths.tolist(), strict=True)]
        return np.concatenate(pieces or [self.ids[:0]]), np.append(0, np.cumsum(lengths))


class HeldOutFiles:
    """The files of each split; the first proteins of a split are read into memory once. Of the sets that step 1 has
    prepared, the stores of their splits."""

    def __init__(self, splits: dict[str, tuple[File, ...]], flags: ProteinFlags, alphabet: Alphabet):
        self.splits, self.alphabet = splits, alphabet
        self.given, self.max_records = flags.max_eval_samples, flags.max_eval_samples or HELD_OUT_RECORDS
        self.prepared = {name: split for name, path in flags.eval_sets.items() if (split := prepared_split(path))}
        self._stores: dict[str, ProteinStore | None] = {}

    def read(self, split: str) -> ProteinStore | None:
        """None if the split is absent or has no protein."""
        if split in self.prepared:
            return open_for_model(self.prepared[split].parent, self.prepared[split].name, self.alphabet, self.given)
        if split not in self._stores:
            files = self.splits.get(split)
            store = MemoryStore.read(files, self.max_records, alphabet=self.alphabet) if files else None
            self._stores[split] = store if store is not None and len(store) else None
            if store is not None and (unknown := store.unknown())[0]:
                logger.warning(
                    "%s: %s characters in %s records are not residues: <unk>", split, *(f"{n:,}" for n in unknown)
                )
        return self._stores[split]


class StreamedData:
    """Data in the order of streams, whose number of records is not known: a run ends after --max_steps."""

    num_examples = None
    end = None
    extends: tuple[str, ...] = ()
    sources = row_fields = ()

    def __init__(self, flags: BatchFlags):
        self.flags = flags

    def total_steps(self, packs_per_step: PacksPerStep, step: int, position: dict) -> int:
        return self.flags.max_steps

    def finished(self, step: int, position: dict) -> bool:
        return step >= self.flags.max_steps

    def check_packs(self, saved: PacksPerStep, packs_per_step: PacksPerStep) -> None:
        if saved.most != packs_per_step.most:
            raise UserError(
                f"--packs_per_step {packs_per_step.most}: the checkpoint's position is for streams of {saved.most} "
                "packs a step; another number (of a schedule: the largest) would skip or repeat records: drop the "
                "flag, or give that number"
            )

    def check_ranks(self, packs_per_step: PacksPerStep, dp_size: int) -> None:
        check_divisible(packs_per_step, dp_size)


class StreamedProteins(StreamedData):
    """Proteins of a source. records: estimated number in an epoch (`count_records`); clusters: to draw by."""

    def __init__(
        self,
        flags: ProteinFlags,
        source: Source,
        records: int,
        alphabet: Alphabet,
        clusters: StreamedClusters | None = None,
    ):
        super().__init__(flags)
        self.drawn_by = clusters
        self.source, self.records, self.alphabet = source, max(1, records), alphabet
        self.packing = {**flags.pack_size, "seed": flags.seed, "max_seq_length": flags.max_seq_length}
        self.identity = {"dataset": source.identity("train")} | self.packing
        self.sampling = f"proteins, uniformly: about {self.records:,} proteins"
        if not clusters and not flags.streaming and have_clusters(source.splits["train"][:1]):
            self.sampling += "; the files name their clusters: --sample_clusters draws them as ESM-2 did"
        if clusters:
            self.records = len(clusters.clusters)
            self.identity["sample_clusters"] = clusters.clusters.content[:16]
            members = clusters.clusters.num_records
            self.sampling = f"clusters, then a member of each: {self.records:,} clusters of {members:,} proteins"
        self._files = HeldOutFiles(source.splits, flags, alphabet)

    def epochs(self, sequences: int) -> float:
        return sequences / self.records

    def order(self, packs_per_step: PacksPerStep) -> Order:
        files = self.source.splits["train"]
        logger.info("Sampling %s", self.sampling)
        plan = plan_streams(files, packs_per_step.most, alphabet=self.alphabet, clusters=self.drawn_by, **self.packing)
        counts = (self.source.name, len(plan.units), plan.num_streams)
        logger.info("Streaming %s: files or row groups: %d, streams: %d", *counts)
        return StreamedOrder(plan, packs_per_step)

    def held_out(self, split: str) -> ProteinStore | None:
        return self._files.read(split)

    def clusters(self, split: str) -> np.ndarray | None:
        return None

    def check_validation(self) -> None:
        """UserError unless there are proteins to evaluate on."""
        if self.flags.eval_sets:
            check_eval_sets(self, self.flags)
        elif "validation" not in self.source.splits:
            raise UserError(
                f"--dataset {self.flags.dataset}: no validation files in it: give --eval_dataset, or drop --do_eval"
            )

    def sample(self) -> MemoryStore:
        return MemoryStore.read(self.source.splits["train"], SAMPLE_RECORDS, SAMPLE_TOKENS, self.alphabet)


def open_files(flags: ProteinFlags, tokens: TokenSet, world: World, evaluate: bool, makers: Makers) -> ProteinData:
    """The data of a run with --dataset or --eval_dataset; collective.

    One rank finds, or makes, the files for all: the Hub limits the rate of requests. UserError for tokens without
    letters.
    """
    if not isinstance(tokens, Alphabet):
        given = f"--dataset {flags.dataset}" if flags.dataset else f"--eval_dataset {flags.eval_dataset[0]}"
        raise UserError(
            f"{given}: files are tokenised with ESM-2's alphabet or one that the family gives, and this one gives "
            "none: give --dataset_dir alone, tokenised with the model's own"
        )
    source, records = None, 0
    with world.on_main_rank() as is_main:
        if is_main:
            source = find_source(flags, makers, tokens.declared, bool(tokens.chains))
            if flags.dataset:
                records = count_records(source.splits["train"])
                source = with_contents(source, "train")
    source, records = world.broadcast_object((source and source.to_json(), records))
    source = source and Source.from_json(source)
    with world.raise_together():
        if world.local_rank == 0:
            check_same_files(source)
            if flags.dataset:
                clusters_of(source, flags.sample_clusters, flags.streaming, makes=True)
    with world.raise_together():
        if flags.dataset:
            clusters = clusters_of(source, flags.sample_clusters, flags.streaming, makes=False)
            data = StreamedProteins(flags, source, records, tokens, clusters)
        else:
            data = PreparedData(flags, tokens, HeldOutFiles(source.splits, flags, tokens).read)
        if evaluate:
            data.check_validation()
    return data


def find_source(flags: ProteinFlags, makers: Makers | None = None, alphabet: str = "", chains: bool = False) -> Source:
    """The files of --dataset, if given, and of each set of --eval_dataset as a split. alphabet, chains: as of
    `Content`."""
    content = proteins(flags.max_record_length, flags.gaps, flags.on_bad_record, alphabet, chains)
    source = None
    if flags.dataset:
        source = _find_dataset(flags, makers or {}, content)
    for name, path in flags.eval_sets.items():
        source = source or Source(path, {})
        if prepared_split(path):
            continue
        held_out = open_source(path, flags.streaming, "--eval_dataset", content).splits
        files = held_out.get("validation") or held_out.get("test") or held_out["train"]
        source = Source(source.name, source.splits | {name: files}, source.revision)
    if "validation" not in flags.eval_sets and flags.dataset and len(source.splits) > len(flags.eval_sets) + 1:
        logger.info("--dataset %s: held out, by file name: %s", flags.dataset, held_out_files(source))
    # A file of the wrong kind is an error before anything is written.
    for files in source.splits.values():
        check_columns(files)
        if not flags.streaming:
            MemoryStore.read(files[:1], max_records=1)
    return source


def prepared_split(path: str) -> Path | None:
    """The split that step 1 wrote: the directory itself, or its validation split; None for anything else."""
    for directory in (Path(path), Path(path) / "validation"):
        if (directory / "dataset_info.json").is_file():
            return directory
    return None


def _find_dataset(flags: ProteinFlags, makers: Makers, content: Content) -> Source:
    dataset, make = flags.dataset, makers.get(flags.dataset)
    if make and Path(dataset).exists():
        raise UserError(
            f"--dataset {dataset}: a built-in name, but ./{dataset} exists too: rename it, or give ./{dataset}"
        )
    return open_source(str(make()) if make else dataset, flags.streaming, content=content)
