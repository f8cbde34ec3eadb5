"""Embeddings of the chains of records, each with the others in view."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from extras.after.inference.chains import named_chains, of_chains
from extras.after.inference.encoder import Encoder, Progress, Protein, embed, in_parts, pooled

AT_A_TIME = 64  # records whose embeddings of residues are in memory


def embed_chains(
    encoder: Encoder, proteins: list[Protein], done: Progress, pooling: str | None, layers: Sequence[int]
) -> list[Tensor]:
    """As `embed`, of each chain of the records in turn; all see the others. "cls" is the record's."""
    found: list[Tensor] = []
    for part in in_parts(proteins, AT_A_TIME):
        way = pooling if pooling == "cls" else None
        for (_, text), of_record in zip(part, embed(encoder, part, done, way, layers), strict=True):
            if pooling == "cls":
                found += [of_record] * len(named_chains("", text))
            else:
                found += [pooled(of_chain, pooling) for of_chain in of_chains(text, of_record)]
    return found
