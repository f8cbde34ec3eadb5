#!/usr/bin/env python3
r"""Embeddings of the proteins of a FASTA file, by a model that you trained or any ESM-2, as Parquet.

python embed.py --model_name_or_path out/final_model --fasta my.fasta --output_dir embedded
python embed.py --model_name_or_path out/final_model --fasta my.fasta --output_dir embedded --per_residue
python -m extras.launch --nproc_per_node 8 embed.py --model_name_or_path out/final_model \
    --fasta my.fasta --output_dir embedded

OUTPUT_DIR/embeddings/part-00000.parquet, ...: id, length, embedding, in the order of the file. Stopped and started
again, on any number of ranks, the same command resumes. docs/after.md has more.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from common.cli import UserError, run
from common.distributed.run import ProcessFlags, distributed_run
from common.distributed.world import World
from common.files.json_files import content_hash
from common.flags import Missing, flag, parse_arguments
from common.models.esm2.config import load_config
from common.models.layers.hf_directory import model_files, model_hash
from extras.inference.encoder import (
    Encoder,
    EncoderFlags,
    Facts,
    Protein,
    Totals,
    check_parts,
    embed,
    in_parts,
    is_made,
    look_through,
    part_path,
    table,
    write_part,
)
from extras.prepare.output_directory import RECORD, Build, building, hold_work, read_record
from extras.sources.fasta import read_fasta

logger = logging.getLogger(__name__)
SETTINGS = ("max_seq_length", "bf16", "per_residue", "proteins_per_part")  # that the content of the files depends on
OUTPUT = "embeddings"  # directory in --output_dir
INPUT = "input"  # in the journal: counts of the input
WEEK_S = 7 * 86400  # timeout of ranks that wait for the others


@dataclass
class Arguments(EncoderFlags):
    required = ("fasta", "output_dir")

    fasta: str | None = flag(None, "The proteins, plain or compressed.")
    output_dir: str | None = flag(None, "The tables go to OUTPUT_DIR/embeddings.")
    per_residue: bool = flag(
        False, "An embedding of each residue instead of their mean: 1.3 kB a residue with the 8M model."
    )
    proteins_per_part: int = flag(1000, "Proteins in a file; at most so many are lost when the run is stopped.")
    overwrite: bool = flag(False, "Replace existing tables.")

    def missing(self) -> Iterator[Missing]:
        if not self.fasta:
            yield Missing("--fasta", "the proteins", "my.fasta")
        if not self.output_dir:
            yield Missing("--output_dir", "where the tables go", "embedded")

    def check(self) -> None:
        self.require_at_least(1, "proteins_per_part")
        if not Path(self.fasta).is_file():
            raise UserError(f"--fasta {self.fasta}: no such file")

    @property
    def settings(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name in SETTINGS}


def identity(args: Arguments) -> dict:
    """What the embeddings are made from, by content: hashes, not paths or dates."""
    load_config(args.model_name_or_path)  # for its error messages
    hashes = {"model_hash": model_hash(args.model_name_or_path), "fasta_hash": content_hash(args.fasta)}
    return hashes | args.settings


def recorded_form(args: Arguments, made_from: dict) -> dict:
    """`made_from`, or what an earlier version, which recorded paths and dates, wrote for this model and input.

    UserError if the model is newer than that output: it may have been replaced.
    """
    directory, fasta = Path(args.output_dir) / OUTPUT, Path(args.fasta).stat()
    earlier = args.settings | {"model_name_or_path": args.model_name_or_path, "fasta": Path(args.fasta).name}
    earlier |= {"size": fasta.st_size, "mtime_ns": fasta.st_mtime_ns}
    record = read_record(directory)
    if args.overwrite or record is None or record["made_from"] != earlier:
        return made_from
    model = [path.stat() for path in model_files(args.model_name_or_path)]
    if max(max(file.st_mtime_ns, file.st_ctime_ns) for file in model) >= (directory / RECORD).stat().st_ctime_ns:
        raise UserError(
            f"{directory}: made by an earlier version, and {args.model_name_or_path} may have changed since: give "
            "--overwrite to make it again, or another --output_dir"
        )
    return earlier


def proteins_of(fasta: str) -> Iterator[Protein]:
    for name, text in read_fasta(fasta):
        yield name.decode(), text


def begin(args: Arguments, world: World, build: Build | None, made_from: dict) -> tuple[Encoder, Totals]:
    """Load the model and count the input, on all ranks together. build: on rank 0 only."""
    counts = None
    with world.on_main_rank() as is_main:
        if is_main:
            counts = build.done(INPUT) or asdict(look_through(args.fasta))
    totals = Totals(**world.broadcast_object(counts))
    if world.is_main:
        totals.report(f"--fasta {args.fasta}")
    with world.raise_together():
        encoder = Encoder(args, world.device)
    with world.on_main_rank() as is_main:
        if is_main:
            if model_hash(args.model_name_or_path) != made_from["model_hash"]:
                raise UserError(f"{args.model_name_or_path}: changed while it was read: start again")
            build.note(INPUT, asdict(totals))
    return encoder, totals


def make_parts(args: Arguments, world: World, encoder: Encoder, directory: Path, facts: Facts, proteins: int) -> None:
    """Make this rank's parts, every `world.size`th, except those that exist."""
    interval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(unit=" tokens", unit_scale=True, mininterval=interval, disable=not world.is_main) as bar:
        seen = 0
        for number, part in enumerate(in_parts(proteins_of(args.fasta), args.proteins_per_part)):
            path = part_path(directory, number)
            if number % world.size == world.rank and not is_made(path, part, facts):
                write_part(table(part, embed(encoder, part, bar.update), args.per_residue, facts), path)
            seen += len(part)
            bar.set_postfix_str(f"{seen:,} of {proteins:,} proteins", refresh=False)


def embed_all(args: Arguments, world: World) -> None:
    with world.on_main_rank() as is_main:
        if is_main:
            identity(args)  # downloads and reads all files first: the other ranks of the node then use the caches
    with world.raise_together():
        made_from = identity(args)
    world.assert_same(made_from)
    facts = {name.encode(): made_from[name].encode() for name in ("model_hash", "fasta_hash")}
    facts[b"settings"] = json.dumps(args.settings, sort_keys=True).encode()
    parent, build = Path(args.output_dir), None
    with ExitStack() as stack:
        with world.on_main_rank() as is_main:
            if is_main:
                recorded = recorded_form(args, made_from)
                build = stack.enter_context(building(parent, [OUTPUT], recorded, args.overwrite))
        relative = world.broadcast_object(
            str(build.paths[OUTPUT].relative_to(parent)) if build and build.paths else None
        )
        if relative is None:
            return
        directory = parent / relative
        with world.raise_together():
            if not directory.is_dir():
                raise UserError(
                    f"--output_dir {parent}: differs from that of rank 0: give a directory that all ranks share"
                )
            if not world.is_main:
                hold_work(parent)
        encoder, totals = begin(args, world, build, made_from)
        # Outside `raise_together`: a rank that fails ends at once, not when the others are done.
        make_parts(args, world, encoder, directory, facts, totals.proteins)
        world.watch.mark("waiting for the other ranks", 0)
        with world.raise_together():
            pass
        world.watch.rest()
        with world.on_main_rank() as is_main:
            if is_main:
                check_parts(directory, -(-totals.proteins // args.proteins_per_part), facts)
                if content_hash(args.fasta) != made_from["fasta_hash"]:
                    raise UserError(f"--fasta {args.fasta}: changed while it was read: start again")
                build.results |= asdict(totals)
                stack.close()  # publishes
    logger.info("%s proteins of %s residues: %s", f"{totals.proteins:,}", f"{totals.residues:,}", parent / OUTPUT)


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    if "RANK" not in os.environ:
        embed_all(args, World.from_environment(args.use_cpu))
        return
    with distributed_run(ProcessFlags(use_cpu=args.use_cpu, ddp_timeout=WEEK_S)) as world:
        world.stop.exit_note = "finished parts are kept: the same command resumes"
        embed_all(args, world)


if __name__ == "__main__":
    run(main, resumable="RANK" not in os.environ)
