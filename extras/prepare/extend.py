"""Prepared data of the next release, which extend the earlier ones: the same held-out proteins, and more to train on.

    python -m extras.prepare.extend OLD NEW --output_dir OUT [--cluster_table TABLE]

OLD and NEW are finished outputs of step 1, of one protein a record (OLD may be one of this command). OUT/arrow has
OLD's validation and test, file by file; its train has OLD's records, followed by those of all of NEW's splits that OLD
has in none, by content. Records of OLD that are gone from NEW stay. With the table of NEW's clusters, members of a
cluster with a held-out protein are left out, and the index of train's clusters is made anew; where OLD was split by
clusters it is needed. arrow/data_report.json has the counts. A run that was trained on OLD goes on with OUT: a new
epoch begins at the next step. OLD's files are linked where OUT is on the same file system, else copied.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.lib.format import open_memmap

from common.cli import UserError, log_every, run
from common.data.alphabet import recorded_alphabet
from common.data.clusters import DIRECTORY, Clusters
from common.data.token_store import CHAINS, EXTENDS
from common.files.content_hash import content_hash
from common.files.safe_files import sync_directory, write_json_flushed
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.esm2.alphabet import PAD
from extras.prepare.cluster_names import explain
from extras.prepare.cluster_splits import MAX_MISSING, read_names, read_table, without_prefix
from extras.prepare.dataset_writer import (
    TOKEN_FEATURES,
    ShardWriter,
    add_to_state,
    arrow_schema,
    shard_name,
    write_dataset_dict,
    write_dataset_files,
)
from extras.prepare.duplicates import REPORT, length_quantiles
from extras.prepare.encode import hash_records
from extras.prepare.output_directory import RECORD, Build, building, read_record, refuse_inputs
from extras.prepare.sources.records import hash_names
from extras.prepare.splits import SPLITS, Buckets, join, write_indices

logger = logging.getLogger(__name__)
USAGE = "python -m extras.prepare.extend OLD NEW --output_dir OUT"
ALIKE = (
    "line_by_line",
    "max_seq_length",
    "pad_to_max_length",
    "gaps",
    "chains",
)  # of OLD and NEW: how records are encoded
# What becomes of a record of NEW.
ADDED, KNOWN, COPY, RELATIVE = range(4)


@dataclass
class Arguments(Flags):
    output_dir: str | None = flag(None, "the extended data go to OUTPUT_DIR/arrow")
    cluster_table: str | None = flag(None, "clusters of NEW's proteins, as of step 1")
    overwrite: bool = flag(False, "replace an existing output")
    verify: bool = flag(False, "read a complete output and compare its checksums")

    def missing(self) -> Iterator[Missing]:
        if not self.output_dir:
            yield Missing("--output_dir", "where the extended data go", "data/extended")


class Prepared:
    """A finished output of step 1, or of this command. UserError for any other directory."""

    def __init__(self, directory: Path):
        self.arrow = directory / "arrow"
        record = read_record(self.arrow)
        if record is None or not record["made_from"].get("line_by_line"):
            raise UserError(f"{self.arrow}: not a finished output of step 1 with a protein a record")
        if alphabet := recorded_alphabet(self.arrow):
            raise UserError(f"{self.arrow}: in the alphabet {alphabet.name}: only data in ESM-2's can be extended")
        self.made_from, self.results = record["made_from"], record["results"]

    @property
    def clustered(self) -> bool:
        return (self.arrow / "train" / DIRECTORY).is_dir()


def state_of(arrow: Path, split: str) -> dict:
    return json.loads((arrow / split / "state.json").read_text())


def files_of(arrow: Path, split: str) -> list[Path]:
    return [arrow / split / entry["filename"] for entry in state_of(arrow, split)["_data_files"]]


def batches_of(arrow: Path, *splits: str) -> Iterator[pa.RecordBatch]:
    for file in (file for split in splits for file in files_of(arrow, split)):
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            yield from (batch for batch in stream if batch.num_rows)


def names_of(arrow: Path, *splits: str) -> Iterator[pa.Array]:
    """As the table of clusters has them."""
    return (without_prefix(batch.column("id")) for batch in batches_of(arrow, *splits))


def lists_of(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Token ids uint8 [T] of a batch, and offsets int64 [N + 1] from 0."""
    lists = batch.column("input_ids")
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


def lengths_of(batch: pa.RecordBatch) -> np.ndarray:
    """Tokens of each record without <pad>, int64 [N]."""
    ids, offsets = lists_of(batch)
    return np.add.reduceat(ids != PAD, offsets[:-1], dtype=np.int64)


def count_lengths(lengths: Counter, batch: pa.RecordBatch) -> None:
    values, counts = np.unique(lengths_of(batch), return_counts=True)
    lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def compare(old: Prepared, new: Prepared, scratch: Path) -> tuple[np.ndarray, int]:
    """What becomes of NEW's records by their content, uint8 [records], memory-mapped; records of OLD that are gone."""
    of_old, of_new = Buckets(scratch / "old"), Buckets(scratch / "new")
    for label, split in enumerate(SPLITS):
        for batch in batches_of(old.arrow, split):
            of_old.add(hash_records(*lists_of(batch)), np.full(batch.num_rows, label))
    for batch in batches_of(new.arrow, *SPLITS):
        of_new.add(hash_records(*lists_of(batch)), np.arange(of_new.rows, of_new.rows + batch.num_rows))
    of_old.flush()
    of_new.flush()
    fates, gone = open_memmap(scratch / "fates.npy", "w+", np.uint8, (of_new.rows,)), 0
    for (hashes, labels), (found, numbers) in zip(of_old, of_new, strict=True):
        fates[numbers[np.isin(found, hashes)]] = KNOWN
        fates[numbers[np.isin(found, hashes[labels > 0])]] = COPY
        gone += int((~np.isin(hashes, found)).sum())
    of_old.remove()
    of_new.remove()
    return fates, gone


def leave_out_relatives(old: Prepared, new: Prepared, table: Path, fates: np.ndarray, scratch: Path) -> dict[str, int]:
    """Mark NEW's records that share a cluster with a held-out protein, under its name in OLD or in NEW; counts.

    UserError if the table lacks many proteins of NEW, or many that are held out.
    """
    held_out = np.concatenate([np.empty(0, np.uint64), *map(hash_names, names_of(old.arrow, "validation", "test"))])
    named = np.zeros(len(held_out), bool)
    for _, members in read_table(table):
        named |= np.isin(held_out, members)
    unnamed = int((~named).sum())
    if unnamed > MAX_MISSING * len(held_out):
        why = explain(names_of(old.arrow, "validation", "test"), read_names(table))
        raise UserError(
            f"--cluster_table {table}: names only {len(held_out) - unnamed:,} of the {len(held_out):,} held-out "
            f"proteins of {old.arrow}, whose relatives would be trained on: {why}"
        )

    def everyone() -> Iterator[np.ndarray]:  # NEW, OLD's train, held out: numbered in this order
        yield from map(hash_names, names_of(new.arrow, *SPLITS))
        yield from map(hash_names, names_of(old.arrow, "train"))
        yield held_out

    joined = join(everyone(), read_table(table), 0, scratch / "everyone")
    if joined.missing > MAX_MISSING * joined.buckets.rows:
        raise UserError(
            f"--cluster_table {table}: lacks {joined.missing:,} of the {joined.buckets.rows:,} proteins: "
            f"{explain(names_of(new.arrow, *SPLITS), read_names(table))}"
        )
    of_train = 0
    first_held_out = joined.buckets.rows - len(held_out)
    for clusters, numbers in joined.buckets:
        numbers = numbers.astype(np.int64)
        of_new = numbers < len(fates)
        is_held_out = numbers >= first_held_out
        is_held_out[of_new] = fates[numbers[of_new]] == COPY
        related = np.isin(clusters, clusters[is_held_out]) & ~is_held_out
        of_train += int((related & ~of_new).sum())
        mine = numbers[related & of_new]
        fates[mine[fates[mine] == ADDED]] = RELATIVE
    joined.buckets.remove()
    return {
        "held_out_not_in_cluster_table": unnamed,
        "not_in_cluster_table": joined.missing,
        "train_with_held_out_relative": of_train,
    }


def link(source: Path, target: Path) -> None:
    """A hard link, or a copy where there can be none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_train(old: Prepared, new: Prepared, fates: np.ndarray, build: Build) -> Counter:
    """OLD's files and then those of the added records, whose lengths are counted and returned."""
    directory = build.paths["arrow"] / "train"
    directory.mkdir()
    shutil.rmtree(build.scratch / "added", ignore_errors=True)
    writer = ShardWriter(build.scratch / "added", arrow_schema(TOKEN_FEATURES))
    lengths: Counter = Counter()
    first = 0
    for batch in batches_of(new.arrow, *SPLITS):
        added = fates[first : first + batch.num_rows] == ADDED
        first += batch.num_rows
        if added.any():
            rows = batch.filter(pa.array(added))
            writer.write(rows)
            count_lengths(lengths, rows)
    writer.end()
    before = files_of(old.arrow, "train")
    shards = len(before) + len(writer.ended)
    for number, file in enumerate(before):
        link(file, directory / shard_name(number, shards))
    for number, (file, _, _) in enumerate(writer.ended, len(before)):
        file.rename(directory / shard_name(number, shards))
    records = old.results["train"] + lengths.total()
    write_dataset_files(directory, TOKEN_FEATURES, shards, records)
    of_old = state_of(old.arrow, "train")
    extended = [*of_old.get(EXTENDS, ()), f"{of_old['_fingerprint']}-{old.results['train']}"]
    kept = {CHAINS: True} if of_old.get(CHAINS) else {}
    add_to_state(directory, {EXTENDS: extended} | kept)
    return lengths


def index_train(table: Path, build: Build) -> None:
    """Make the index of train's clusters."""
    scratch = build.scratch / "index"
    shutil.rmtree(scratch, ignore_errors=True)
    joined = join(map(hash_names, names_of(build.paths["arrow"], "train")), read_table(table), 0, scratch)
    labels = np.zeros(joined.buckets.rows, np.uint8)
    directories = [build.paths["arrow"] / "train" / DIRECTORY, scratch / "validation", scratch / "test"]
    for directory in directories:
        directory.mkdir()
    write_indices(joined.buckets, labels, directories, scratch)
    clusters = Clusters(directories[0])
    largest = int(np.diff(clusters.offsets).max())
    build.results |= {"train_clusters": len(clusters), "train_largest_cluster": largest}


def extend(old: Prepared, new: Prepared, table: Path | None, build: Build) -> None:
    """Build the extended data. table: of clusters. UserError if there is nothing to add, or a table of others."""
    if (counts := build.done("compared")) is None:
        shutil.rmtree(build.scratch)
        build.scratch.mkdir()
        with log_every("Comparing the releases"):
            fates, gone = compare(old, new, build.scratch)
            of_clusters = leave_out_relatives(old, new, table, fates, build.scratch) if table else {}
        fates.flush()
        counted = np.bincount(fates, minlength=4).tolist()
        names = ("added", "known", "copies_of_held_out", "relatives_of_held_out")
        counts = dict(zip(names, counted, strict=True)) | {"gone": gone} | of_clusters
        if not counts["added"]:
            raise UserError(f"{new.arrow}: {old.arrow} has all of its records, or holds out relatives: nothing to add")
        sync_directory(build.scratch)
        build.note("compared", counts)
    report(counts)
    fates = np.load(build.scratch / "fates.npy", mmap_mode="r")
    arrow = build.paths["arrow"]
    shutil.rmtree(arrow)  # of a run that was killed
    arrow.mkdir()
    lengths = write_train(old, new, fates, build)
    for split in SPLITS[1:]:
        shutil.copytree(old.arrow / split, arrow / split, copy_function=link)
    write_dataset_dict(arrow, list(SPLITS))
    sizes = {split: old.results[split] for split in SPLITS}
    sizes["train"] += counts["added"]
    build.results |= {"records": sum(sizes.values()), **sizes, "extended": counts}
    if "tokens" in old.results:
        added = sum(tokens * records for tokens, records in lengths.items())
        build.results["tokens"] = old.results["tokens"] + added
    if old.made_from.get("max_seq_length") is None:
        for batch in batches_of(old.arrow, *SPLITS):
            count_lengths(lengths, batch)
        residues = Counter({tokens - 2: records for tokens, records in lengths.items()})
        build.results["residues"] = length_quantiles(residues)
    if table:
        index_train(table, build)
    build.results["bytes"] = sum(path.stat().st_size for path in arrow.rglob("*.arrow"))
    write_json_flushed(arrow / REPORT, build.results, sort_keys=False)


def report(counts: dict[str, int]) -> None:
    """Say in one line what is added and what is not."""
    said = {name: f"{count:,}" for name, count in counts.items()}
    logger.info(
        "Added %s records; %s known, %s copies and %s relatives of held-out proteins left out; %s gone from NEW, kept",
        *(said[name] for name in ("added", "known", "copies_of_held_out", "relatives_of_held_out", "gone")),
    )
    if counts.get("train_with_held_out_relative"):
        logger.warning(
            "%s records that OLD has trained on share a cluster of NEW's release with a held-out protein: kept",
            said["train_with_held_out_relative"],
        )
    if counts.get("held_out_not_in_cluster_table"):
        logger.warning(
            "%s held-out proteins are not in the table of clusters: their relatives are told by content alone",
            said["held_out_not_in_cluster_table"],
        )


def describe(old: Prepared, new: Prepared, table: Path | None) -> dict:
    """All that the output depends on. UserError unless OLD and NEW go together."""
    for key in ALIKE:
        if (before := old.made_from.get(key)) != (now := new.made_from.get(key)):
            raise UserError(f"{new.arrow}: --{key} is {now}, and {before} in {old.arrow}: prepare NEW with the same")
    if old.clustered and table is None:
        raise UserError(
            f"{old.arrow} was split by clusters: give --cluster_table, the clusters of NEW's release, or relatives of "
            "held-out proteins would be trained on"
        )
    return {
        "extends": content_hash(old.arrow / RECORD),
        "with": content_hash(new.arrow / RECORD),
        **{key: old.made_from.get(key) for key in ALIKE},
        **({"cluster_table": content_hash(table)} if table else {}),
    }


def main() -> None:
    words = sys.argv[1:]
    paths = [] if words[:1] in (["-h"], ["--help"], ["--help_all"]) else words[:2]
    if any(word.startswith("-") for word in paths) or len(paths) == 1:
        raise UserError(f"give the two prepared directories first: {USAGE}")
    args = parse_arguments(__doc__, Arguments, words[len(paths) :], program="python -m extras.prepare.extend OLD NEW")
    if not paths:
        raise UserError(f"usage: {USAGE}")
    output_dir, table = Path(args.output_dir), Path(args.cluster_table) if args.cluster_table else None
    refuse_inputs(output_dir, {"OLD": paths[0], "NEW": paths[1], "--cluster_table": args.cluster_table})
    if table and not table.is_file():
        raise UserError(f"--cluster_table {table}: no such file")
    old, new = map(Prepared, map(Path, paths))
    with building(output_dir, ["arrow"], describe(old, new, table), args.overwrite, args.verify) as build:
        if build.paths:
            extend(old, new, table, build)


if __name__ == "__main__":
    run(main, resumable=True)
