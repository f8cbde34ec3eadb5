"""All proteins that embed.py embedded, as vectors of length 1: their inner products are cosine similarities."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from common.cli import UserError
from extras.after.inference.embedded import facts_of, is_per_residue, parts_of, read_tables, vectors_in

FEWEST = 4  # proteins of a map
OF_FILES_ALONE = ("proteins_per_part", "bf16")  # settings that embeddings to compare need not share


@dataclass(frozen=True)
class Embedded:
    """vectors: float32 [proteins, hidden], of length 1; lengths: residues of each protein."""

    ids: list[str]
    lengths: np.ndarray
    vectors: np.ndarray


def read_embedded(embeddings: str, column: str, where: str) -> Embedded:
    """The embeddings in the order of the file; of residues their mean. where: for errors: the flag and its value.

    UserError for tables that do not fit together, for an id that two proteins have, and for an embedding that has no
    direction: NaN, infinite or zero.
    """
    ids: list[str] = []
    lengths, vectors = [], []
    for table in read_tables(embeddings, column, where.split()[0]):
        ids += table["id"].to_pylist()
        lengths.append(table["length"].to_numpy())
        vectors.append(matrix_of(table, column))
    name, count = Counter(ids).most_common(1)[0] if ids else ("", 0)
    if count > 1:
        raise UserError(
            f"{where}: two proteins have the id {name[:40]!r}: rename one in the FASTA file, and embed again"
        )
    return Embedded(ids, np.concatenate(lengths), of_length_one(np.concatenate(vectors), ids, where))


def matrix_of(table: pa.Table, column: str) -> np.ndarray:
    """float32 [proteins, hidden]."""
    if is_per_residue(table, column):
        return np.stack([of_residues.mean(0) for of_residues in vectors_in(table, column)])
    return np.concatenate([chunk.flatten().to_numpy().reshape(len(chunk), -1) for chunk in table[column].chunks])


def of_length_one(vectors: np.ndarray, ids: list[str], where: str) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    usable = (np.isfinite(norms) & (norms > 0)).ravel()
    if not usable.all():
        name = ids[int(np.argmin(usable))]
        raise UserError(
            f"{where}: the embedding of {name[:40]!r} is NaN, infinite or zero, {int((~usable).sum()):,} in all: "
            "embed again, without --bf16 or by another checkpoint"
        )
    return vectors / norms


def check_for_a_map(embedded: Embedded, where: str) -> None:
    """UserError for fewer than 4 proteins, or embeddings that are all the same."""
    if (count := len(embedded.ids)) < FEWEST:
        raise UserError(f"{where}: {count} proteins: a map needs {FEWEST} or more")
    if not np.ptp(embedded.vectors, axis=0).any():
        raise UserError(f"{where}: all {count:,} embeddings are the same: is the model trained?")


def check_comparable(embeddings: str, query: str) -> None:
    """UserError for embeddings of another model, layer or pooling than those they are to be compared with."""
    kept, new = (
        facts_of(parts_of(path, flag)[0]) for path, flag in ((embeddings, "--embeddings"), (query, "--query"))
    )
    if kept.get("model_hash") != new.get("model_hash") or how(kept) != how(new):
        raise UserError(
            f"--query {query}: of another model, or other flags, than --embeddings {embeddings}: embed both alike"
        )


def how(facts: dict[str, str]) -> dict[str, object]:
    """The settings that decide what an embedding means."""
    settings = json.loads(facts.get("settings", "{}"))
    return {name: value for name, value in settings.items() if name not in OF_FILES_ALONE}
