#!/usr/bin/env python3
r"""What a model's embeddings know: a linear probe from embeddings to your labels, judged on held-out proteins.

python embed.py --model_name_or_path out/final_model --fasta proteins.fasta --output_dir embedded
python probe.py --embeddings embedded --fasta proteins.fasta --labels labels.csv --output_dir probed

labels.csv has a row a protein: its `id` in the FASTA file and its `label`, a number or a class; with embeddings of
embed.py --per_residue the label is a string of a class letter a residue, or numbers separated by blanks. OUTPUT_DIR
gets predictions.csv and results.json. docs/after.md has more.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import csv
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.cli import UserError, one_line, run
from common.files.json_files import content_hash, sync_tree
from common.flags import Flags, Missing, flag, parse_arguments
from extras.downstream.probes import PROBES, Examples, composition, evaluate, is_held_out, labels_of, neighbourhood
from extras.sources.fasta import read_fasta

logger = logging.getLogger(__name__)
UNLABELLED = {"", ".", "-", "nan"}
SPLITS = {"train": False, "test": True}


@dataclass
class Arguments(Flags):
    required = ("embeddings", "fasta", "labels", "output_dir")

    embeddings: str | None = flag(None, "The --output_dir of embed.py.")
    fasta: str | None = flag(None, "The proteins that were embedded.")
    labels: str | None = flag(None, "A CSV file.")
    output_dir: str | None = flag(None, "A directory for the results, which is made.")
    id_column: str = flag("id", "The column of the ids in --fasta.")
    label_column: str = flag("label", "The column of the labels; rows without one are left out.")
    split_column: str | None = flag(
        None, "A column with train or test. Default: a fifth is held out, equal sequences together."
    )
    cluster_column: str | None = flag(None, "A column with clusters of related proteins, each on one side whole.")
    probe: str | None = flag(None, "ridge, linear or logistic. Default: ridge for numbers, logistic for classes.")
    overwrite: bool = flag(False, "Replace OUTPUT_DIR.")

    def missing(self) -> Iterator[Missing]:
        if not self.embeddings:
            yield Missing("--embeddings", "the --output_dir of embed.py", "embedded")
        if not self.fasta:
            yield Missing("--fasta", "the proteins that were embedded", "proteins.fasta")
        if not self.labels:
            yield Missing("--labels", "a CSV file of ids and labels", "labels.csv")
        if not self.output_dir:
            yield Missing("--output_dir", "where the results go", "probed")

    def check(self) -> None:
        self.require_choice("probe", (None, *PROBES))
        for name in ("fasta", "labels"):
            if not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")
        output = Path(str(self.output_dir))
        if output.exists() and not (self.overwrite and (output / "results.json").is_file()):
            raise UserError(f"--output_dir {output}: exists: choose another, or --overwrite one of this script")


def read_labels(args: Arguments) -> list[dict[str, str]]:
    """The rows that have a label. UserError for a file that is no CSV with the columns."""
    where = f"--labels {args.labels}"
    try:
        with open(str(args.labels), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            names = list(reader.fieldnames or ())
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a CSV file: {one_line(error)}") from error
    for name in filter(None, (args.id_column, args.label_column, args.split_column, args.cluster_column)):
        if name not in names:
            raise UserError(f"{where}: no column {name!r}, only {', '.join(map(repr, names))}"[:300])
    labelled = [row for row in rows if (row[args.label_column] or "").strip().lower() not in UNLABELLED]
    if not labelled:
        raise UserError(f"{where}: no row has a label")
    return labelled


def read_embeddings(args: Arguments, ids: set[str]) -> dict[str, np.ndarray]:
    """{id: float32 [hidden], or per residue [L, hidden]} of these proteins. UserError unless of this FASTA file."""
    directory = Path(str(args.embeddings)) / "embeddings"
    parts = sorted(directory.glob("part-*.parquet"))
    if not parts:
        raise UserError(f"--embeddings {args.embeddings}: no finished embeddings there: run embed.py first")
    expected, found = content_hash(str(args.fasta)), {}
    for part in parts:
        try:
            table = pq.read_table(part, columns=["id", "embedding"])
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{part}: cannot be read: {one_line(error)[:120]}: run embed.py again") from error
        if (table.schema.metadata or {}).get(b"fasta_hash", b"").decode() != expected:
            raise UserError(f"--embeddings {args.embeddings}: not of --fasta {args.fasta}: give the file embed.py had")
        for name, embedding in zip(table["id"].to_pylist(), table["embedding"], strict=True):
            if name in ids:
                found[name] = np.array(embedding.as_py(), dtype=np.float32)
    return found


def examples_of(args: Arguments, rows: list[dict[str, str]]) -> tuple[Examples, list[dict[str, Any]]]:
    """(the examples, {"id", "position" of a residue} of each). UserError names the first row that does not fit."""
    proteins = {name.decode(): text.decode("latin-1") for name, text in read_fasta(str(args.fasta))}
    embedded = read_embeddings(args, {row[args.id_column] for row in rows})
    features, baseline, texts, groups, held_out, about = [], [], [], [], [], []
    for row in rows:
        name, label = row[args.id_column], row[args.label_column].strip()
        where = f"--labels {args.labels}: {name[:40]!r}"
        if name not in proteins or name not in embedded:
            raise UserError(f"{where}: not in {args.fasta}: correct the id, or leave the row out")
        sequence, embedding = proteins[name], embedded[name]
        group = row[args.cluster_column] if args.cluster_column else sequence
        test = is_held_out(group)
        if args.split_column:
            if (word := row[args.split_column].strip().lower()) not in SPLITS:
                raise UserError(f"{where}: {args.split_column} is {word[:40]!r}: expected train or test")
            test = SPLITS[word]
        if embedding.ndim == 1:
            pieces = [(embedding, composition(sequence), label, None)]
        else:
            words = label.split() if " " in label else list(label)
            if len(words) != len(sequence):
                raise UserError(f"{where}: {len(words)} labels for {len(sequence)} residues")
            places = range(len(sequence))
            pieces = list(zip(embedding, neighbourhood(sequence), words, places, strict=True))
        for vector, plain, text, place in pieces:
            if text.lower() in UNLABELLED:
                continue
            features.append(vector)
            baseline.append(plain)
            texts.append(text)
            groups.append(group)
            held_out.append(test)
            about.append({"id": name} | ({} if place is None else {"position": place + 1}))
    labels, clusters, test = labels_of(texts, args.probe), np.array(groups), np.array(held_out)
    if shared := sorted(set(clusters[test]) & set(clusters[~test])):
        what = "cluster" if args.cluster_column else "sequence"
        raise UserError(f"--labels {args.labels}: the {what} {shared[0][:40]!r} is on both sides of the split")
    return Examples(np.stack(features), np.stack(baseline), labels, clusters, test), about


def table_of(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':18}{'probe':>24}{'baseline':>24}"]
    for name in results["probe"]:
        cells = (results[part][name] for part in ("probe", "baseline"))
        lines.append(
            f"{name:18}" + "".join(f"{v:>9.3f} ({low:.3f}, {high:.3f})"[:24].rjust(24) for v, low, high in cells)
        )
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    examples, about = examples_of(args, read_labels(args))
    found, predictions = evaluate(examples, args.probe)
    output = Path(str(args.output_dir))
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    test = np.flatnonzero(examples.test)
    counts = {"train": int((~examples.test).sum()), "test": len(test)}
    try:
        partial.mkdir(parents=True)
        with (partial / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*about[0], "label", "prediction"])
            writer.writeheader()
            for place, prediction in zip(test, predictions.tolist(), strict=True):
                writer.writerow(about[place] | {"label": examples.labels[place], "prediction": prediction})
        made_from = {name: content_hash(getattr(args, name)) for name in ("fasta", "labels")}
        content = found | {"counts": counts, "arguments": asdict(args), "hashes": made_from}
        (partial / "results.json").write_text(json.dumps(content, indent=2) + "\n")
        sync_tree(partial)
        if output.exists():
            shutil.rmtree(output)
        partial.rename(output)
    except OSError as error:
        raise UserError(f"--output_dir {output}: {error.strerror}: make room, or choose another") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(table_of(found))
    logger.info("Trained on %s labels, evaluated on %s: %s", f"{counts['train']:,}", f"{counts['test']:,}", output)


if __name__ == "__main__":
    run(main)
