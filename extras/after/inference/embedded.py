"""The tables that embed.py wrote, read by the scripts that work on embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.cli import UserError, one_line
from common.distributed.world import World
from common.files.content_hash import content_hash
from extras.after.inference.embedding import OUTPUT, EmbeddingFlags, embed_all
from extras.after.inference.encoder import part_path


def embed_into(directory: str, args: Any, fasta: str, per_residue: bool = False) -> str:
    """Write there what embed.py writes; returns the directory. args: of a script that has these flags of embed.py."""
    flags = EmbeddingFlags(
        args.model_name_or_path,
        fasta=fasta,
        output_dir=directory,
        per_residue=per_residue,
        bf16=args.bf16,
        use_cpu=args.use_cpu,
        proteins=args.proteins,
    )
    embed_all(flags, World.from_environment(args.use_cpu))
    return directory


def parts_of(embeddings: str, given: str = "--embeddings") -> list[Path]:
    """The tables that embed.py wrote. UserError if one is missing, or not from the same command as the others.

    given: the flag that names the directory.
    """
    directory = Path(embeddings) / OUTPUT
    parts = sorted(directory.glob("part-*.parquet"))
    if not parts:
        raise UserError(f"{given} {embeddings}: no finished embeddings there: run embed.py first")
    first = facts_of(parts[0])
    for number, part in enumerate(parts):
        if part != (expected := part_path(directory, number)):
            raise UserError(f"{expected}: is missing: run embed.py again")
        if facts_of(part) != first:
            raise UserError(f"{part}: of another model or other flags than {parts[0].name}: run embed.py --overwrite")
    return parts


def facts_of(part: Path) -> dict[str, str]:
    """{"model_hash", "fasta_hash", "settings"} of a table."""
    try:
        metadata = pq.read_schema(part).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise unreadable(part, error) from error
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in metadata.items()}


def unreadable(part: Path, error: Exception) -> UserError:
    return UserError(f"{part}: cannot be read: {one_line(error)[:120]}: run embed.py again")


def check_made_from(embeddings: str, fasta: str) -> None:
    """UserError unless the embeddings are of this FASTA file."""
    if facts_of(parts_of(embeddings)[0]).get("fasta_hash") != content_hash(fasta):
        raise UserError(f"--embeddings {embeddings}: not of --fasta {fasta}: give the file embed.py had")


def read_tables(embeddings: str, column: str, given: str = "--embeddings") -> Iterator[pa.Table]:
    """The columns `id`, `length` and `column` of each table. UserError for one that lacks it, or cannot be read."""
    for part in parts_of(embeddings, given):
        try:
            with pq.ParquetFile(part) as file:
                names = file.schema_arrow.names
                if column not in names:
                    columns = ", ".join(name for name in names if name.startswith("embedding"))
                    raise UserError(f"{part}: no column {column!r}: --embedding_column is of {columns}")
                table = file.read(["id", "length", column])
        except (OSError, pa.ArrowException) as error:
            raise unreadable(part, error) from error
        yield table


def is_per_residue(table: pa.Table, column: str) -> bool:
    return pa.types.is_list(table.schema.field(column).type)


def vectors_in(table: pa.Table, column: str) -> list[np.ndarray]:
    """float32 [hidden] of each protein, or per residue [L, hidden]."""
    cells = (cell.values for cell in table[column])
    if is_per_residue(table, column):
        return [cell.flatten().to_numpy().reshape(len(cell), -1) for cell in cells]
    return [cell.to_numpy() for cell in cells]
