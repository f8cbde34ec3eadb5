"""Labels of a table and the embeddings of their proteins, of embed.py or computed here."""

from __future__ import annotations

import json
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.groups import groups_of
from extras.after.downstream.labels import place_of, read_rows, sequences_of, usable_rows
from extras.after.downstream.probe_flags import ProbeFlags
from extras.after.downstream.probes import Labelled, labelled
from extras.after.downstream.saved_probe import Source
from extras.after.inference.embedded import check_made_from, embed_into, facts_of, parts_of, read_tables, vectors_in
from extras.after.inference.embedding import EmbeddingFlags
from extras.prepare.sources.proteins import proteins_of

POSITION = "position"  # column


def embeddings_of(args: ProbeFlags, ids: set[str], per_residue: bool) -> dict[str, np.ndarray]:
    """As `read_embeddings`, computed first if a model is given."""
    if args.embeddings:
        return read_embeddings(args, ids)
    with TemporaryDirectory(prefix="probe-") as directory:
        embeddings = embed_into(directory, args, str(args.fasta), per_residue)
        return read_embeddings(replace(args, embeddings=embeddings), ids)


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


def read_embeddings(args: ProbeFlags, ids: set[str]) -> dict[str, np.ndarray]:
    """{id: float32 [hidden], or per residue [L, hidden]} of these proteins. UserError unless of this FASTA file, and
    of all its proteins."""
    embeddings, column, rows = str(args.embeddings), args.embedding_column, 0
    check_made_from(embeddings, str(args.fasta))
    found: dict[str, np.ndarray] = {}
    for table in read_tables(embeddings, column):
        rows += table.num_rows
        table = table.filter(pc.is_in(table["id"], pa.array(sorted(ids), table.schema.field("id").type)))
        found |= zip(table["id"].to_pylist(), vectors_in(table, column), strict=True)
    proteins = sum(1 for _ in proteins_of(str(args.fasta), args.proteins))
    if rows != proteins or found.keys() != ids:
        raise UserError(
            f"--embeddings {embeddings}: of {rows:,} proteins, --fasta {args.fasta} has {proteins:,}: the "
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
