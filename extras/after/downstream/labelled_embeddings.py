"""Labels of a table and the embeddings of their proteins, of embed.py or computed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.cli import UserError, one_line
from common.distributed.world import World
from common.files.content_hash import content_hash
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.groups import groups_of
from extras.after.downstream.labels import place_of, read_rows, sequences_of, usable_rows
from extras.after.downstream.probe_flags import ProbeFlags
from extras.after.downstream.probes import Labelled, labelled
from extras.after.downstream.saved_probe import Source
from extras.after.inference.embedding import OUTPUT, EmbeddingFlags, embed_all
from extras.after.inference.encoder import part_path
from extras.prepare.sources.proteins import proteins_of

POSITION = "position"  # column


def embeddings_of(args: ProbeFlags, ids: set[str], per_residue: bool) -> dict[str, np.ndarray]:
    """As `read_embeddings`, computed first if a model is given."""
    if args.embeddings:
        return read_embeddings(args, ids)
    with TemporaryDirectory(prefix="probe-") as directory:
        flags = EmbeddingFlags(
            args.model_name_or_path,
            fasta=args.fasta,
            output_dir=directory,
            per_residue=per_residue,
            bf16=args.bf16,
            use_cpu=args.use_cpu,
            proteins=args.proteins,
        )
        embed_all(flags, World.from_environment(args.use_cpu))
        return read_embeddings(replace(args, embeddings=directory), ids)


def source_of(args: ProbeFlags, per_residue: bool) -> Source:
    """What a saved probe says of its embeddings. per_residue: of those that are computed here."""
    if args.embeddings:
        facts = facts_of(parts_of(args.embeddings)[0])
        settings, column = json.loads(facts["settings"]), args.embedding_column
        layers = settings.pop("repr_layers", None) or [None]
        layer = layers[0] if column == "embedding" else int(column.rpartition("_")[2])
        return Source(None, facts["model_hash"], settings, layer)
    settings = EmbeddingFlags(per_residue=per_residue, bf16=args.bf16).settings
    return Source(args.model_name_or_path, model_hash(str(args.model_name_or_path)), settings, None)


def parts_of(embeddings: str) -> list[Path]:
    """The tables that embed.py wrote. UserError if one is missing, or not from the same command as the others."""
    directory = Path(embeddings) / OUTPUT
    parts = sorted(directory.glob("part-*.parquet"))
    if not parts:
        raise UserError(f"--embeddings {embeddings}: no finished embeddings there: run embed.py first")
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
        raise UserError(f"{part}: cannot be read: {one_line(error)[:120]}: run embed.py again") from error
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in metadata.items()}


def read_embeddings(args: ProbeFlags, ids: set[str]) -> dict[str, np.ndarray]:
    """{id: float32 [hidden], or per residue [L, hidden]} of these proteins. UserError unless of this FASTA file, and
    of all its proteins."""
    parts, rows = parts_of(str(args.embeddings)), 0
    if facts_of(parts[0]).get("fasta_hash") != content_hash(str(args.fasta)):
        raise UserError(f"--embeddings {args.embeddings}: not of --fasta {args.fasta}: give the file embed.py had")
    found: dict[str, np.ndarray] = {}
    for part in parts:
        try:
            with pq.ParquetFile(part) as file:
                schema = file.schema_arrow
                if args.embedding_column not in schema.names:
                    columns = ", ".join(name for name in schema.names if name.startswith("embedding"))
                    raise UserError(f"{part}: no column {args.embedding_column!r}: --embedding_column is of {columns}")
                table = file.read(["id", args.embedding_column])
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{part}: cannot be read: {one_line(error)[:120]}: run embed.py again") from error
        rows += table.num_rows
        per_residue = pa.types.is_list(schema.field(args.embedding_column).type)
        for name, embedding in zip(table["id"].to_pylist(), table[args.embedding_column], strict=True):
            if name in ids:
                values = embedding.values
                found[name] = (
                    values.flatten().to_numpy().reshape(len(values), -1) if per_residue else values.to_numpy()
                )
    proteins = sum(1 for _ in proteins_of(str(args.fasta), args.proteins))
    if rows != proteins or found.keys() != ids:
        raise UserError(
            f"--embeddings {args.embeddings}: of {rows:,} proteins, --fasta {args.fasta} has {proteins:,}: the "
            "tables are not those of one run: run embed.py --overwrite"
        )
    return found


def of_positions(
    args: ProbeFlags, column: str, rows: list[dict[str, str]], splits: list[str] | None, proteins: dict[str, str]
) -> tuple[list[dict[str, str]], list[str] | None]:
    """A row a protein, with a label for each residue, and its split, from a row a residue. UserError for a position
    that is not one of the protein, or comes twice, and for a protein with two splits or clusters."""
    first: dict[str, tuple[dict[str, str], str]] = {}
    words: dict[str, list[str]] = {}
    for row, split in zip(rows, splits or [""] * len(rows), strict=True):
        name, where = row[args.id_column], place_of(row, f"--labels {args.labels}")
        residues = words.setdefault(name, ["."] * len(proteins[name]))
        place = int(row[POSITION]) - 1 if row[POSITION].strip().isdecimal() else -1
        if not 0 <= place < len(residues):
            raise UserError(
                f"{where}: {POSITION} {row[POSITION][:20]!r}: the protein has residues 1 to {len(residues)}"
            )
        if residues[place] != ".":
            raise UserError(f"{where}: a second label of residue {place + 1}: leave one")
        residues[place] = "_".join(row[column].replace(",", " ").split())
        of_first, split_of_first = first.setdefault(name, (row, split))
        cluster = args.cluster_column
        if split != split_of_first or (cluster and row[cluster] != of_first[cluster]):
            raise UserError(
                f"{where}: {name[:40]!r} has another split or cluster in row {of_first['line']}: leave one"
            )
    merged = [row | {column: " ".join(words[name])} for name, (row, _) in first.items()]
    return merged, [split for _, split in first.values()] if splits else None


def labelled_embeddings(args: ProbeFlags) -> dict[str, tuple[list[Labelled], list[np.ndarray | None]]]:
    """Of each column of labels {column: (each protein with its labels, its embedding)}. UserError names the first row
    that does not fit."""
    where = f"--labels {args.labels}"
    named = (args.id_column, *args.columns, args.split_column, args.cluster_column)
    table = read_rows(str(args.labels), where, [name for name in named if name])
    has_positions, usable = POSITION in table[0], {}
    proteins: dict[str, str] = {}
    for column in args.columns:
        sequences = sequences_of(table, column, args.fasta, where, args.id_column, args.proteins)
        proteins |= {row[args.id_column]: sequence for row, sequence in zip(table, sequences, strict=True) if sequence}
        named_column = where if len(args.columns) == 1 else f"{where} ({column})"
        usable[column] = usable_rows(table, sequences, column, args.split_column, None, named_column)
        if args.folds and usable[column][1]:
            raise UserError(f"--folds {args.folds}: {where} has splits: leave out their column, or --folds")
    ids = {row[args.id_column] for rows, _ in usable.values() for row in rows}
    embedded = embeddings_of(args, ids, args.per_residue or has_positions)
    if has_positions and next(iter(embedded.values())).ndim == 1:
        raise UserError(
            f"--embeddings {args.embeddings}: one a protein, but the labels have a {POSITION}: give "
            "embed.py --per_residue"
        )
    return {
        column: of_column(args, column, rows, splits, proteins, embedded) for column, (rows, splits) in usable.items()
    }


def of_column(
    args: ProbeFlags,
    column: str,
    rows: list[dict[str, str]],
    splits: list[str] | None,
    proteins: dict[str, str],
    embedded: dict[str, np.ndarray],
) -> tuple[list[Labelled], list[np.ndarray | None]]:
    """As `labelled_embeddings`, of one column's rows."""
    where = f"--labels {args.labels}"
    if POSITION in rows[0]:
        rows, splits = of_positions(args, column, rows, splits, proteins)
    names = [row[args.id_column] for row in rows]
    check_unique(names, rows, where)
    sequences = [proteins[name] for name in names]
    groups = groups_of(args.clustering, rows, sequences, names)
    return labelled(rows, names, sequences, groups, splits, column, where), [embedded[name] for name in names]


def check_unique(names: list[str], rows: list[dict[str, str]], where: str) -> None:
    """UserError for a second row of a protein."""
    seen: set[str] = set()
    for name, row in zip(names, rows, strict=True):
        if name in seen:
            raise UserError(f"{place_of(row, where)}: a second label of {name[:40]!r}: leave one")
        seen.add(name)
