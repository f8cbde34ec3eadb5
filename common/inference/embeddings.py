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

from common.files.output_directory import sync_directory
from common.inference.encoder import Encoder, Progress
from common.inference.windows import tokens_of, windows

Protein = tuple[str, bytes]  # name and residues


def embed(encoder: Encoder, proteins: list[Protein], done: Progress = lambda tokens: None) -> list[Tensor]:
    """fp32 [residues, hidden] of each; without `<cls>` and `<eos>`. done: as `Encoder.hidden`."""
    longest = encoder.flags.max_seq_length - 2
    parts = [(n, window) for n, (_, text) in enumerate(proteins) for window in windows(len(text), longest)]
    found = encoder.hidden([tokens_of(proteins[n][1], window.start, window.length) for n, window in parts], done)
    pieces: list[list[Tensor]] = [[] for _ in proteins]
    for (n, window), hidden in zip(parts, found, strict=True):
        pieces[n].append(hidden[1 + window.begin : 1 + window.end])
    return [torch.cat(of_one) for of_one in pieces]


def table(proteins: list[Protein], embedded: list[Tensor], per_residue: bool) -> pa.Table:
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
    return pa.table({"id": [name for name, _ in proteins], "length": lengths, "embedding": column})


def in_parts(proteins: Iterable[Protein], size: int) -> Iterator[list[Protein]]:
    """So many at a time."""
    proteins = iter(proteins)
    while part := list(islice(proteins, size)):
        yield part


def write_part(made: pa.Table, path: Path) -> None:
    """Complete or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    pq.write_table(made, partial)
    partial.rename(path)
    sync_directory(path.parent)
