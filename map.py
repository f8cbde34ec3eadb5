#!/usr/bin/env python3
r"""A map of embeddings: a picture and a page by PCA, t-SNE or UMAP, nearest neighbours, and clusters with names.

python map.py --embeddings embedded --fasta proteins.fasta --output_dir mapped
python map.py --embeddings embedded --table labels.csv --colour_by family --output_dir mapped
python map.py --model_name_or_path out/final_model --fasta proteins.fasta --query new.fasta --output_dir mapped

The first two read what embed.py wrote; the third embeds first, and looks for the neighbours of new proteins, too.
OUTPUT_DIR gets map.png, map.html (opens without a network), map.csv, neighbours.csv, clusters.csv and results.json.
docs/maps.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.cli import UserError, run
from common.distributed.world import World
from common.figures import FigureFlags
from common.files.content_hash import content_hash
from common.flags import Flags, Missing, flag, flat, parse_arguments
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.outputs import Output, claimed
from extras.after.downstream.results import to_open
from extras.after.inference.embedded import check_made_from, embed_into, facts_of, parts_of
from extras.after.inference.exported import exported
from extras.after.maps.clusters import descriptions_of
from extras.after.maps.results import MapFlags, make_map, summary, write_map
from extras.after.maps.vectors import check_comparable, check_for_a_map, read_embedded
from extras.prepare.sources.proteins import ProteinFlags

logger = logging.getLogger(__name__)
# Flags that do not decide the result; of paths the content does.
FREE = {"output_dir", "overwrite", "use_cpu", "model_name_or_path", "embeddings", "fasta", "table", "query"}


@dataclass
class Arguments(Flags):
    required = ("model_name_or_path", "embeddings", "fasta", "output_dir")

    model_name_or_path: str | None = flag(
        None,
        "The model: a run's output directory, a checkpoint, or a directory or Hub name of an ESM-2, ESM C or AMPLIFY.",
    )
    embeddings: str | None = flag(None, "Or the --output_dir of embed.py, which keeps what it computes.")
    fasta: str | None = flag(None, "The proteins; with --embeddings only for the descriptions, which name clusters.")
    output_dir: str | None = flag(None, "A directory for the results, which is made.")
    query: str | None = flag(
        None,
        "New proteins, whose neighbours to find among these: a FASTA file, or with --embeddings what embed.py wrote.",
    )
    embedding_column: str = flag("embedding", "The column of the embeddings: embedding_N of several --repr_layers.")
    bf16: bool = flag(False, "With --model_name_or_path: compute in bfloat16.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    overwrite: bool = flag(False, "Replace an earlier output there; other files in OUTPUT_DIR stay.")
    map: MapFlags = field(default_factory=MapFlags)
    figures: FigureFlags = field(default_factory=FigureFlags)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path and not self.embeddings:
            yield Missing("--embeddings", "what embed.py wrote; or --model_name_or_path", "embedded")
        if self.model_name_or_path and not self.fasta:
            yield Missing("--fasta", "the proteins", "proteins.fasta")
        if not self.output_dir:
            yield Missing("--output_dir", "where the results go", "mapped")

    def check(self) -> None:
        if self.model_name_or_path and self.embeddings:
            raise UserError("--model_name_or_path and --embeddings: give one of them")
        if self.embeddings and self.bf16:
            raise UserError("--bf16: does nothing with --embeddings, which are made already: leave it out")
        if self.fasta and not Path(self.fasta).is_file():
            raise UserError(f"--fasta {self.fasta}: no such file")
        if self.query and not self.embeddings and not Path(self.query).is_file():
            raise UserError(f"--query {self.query}: no such file: give a FASTA file, which the model embeds")


def hashes_of(args: Arguments) -> dict[str, Any]:
    """Of model, proteins and table, or what embed.py says of its tables."""
    files = {"fasta": args.fasta, "table": args.map.table, "query": None if args.embeddings else args.query}
    hashes: dict[str, Any] = {name: content_hash(path) for name, path in files.items() if path}
    if not args.embeddings:
        return hashes | {"model": model_hash(str(args.model_name_or_path))}
    hashes["embeddings"] = facts_of(parts_of(args.embeddings)[0])
    if args.query:
        hashes["query"] = facts_of(parts_of(args.query, "--query")[0])
    return hashes


def embedded_by(args: Arguments, fasta: str, stack: ExitStack) -> str:
    """A temporary --output_dir of embed.py."""
    return embed_into(stack.enter_context(TemporaryDirectory(prefix="map-")), args, fasta)


def work(args: Arguments, hashes: dict[str, Any], output: Output, stack: ExitStack) -> None:
    if args.embeddings:
        where, source, query = f"--embeddings {args.embeddings}", args.embeddings, args.query
        if args.fasta:
            check_made_from(args.embeddings, args.fasta)
        if query:
            check_comparable(source, query)
    else:
        where, source = f"--fasta {args.fasta}", embedded_by(args, str(args.fasta), stack)
        query = args.query and embedded_by(args, args.query, stack)
    embedded = read_embedded(source, args.embedding_column, where)
    check_for_a_map(embedded, where)
    new = read_embedded(query, args.embedding_column, f"--query {args.query}") if query else None
    descriptions = descriptions_of(args.fasta) if args.fasta else {}
    made = make_map(args.map, embedded, new, descriptions, World.from_environment(args.use_cpu).device)
    more = {"arguments": flat(args), "hashes": hashes}
    with output.replaced() as partial:
        write_map(made, new.ids if new else [], partial, args.figures, more)
    print(summary(made))
    if not (any(descriptions.values()) or args.map.table):
        logger.info("No words to name clusters by: give --fasta with descriptions, or --table and --colour_by")


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    directory = Path(str(args.output_dir))
    inputs = {f"--{name}": getattr(args, name) for name in ("model_name_or_path", "embeddings", "query", "fasta")}
    inputs["--table"] = args.map.table
    with ExitStack() as stack:
        model = args.model_name_or_path and exported(args.model_name_or_path, stack)
        args = replace(args, model_name_or_path=model)
        hashes = hashes_of(args)
        made_from = {"script": "map.py"} | {name: value for name, value in flat(args).items() if name not in FREE}
        output = stack.enter_context(claimed(directory, inputs, made_from | hashes, args.overwrite))
        if output is not None:
            work(args, hashes, output, stack)
            logger.info("Written: %s", to_open(output.directory))


if __name__ == "__main__":
    run(main)
