"""Embeddings of proteins to Parquet: means over residues, or each residue's; part by part, in the input's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from common.cli import UserError
from common.files.json_files import replace_flushed
from extras.inference.encoder import Encoder, Progress, tokens_of, windows

Protein = tuple[str, bytes]  # name and residues
Facts = dict[bytes, bytes]  # the metadata of a table: what it was made from


def embed(encoder: Encoder, proteins: list[Protein], done: Progress = lambda tokens: None) -> list[Tensor]:
    """fp32 [residues, hidden] of each; without `<cls>` and `<eos>`. done: as `Encoder.hidden`."""
    longest = encoder.flags.max_seq_length - 2
    parts = [(n, window) for n, (_, text) in enumerate(proteins) for window in windows(len(text), longest)]
    found = encoder.hidden([tokens_of(proteins[n][1], window.start, window.length) for n, window in parts], done)
    pieces: list[list[Tensor]] = [[] for _ in proteins]
    for (n, window), hidden in zip(parts, found, strict=True):
        pieces[n].append(hidden[1 + window.begin : 1 + window.end])
    return [torch.cat(of_one) for of_one in pieces]


def table(proteins: list[Protein], embedded: list[Tensor], per_residue: bool, facts: Facts) -> pa.Table:
    """id, length, and `embedding`: the mean, float32 [hidden]; per_residue: a list of such, one a residue."""
    hidden = embedded[0].shape[1]
    if per_residue:
        rows = np.concatenate([each.numpy() for each in embedded])
        ends = np.cumsum([0, *(len(each) for each in embedded)])
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), hidden)
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), vectors)
    else:
        means = np.stack([each.mean(0).numpy() for each in embedded])
        column = pa.FixedSizeListArray.from_arrays(pa.array(means.ravel()), hidden)
    lengths = pa.array([len(text) for _, text in proteins], pa.int32())
    made = pa.table({"id": [name for name, _ in proteins], "length": lengths, "embedding": column})
    return made.replace_schema_metadata(facts)


def in_parts(proteins: Iterable[Protein], size: int) -> Iterator[list[Protein]]:
    """So many at a time."""
    proteins = iter(proteins)
    while part := list(islice(proteins, size)):
        yield part


def write_part(made: pa.Table, path: Path) -> None:
    """Complete and on the disk, or not at all; with a checksum of every page."""
    with replace_flushed(path) as partial:
        pq.write_table(made, partial, write_page_checksum=True)


def is_made(path: Path, proteins: list[Protein], facts: Facts) -> bool:
    """Whether the table of these proteins is there, and as it was written: a disk may have lost what it confirmed."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            ids = [name for batch in file.iter_batches() for name in batch.column("id").to_pylist()]
            return file.schema_arrow.metadata == facts and ids == [name for name, _ in proteins]
    except (OSError, pa.ArrowException):
        return False


def check_parts(directory: Path, count: int, facts: Facts) -> None:
    """UserError unless the parts are all there, and from this model and input: ranks may see different directories."""
    for number in range(count):
        path = part_path(directory, number)
        try:
            of = pq.read_schema(path).metadata
        except (OSError, pa.ArrowException):
            of = None
        if of != facts:
            what = "is not there" if of is None else "is of another model or input"
            raise UserError(f"{path}: {what}: give all ranks one directory that they share, and start again")


def part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.parquet"
