#!/usr/bin/env python3
r"""What a model's embeddings know: a linear probe from embeddings to your labels, judged on held-out proteins.

python probe.py --model_name_or_path out/final_model --fasta proteins.fasta --labels labels.csv --output_dir probed
python probe.py --embeddings embedded --fasta proteins.fasta --labels labels.csv --output_dir probed

The second one reads what embed.py wrote for that file. labels.csv has a row a protein: its `id` in the FASTA file and
its `label`, a number or a class. With --per_residue (of embed.py, too) the label is a string of a class letter a
residue, or numbers separated by blanks (`.` is none), or the column `position` says of which residue it is.
OUTPUT_DIR gets predictions.csv and results.json. docs/after.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import csv
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.cli import UserError, one_line, run
from common.distributed.world import World
from common.files.content_hash import content_hash
from common.flags import Flags, Missing, flag, flat, parse_arguments
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.groups import Clustering, groups_of
from extras.after.downstream.labels import place_of, read_rows, sequences_of, usable_rows
from extras.after.downstream.metrics import about_intervals, shown
from extras.after.downstream.outputs import Manifest, Output, claimed
from extras.after.downstream.probes import (
    PARTS,
    PROBES,
    Examples,
    Labelled,
    contradicting,
    evaluate,
    examples_of,
    labelled,
)
from extras.after.downstream.results import RESULTS, to_open
from extras.after.downstream.stock_model import config_for_proteins
from extras.after.inference.embedding import OUTPUT, EmbeddingFlags, embed_all
from extras.after.inference.encoder import part_path
from extras.after.inference.exported import exported
from extras.prepare.relatives import HELP, say_relatives
from extras.prepare.sources.proteins import ProteinFlags, proteins_of

logger = logging.getLogger(__name__)
POSITION = "position"  # column
PREDICTIONS = "predictions.csv"
FILES = ("fasta", "labels", "cluster_table")


@dataclass
class Arguments(Flags):
    required = ("model_name_or_path", "embeddings", "fasta", "labels", "output_dir")

    model_name_or_path: str | None = flag(
        None,
        "The model: a run's output directory, a checkpoint, or a directory or Hub name of an ESM-2, ESM C or AMPLIFY.",
    )
    embeddings: str | None = flag(None, "Or the --output_dir of embed.py, which keeps what it computes.")
    fasta: str | None = flag(None, "The proteins.")
    labels: str | None = flag(None, "A CSV file.")
    output_dir: str | None = flag(None, "A directory for the results, which is made.")
    id_column: str = flag("id", "The column of the ids in --fasta.")
    label_column: str = flag("label", "The column of the labels; rows without one are left out.")
    embedding_column: str = flag("embedding", "The column of the embeddings: embedding_N of several --repr_layers.")
    split_column: str | None = flag(
        None,
        "A column with train, validation or test. Default: split, or FLIP's set and validation, if there is one; else "
        "a fifth is held out, equal sequences together.",
    )
    cluster_column: str | None = flag(None, "A column with clusters of related proteins, each on one side whole.")
    cluster_table: str | None = flag(None, "Or a table of clusters and their members' ids, as for step 1.")
    cluster: float | None = flag(None, "Or cluster the labelled proteins by MMseqs2 at this identity, 0.3 say.")
    per_residue: bool = flag(False, "With --model_name_or_path: the labels are strings, of residues.")
    bf16: bool = flag(False, "With --model_name_or_path: compute in bfloat16.")
    use_cpu: bool = flag(False, "With --model_name_or_path: compute on the CPU even where there is a GPU.")
    probe: str | None = flag(None, "Default: ridge for numbers, logistic for classes.", choices=PROBES)
    overwrite: bool = flag(False, "Replace an earlier output there; other files in OUTPUT_DIR stay.")
    count_relatives: bool = flag(True, HELP)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    @property
    def clustering(self) -> Clustering:
        return Clustering(self.cluster_column, self.cluster_table, self.cluster)

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path and not self.embeddings:
            yield Missing("--model_name_or_path", "the model; or --embeddings", "out/final_model")
        if not self.fasta:
            yield Missing("--fasta", "the proteins", "proteins.fasta")
        if not self.labels:
            yield Missing("--labels", "a CSV file of ids and labels", "labels.csv")
        if not self.output_dir:
            yield Missing("--output_dir", "where the results go", "probed")

    def check(self) -> None:
        if self.model_name_or_path and self.embeddings:
            raise UserError("--model_name_or_path and --embeddings: give one of them")
        for name in ("per_residue", "bf16", "use_cpu"):
            if self.embeddings and getattr(self, name):
                raise UserError(f"--{name}: does nothing with --embeddings, which are made already: leave it out")
        for name in ("fasta", "labels"):
            if not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")
        self.clustering.check()


def embeddings_of(args: Arguments, ids: set[str], per_residue: bool) -> dict[str, np.ndarray]:
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


def read_embeddings(args: Arguments, ids: set[str]) -> dict[str, np.ndarray]:
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
    args: Arguments, rows: list[dict[str, str]], splits: list[str] | None, proteins: dict[str, str]
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
        residues[place] = "_".join(row[args.label_column].replace(",", " ").split())
        of_first, split_of_first = first.setdefault(name, (row, split))
        cluster = args.cluster_column
        if split != split_of_first or (cluster and row[cluster] != of_first[cluster]):
            raise UserError(
                f"{where}: {name[:40]!r} has another split or cluster in row {of_first['line']}: leave one"
            )
    merged = [row | {args.label_column: " ".join(words[name])} for name, (row, _) in first.items()]
    return merged, [split for _, split in first.values()] if splits else None


def labelled_proteins(args: Arguments) -> tuple[list[Labelled], list[np.ndarray | None]]:
    """Each protein with its labels, and its embedding. UserError names the first row that does not fit."""
    where = f"--labels {args.labels}"
    named = (args.id_column, args.label_column, args.split_column, args.cluster_column)
    rows = read_rows(str(args.labels), where, [name for name in named if name])
    sequences = sequences_of(rows, args.label_column, args.fasta, where, args.id_column, args.proteins)
    proteins = {row[args.id_column]: sequence for row, sequence in zip(rows, sequences, strict=True)}
    rows, splits = usable_rows(rows, sequences, args.label_column, args.split_column, None, where)
    has_positions = POSITION in rows[0]
    embedded = embeddings_of(args, {row[args.id_column] for row in rows}, args.per_residue or has_positions)
    if has_positions:
        if next(iter(embedded.values())).ndim == 1:
            raise UserError(
                f"--embeddings {args.embeddings}: one a protein, but the labels have a {POSITION}: give "
                "embed.py --per_residue"
            )
        rows, splits = of_positions(args, rows, splits, proteins)
    names = [row[args.id_column] for row in rows]
    check_unique(names, rows, where)
    sequences = [proteins[name] for name in names]
    groups = groups_of(args.clustering, rows, sequences, names)
    found = labelled(rows, names, sequences, groups, splits, args.label_column, where)
    return found, [embedded[name] for name in names]


def check_unique(names: list[str], rows: list[dict[str, str]], where: str) -> None:
    """UserError for a second row of a protein."""
    seen: set[str] = set()
    for name, row in zip(names, rows, strict=True):
        if name in seen:
            raise UserError(f"{place_of(row, where)}: a second label of {name[:40]!r}: leave one")
        seen.add(name)


def table_of(results: dict[str, dict[str, list[float | None]]]) -> str:
    lines = ["".join([f"{'':18}", *(part.rjust(26) for part in PARTS)])]
    for name in results["probe"]:
        lines.append(f"{name:18}" + "".join(shown(results[part][name]).rjust(26) for part in PARTS))
    return "\n".join(lines)


def identity(args: Arguments) -> dict[str, Any]:
    """What decides the result: the flags, and the content of model and data."""
    free = {"output_dir", "overwrite", "use_cpu", "model_name_or_path", "embeddings", "count_relatives", "proteins"}
    free |= {*FILES}
    flags = {name: value for name, value in asdict(args).items() if name not in free}
    if args.embeddings:
        flags["embeddings"] = facts_of(parts_of(args.embeddings)[0])
    else:
        flags["model"] = model_hash(str(args.model_name_or_path))
    return (
        {"script": "probe.py"}
        | flags
        | args.proteins.given
        | {name: content_hash(getattr(args, name)) for name in FILES if getattr(args, name)}
    )


def related(proteins: list[Labelled], examples: Examples, about: list[dict[str, Any]]) -> dict[str, Any]:
    """As `say_relatives`, of the held-out proteins and the others."""
    held_out = {about[place]["id"] for place in np.flatnonzero(examples.test)}
    test, others = (
        [each.sequence for each in proteins if (each.name in held_out) == is_test] for is_test in (True, False)
    )
    return say_relatives(test, others)


def write(
    args: Arguments, output: Output, examples: Examples, about: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    """Fit, evaluate and write. more: for results.json."""
    found, predictions = evaluate(examples, args.probe)
    test = np.flatnonzero(examples.test)
    counts = {"train": int((~examples.test).sum()), "test": len(test)}
    over = "clusters" if args.clustering.given else "proteins"
    held_out = len(set(examples.groups[test].tolist()))
    with output.replaced() as partial:
        with (partial / PREDICTIONS).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*about[0], "label", "prediction"])
            writer.writeheader()
            for place, prediction in zip(test, predictions.tolist(), strict=True):
                writer.writerow(about[place] | {"label": examples.labels[place], "prediction": prediction})
        hashes = {name: content_hash(getattr(args, name)) for name in ("fasta", "labels")}
        intervals = {"over": over, "test": held_out}
        content = found | {"counts": counts, "intervals": intervals} | more
        content |= {"arguments": flat(args), "hashes": hashes}
        (partial / RESULTS).write_text(json.dumps(content, indent=2) + "\n")
    print(table_of(found))
    labels = f"{counts['train']:,}", f"{counts['test']:,}"
    logger.info("Trained on %s labels, evaluated on %s; %s", *labels, about_intervals(over, {"held-out": held_out}))
    logger.info("Written: %s", to_open(output.directory))


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    directory = Path(str(args.output_dir))
    inputs = {f"--{name}": getattr(args, name) for name in ("model_name_or_path", "embeddings", *FILES)}
    earlier = Manifest.of_earlier(directory, "probe", PREDICTIONS)
    with ExitStack() as stack:
        model = args.model_name_or_path and exported(args.model_name_or_path, stack)
        if model:
            config_for_proteins(model)
        made_from = identity(replace(args, model_name_or_path=model))
        output = stack.enter_context(claimed(directory, inputs, made_from, args.overwrite, earlier))
        if output is not None:
            where = f"--labels {args.labels}"
            proteins, embedded = labelled_proteins(replace(args, model_name_or_path=model))
            examples, about = examples_of(proteins, embedded, args.probe, where)
            more = {"contradicting_labels": contradicting(proteins, examples, about, where)}
            more["relatives"] = related(proteins, examples, about) if args.count_relatives else None
            write(args, output, examples, about, more)


if __name__ == "__main__":
    run(main)
