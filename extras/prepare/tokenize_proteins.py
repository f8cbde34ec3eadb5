"""Step 1: read and encode records file by file, draw splits, leave copies out, and make each split's directory."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from common.data.alphabet import ALPHABET, Alphabet
from common.data.token_store import CHAINS
from common.files.safe_files import write_json_flushed
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.cluster_splits import by_table, cluster_records, publish_indices, split_by_clusters
from extras.prepare.dataset_writer import (
    DatasetWriter,
    Piece,
    add_to_state,
    assemble,
    features_of,
    read_pieces,
    write_dataset_dict,
)
from extras.prepare.duplicates import drop_copies, key_files, mark_copies, open_copies, write_report
from extras.prepare.encode import Chunker, FileEncoder, encode_rows, usable_threads
from extras.prepare.output_directory import Build
from extras.prepare.relatives import IDENTITY, SEARCHED, count_relatives
from extras.prepare.shards import ENCODED, EncodedFile, split_files, write_results
from extras.prepare.sources.csv_records import count_lines
from extras.prepare.sources.protein_records import file_of, read_records, require_clusters
from extras.prepare.sources.records import BadRecords, characters, texts
from extras.prepare.sources.residues import Changes, Cleaner
from extras.prepare.splits import SPLITS, Joined, labels_by_file, of_clusters, split_labels, split_sizes
from extras.prepare.structure_letters import with_structures
from extras.prepare.tokenize_flags import TokenizeFlags

logger = logging.getLogger(__name__)


def rows_of(path: Path, cleaner: Cleaner, args: TokenizeFlags) -> Iterator[pa.RecordBatch]:
    rows = read_records(path, cleaner, args, args.line_ends_in_text)
    return with_structures(rows, args.opened_structures, cleaner)


def quick_to_count(files: list[Path]) -> bool:
    """Whether their records can be counted in a fraction of the time that reading them takes."""
    return all(".csv" in path.suffixes for path in files)


def count_records(build: Build, files: list[Path], args: TokenizeFlags) -> list[int]:
    """Number of valid records of every file."""
    if (noted := build.done("records")) is None:
        counts = []
        for path in files:
            # With "error", the first bad record stops the run when it is encoded.
            lines = count_lines(path) if args.on_bad_record == "error" and quick_to_count([path]) else None
            rows = rows_of(path, args.cleaner(path), args)
            counts.append(sum(batch.num_rows for batch in rows) if lines is None else lines)
        noted = {"counts": counts}
        build.note("records", noted)
    return noted["counts"]


def read_ids(files: list[Path], args: TokenizeFlags, counts: list[int]) -> Iterator[pa.Array]:
    """The ids of all records, block by block. counts: gets the number of records of every file."""
    for path in files:
        counts.append(0)
        for rows in rows_of(path, args.cleaner(path), args):
            counts[-1] += rows.num_rows
            yield rows.column("id")


def finish_split(build: Build, split: str, pieces: list[Piece], chunker: Chunker | None, features: dict) -> None:
    """Make the split's directory from its pieces, once."""
    directory = build.paths["arrow"] / split
    if build.done(f"finished {split}"):
        return
    if chunker is None:
        assemble(directory, pieces, build.scratch, features)
    else:
        shutil.rmtree(directory, ignore_errors=True)
        writer = DatasetWriter(directory, features)
        for rows in read_pieces(pieces, build.scratch):
            writer.write(chunker.add(rows))
        writer.write(chunker.finish())
        writer.close()
    build.note(f"finished {split}", True)


def proteins_of(blocks: Iterator[pa.RecordBatch], alphabet: Alphabet) -> Iterator[pa.RecordBatch]:
    """Rows with the amino acids of their texts, to cluster by; X for a token that stands for none."""
    if alphabet == ESM2_TOKENS:
        yield from blocks
        return
    letters = np.where(alphabet.amino_acids == 0, ord("X"), alphabet.amino_acids).astype(np.uint8)
    for rows in blocks:
        data, offsets = characters(rows.column("text"))
        ids = alphabet.ids_of(data[offsets[0] : offsets[-1]])
        text = texts(letters[ids], (offsets - offsets[0]) // alphabet.width, pa.string())
        yield rows.set_column(rows.schema.get_field_index("text"), "text", text)


def note_relatives(args: TokenizeFlags, build: Build, sizes: list[int]) -> None:
    """Count the held-out proteins that have a relative in training, once, for the record. sizes: of the splits."""
    held_out = [split for split, size in zip(SPLITS[1:], sizes[1:], strict=True) if size]
    has_proteins = bool(args.tokens.amino_acids.any())
    if not (has_proteins and args.count_relatives and args.line_by_line and sizes[0] and held_out):
        return
    if sizes[0] > SEARCHED and args.cluster is None:
        again = f"python -m extras.prepare.relatives {args.output_dir}"
        logger.info("Relatives of held-out proteins in train, of %s: count them by %s", f"{sizes[0]:,}", again)
        return
    if (counts := build.done("relatives")) is None:
        threads = usable_threads(args.preprocessing_num_workers)
        identity = IDENTITY if args.cluster is None else args.cluster
        scratch = build.scratch / "relatives"
        counts = count_relatives(build.paths["arrow"], held_out, identity, scratch, threads)
        build.note("relatives", counts)
    build.results["relatives"] = counts


Labels = Iterator[np.ndarray]  # the split of every record of each file, uint8


def encode(
    args: TokenizeFlags, build: Build, root: Path, files: dict[int, Path], labels: Labels | None = None, total: int = 0
) -> list[dict]:
    """What FileEncoder returns for the files, by their numbers. labels: if they are known; total: number of records,
    if it is."""
    if args.line_by_line:
        logger.info("Processing line by line")
        truncate, pad = args.max_seq_length, args.pad_to_max_length
    else:
        logger.info("Concatenating records and cutting them into chunks of %d tokens", args.max_seq_length or 1024)
        truncate, pad = None, False
    workers = usable_threads(args.preprocessing_num_workers)
    mininterval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=total or None, unit=" records", mininterval=mininterval) as bar:

        def progress(records: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(records)

        rows = functools.partial(encode_rows, max_seq_length=truncate, pad=pad, alphabet=args.tokens)
        read = functools.partial(rows_of, args=args)
        encoder = FileEncoder(build, root, rows, read, args.cleaner, workers, len(files), progress)
        labels = itertools.repeat(None) if labels is None else labels
        return list(encoder.run((*item, of_file) for item, of_file in zip(files.items(), labels, strict=False)))


def encode_shard(args: TokenizeFlags, files: dict[int, Path], build: Build) -> None:
    """The shard's files, by their numbers among all input files, encoded without their splits."""
    write_results(build, encode(args, build, build.paths[ENCODED], files), files)


def encode_first(args: TokenizeFlags, files: list[Path], build: Build) -> list[EncodedFile]:
    """All files encoded without their splits, here."""
    root = build.scratch / ENCODED
    root.mkdir(exist_ok=True)
    made = encode(args, build, root, dict(enumerate(files)))
    return [EncodedFile(number, root, of_file) for number, of_file in enumerate(made)]


Ids = Callable[[], Iterator[pa.Array]]  # of all records, block by block


def clusters_of(
    args: TokenizeFlags, files: list[Path], build: Build, ids: Ids, encoded: list[EncodedFile]
) -> tuple[Callable[[Path], Joined], str] | None:
    """How to group the records by clusters, and where these come from; None to draw records one by one."""
    if args.cluster_table:
        return by_table(Path(args.cluster_table), ids, args.seed), f"--cluster_table {args.cluster_table}"
    if args.cluster is not None:
        threads = usable_threads(args.preprocessing_num_workers)
        read = lambda path: proteins_of(rows_of(path, args.cleaner(path), args), args.tokens)  # noqa: E731
        table = cluster_records(build, files, read, args.cluster, threads)
        return by_table(table, ids, args.seed, by_number=True), "MMseqs2"
    if args.line_by_line and any(file.names_clusters for file in encoded):
        named = sum(file.made["clustered"] or 0 for file in encoded)
        require_clusters(args.given_input, named)
        clusters = (block for file in encoded for block in file.clusters())
        missing = sum(file.made["records"] for file in encoded) - named
        return functools.partial(of_clusters, clusters, missing, args.seed), "the input's column of clusters"
    return None


class Plan(NamedTuple):
    """sizes: records of each split; counts: records of each file; clustered: whether splits are of whole clusters."""

    sizes: tuple[int, ...]
    counts: list[int]
    labels: Labels
    clustered: bool


def plan_splits(args: TokenizeFlags, files: list[Path], build: Build, encoded: list[EncodedFile]) -> Plan:
    """Draw the splits of records that are encoded already, or, where none is, are to be counted."""
    sizes_of = functools.partial(
        split_sizes, train=args.train_size, validation=args.validation_size, test=args.test_size
    )
    counts = [file.made["records"] for file in encoded]
    ids = lambda: (block for file in encoded for block in file.ids())  # noqa: E731
    if not encoded:
        ids = functools.partial(read_ids, files, args, counts)
    if clusters := clusters_of(args, files, build, ids, encoded):
        logger.info("Splitting dataset by the clusters of %s", clusters[1])
        sizes, windows = split_by_clusters(build, *clusters, sizes_of, args.train_size is None)
        counts = counts or count_records(build, files, args)  # of a run that was killed after this
    else:
        counts = counts or count_records(build, files, args)
        logger.info("Splitting dataset")
        sizes = sizes_of(sum(counts))
        windows = split_labels(sum(counts), sizes, args.seed)
    logger.info("%s records in %d files", f"{sum(counts):,}", len(counts))
    logger.info("train %s, validation %s, test %s records", *(f"{size:,}" for size in sizes))
    return Plan(tuple(sizes), counts, labels_by_file(windows, counts), clusters is not None)


def tokenize(args: TokenizeFlags, files: list[Path], build: Build, has_clusters: bool) -> None:
    """Make the build's `arrow`. has_clusters: whether a file has a column of them."""
    kinds = {file_of(path, args.content).kind for path in files}
    logger.info("Loading %s files from %s", " and ".join(sorted(kinds)), " ".join(args.source) or args.input_dir)
    # Records whose number is not known are encoded first, all of them, and counted on the way. With --train_size most
    # may be left out: a pass over the input counts them, or names them where a table must know their clusters.
    counted = args.clustered or (not has_clusters and (quick_to_count(files) or args.train_size is not None))
    split_and_finish(args, files, build, [] if counted else encode_first(args, files, build))


def split_and_finish(args: TokenizeFlags, files: list[Path], build: Build, encoded: list[EncodedFile]) -> None:
    """Make the build's `arrow` of files that are encoded already, or of none of them."""
    plan = plan_splits(args, files, build, encoded)
    if encoded:
        made = [file.made for file in encoded]
        split = split_files(build, encoded, plan.labels, usable_threads(args.preprocessing_num_workers))
    else:
        made = encode(args, build, build.scratch, dict(enumerate(files)), plan.labels, sum(plan.counts))
        split = ({name: [Piece(*piece) for piece in of] for name, of in file["pieces"].items()} for file in made)
    pieces = [{name: of_file.get(name, []) for name in SPLITS} for of_file in split]
    finish(args, build, plan, made, pieces)


def finish(
    args: TokenizeFlags, build: Build, plan: Plan, made: list[dict], pieces: list[dict[str, list[Piece]]]
) -> None:
    """Leave copies out, make the splits' directories of the pieces of each file, and write what is known of them."""
    changes, bad_records = Changes(), BadRecords(args.on_bad_record)
    for of_file in made:  # an earlier version noted neither
        changes.add(of_file.get("changes", {}))
        bad_records.add(of_file.get("bad", {}))
    if args.opened_structures is not None:
        args.opened_structures.check(sum(plan.counts), changes.without_structure)
    workers = usable_threads(args.preprocessing_num_workers)
    duplicates = mark_copies(build, len(made), plan.sizes)
    pieces = drop_copies(build, pieces, workers)
    chunks = None if args.line_by_line else args.max_seq_length or 1024
    for split in SPLITS:
        chunker = Chunker(chunks, args.pad_to_max_length, args.tokens) if chunks else None
        of_split = [piece for of_file in pieces for piece in of_file[split]]
        finish_split(build, split, of_split, chunker, features_of(args.tokens.dtype))
    if plan.clustered:
        publish_indices(build, open_copies(build))
    write_dataset_dict(build.paths["arrow"], list(SPLITS))
    if args.alphabet:
        write_json_flushed(build.paths["arrow"] / ALPHABET, json.loads(args.tokens.declared), sort_keys=True)
        build.results["alphabet"] = args.tokens.name
    for split in SPLITS if args.keeps_chains else ():
        add_to_state(build.paths["arrow"] / split, {CHAINS: True})

    sizes = np.subtract(plan.sizes, duplicates.left_out).tolist()
    build.results |= {"records": sum(sizes), **dict(zip(SPLITS, sizes, strict=True))}
    build.results |= {
        "copies_left_out": dict(zip(SPLITS, duplicates.left_out, strict=True)),
        "duplicates_kept": dict(zip(SPLITS, duplicates.repeated, strict=True)),
        "unknown_characters": sum(of_file["unknown"] for of_file in made),
        "records_with_unknown": sum(of_file["records_with_unknown"] for of_file in made),
        "bad_records": bad_records.count,
        "changes": changes.state,
    }
    note_relatives(args, build, sizes)
    truncate = args.max_seq_length if args.line_by_line else None
    write_report(build, key_files(build, len(made)), open_copies(build), truncate)
    changes.report(args.given_input)
    bad_records.report()
