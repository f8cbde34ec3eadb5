"""Embeddings of the proteins of a FASTA file as Parquet, part by part, on any number of ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.cli import UserError
from common.console import slow_bar
from common.distributed.world import World
from common.files.content_hash import content_hash
from common.flags import Missing, flag
from common.models.family import encoder_family
from common.models.layers.hf_directory import model_hash
from extras.after.inference.contexts import ContextFlags, Contexts, Sources, check_family
from extras.after.inference.encoder import (
    Encoder,
    EncoderFlags,
    Facts,
    Progress,
    Protein,
    Totals,
    alphabet_of,
    check_parts,
    embed,
    in_parts,
    is_made,
    look_through,
    part_path,
    table,
    write_part,
)
from extras.after.inference.exported import exported
from extras.prepare.output_directory import Build, building, hold_work, read_record, refuse_inputs
from extras.prepare.sources.proteins import ProteinFlags, proteins_of

logger = logging.getLogger(__name__)
SETTINGS = ("max_seq_length", "bf16", "per_residue", "proteins_per_part")  # that the content of the files depends on
LATER_SETTINGS = ("pooling", "repr_layers", "int8")  # recorded if they are not the default: earlier outputs have none
POOLINGS = ("mean", "cls", "max")
LAST = -1  # layer
OUTPUT = "embeddings"  # directory in --output_dir
INPUT = "input"  # in the journal: counts of the input


@dataclass
class EmbeddingFlags(EncoderFlags):
    required = ("fasta", "output_dir")

    fasta: str | None = flag(None, "The proteins, plain or compressed.")
    output_dir: str | None = flag(None, "The tables go to OUTPUT_DIR/embeddings.")
    per_residue: bool = flag(
        False, "An embedding of each residue, not their mean: 1.3 kB a residue with the 8M model."
    )
    pooling: str = flag(
        "mean", "A protein's vector: mean or max over its residues, or its <cls> token's.", choices=POOLINGS
    )
    repr_layers: list[int] | None = flag(
        None,
        "Layers whose output to take: 0 is the embeddings', -1 the last one's, after its LayerNorm, the default. "
        "Several give a column each, embedding_N.",
    )
    proteins_per_part: int = flag(1000, "Proteins in a file; at most so many are lost when the run is stopped.")
    overwrite: bool = flag(False, "Replace existing tables.")
    context: ContextFlags = field(default_factory=ContextFlags)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def missing(self) -> Iterator[Missing]:
        if not self.fasta:
            yield Missing("--fasta", "the proteins", "my.fasta")
        if not self.output_dir:
            yield Missing("--output_dir", "where the tables go", "embedded")

    def check(self) -> None:
        self.require_at_least(1, "proteins_per_part")
        if self.per_residue and self.pooling != "mean":
            raise UserError(
                f"--pooling {self.pooling}: of a protein's residues, and --per_residue keeps them: drop one"
            )
        if not Path(self.fasta).is_file():
            raise UserError(f"--fasta {self.fasta}: no such file")
        inputs = {"--model_name_or_path": self.model_name_or_path, "--fasta": self.fasta}
        inputs |= {"--homologs": self.context.homologs, "--homologs_fasta": self.context.homologs_fasta}
        refuse_inputs(Path(self.output_dir) / OUTPUT, inputs)

    @property
    def settings(self) -> dict:
        values = asdict(self)
        later = {name: values[name] for name in LATER_SETTINGS if values[name] != getattr(EmbeddingFlags, name)}
        settings = {name: value for name, value in values.items() if name in SETTINGS}
        return settings | later | self.proteins.given | self.context.given


def with_layers(args: EmbeddingFlags) -> EmbeddingFlags:
    """--repr_layers counted from 0 in the model, each once; None for the last one alone. UserError if there is none
    such."""
    name = str(args.model_name_or_path)
    last = encoder_family(name).load_config(name).num_hidden_layers
    for layer in args.repr_layers or ():
        if not -last - 1 <= layer <= last:
            raise UserError(
                f"--repr_layers {layer}: the model has layers 0 to {last}, or -1 to {-last - 1} from the end"
            )
    layers = list(dict.fromkeys(layer % (last + 1) for layer in args.repr_layers or [LAST]))
    return replace(args, repr_layers=None if layers == [last] else layers)


def identity(args: EmbeddingFlags) -> dict:
    """What the embeddings are made from, by content: hashes, not paths or dates."""
    hashes = {"model_hash": model_hash(args.model_name_or_path), "fasta_hash": content_hash(args.fasta)}
    return hashes | args.context.hashes(names_of(args)) | args.settings


def names_of(args: EmbeddingFlags) -> Iterator[str]:
    return (name for name, _ in proteins_of(str(args.fasta), args.proteins))


def begin(
    args: EmbeddingFlags, world: World, build: Build | None, made_from: dict, making: Making
) -> tuple[Encoder, Totals]:
    """Load the model and count the input, on all ranks together. build: on rank 0 only."""
    counts = None
    with world.on_main_rank() as is_main:
        if is_main:
            alphabet = alphabet_of(str(args.model_name_or_path))
            counts = build.done(INPUT) or asdict(look_through(args.fasta, alphabet, args.proteins))
    totals = Totals(**world.broadcast_object(counts))
    if world.is_main:
        totals.report(f"--fasta {args.fasta}")
    with world.raise_together():
        encoder = making.encoder(args, world.device)
        encoder.fit_int8(text for _, text in proteins_of(args.fasta, args.proteins, encoder.alphabet))
    with world.on_main_rank() as is_main:
        if is_main:
            if model_hash(args.model_name_or_path) != made_from["model_hash"]:
                raise UserError(f"{args.model_name_or_path}: changed while it was read: start again")
            build.note(INPUT, asdict(totals))
    return encoder, totals


def embed_part(
    encoder: Encoder,
    part: list[Protein],
    done: Progress,
    pooling: str | None,
    layers: Sequence[int],
    contexts: Contexts | None,
) -> list[Tensor]:
    """`embed`; with contexts the mean over those of each protein. `embed_chains` of a model that reads several."""
    if encoder.alphabet.chains:
        from extras.after.inference.chain_embeddings import embed_chains

        return embed_chains(encoder, part, done, pooling, layers)
    if contexts is None:
        return embed(encoder, part, done, pooling, layers)

    def share(tokens: int) -> None:
        done(tokens // len(contexts))

    embedded = []
    for name, text in part:
        read = map(encoder.read, contexts.of(name, text.upper()))
        each = [embed(encoder, [(name, text)], share, pooling, layers, context)[0] for context in read]
        embedded.append(torch.stack(each).mean(0))
    return embedded


def rows_of(part: list[Protein], encoder: Encoder) -> list[Protein]:
    """What gets a row each: the proteins, or their chains where the model reads several a record."""
    if not encoder.alphabet.chains:
        return part
    from extras.after.inference.chains import named_chains

    return [chain for protein in part for chain in named_chains(*protein)]


@dataclass(frozen=True)
class Making:
    """What is made of each part: embeddings; another script's own has the same arguments. settings: what it depends on
    besides the flags; finish: called with the directory that has all parts; done: of proteins, for the log."""

    output: str = OUTPUT
    done: str = "embedded"
    settings: dict = field(default_factory=dict)
    encoder: Callable[..., Encoder] = Encoder
    embed: Callable[..., list[Tensor]] = embed_part
    table: Callable[..., Any] = table
    finish: Callable[[Path], None] = lambda directory: None


EMBEDDINGS = Making()


def make_parts(
    args: EmbeddingFlags,
    world: World,
    encoder: Encoder,
    directory: Path,
    facts: Facts,
    totals: Totals,
    making: Making,
) -> None:
    """Make this rank's parts, every `world.size`th, except those that exist."""
    with slow_bar(totals.residues, "residues", not world.is_main) as bar:
        seen, residues = 0, 0
        contexts = None
        if args.context.homologs:
            contexts = Contexts(args.context, encoder, Sources(args.context, names_of(args)).of)

        def done(end: int, tokens: int) -> None:
            bar.update(max(0, min(tokens, end - bar.n)))  # tokens are more than residues: windows overlap

        proteins, width = proteins_of(args.fasta, args.proteins, encoder.alphabet), encoder.alphabet.width
        for number, part in enumerate(in_parts(proteins, args.proteins_per_part)):
            rows = rows_of(part, encoder)
            path = part_path(directory, number)
            residues += sum(len(text) // width for _, text in part)
            if number % world.size == world.rank and not is_made(path, rows, facts):
                pooling, layers = None if args.per_residue else args.pooling, args.repr_layers or ()
                embedded = making.embed(encoder, part, partial(done, residues), pooling, layers, contexts)
                write_part(making.table(rows, embedded, facts, layers, width), path)
            bar.update(residues - bar.n)  # with those of parts that exist, or that other ranks make
            seen += len(part)
            bar.set_postfix_str(f"{seen:,} of {totals.proteins:,} proteins", refresh=False)


def embed_all(args: EmbeddingFlags, world: World) -> None:
    """Make OUTPUT_DIR/embeddings, unless it is complete; all ranks call it together.

    Each rank exports the model of a checkpoint for itself.
    """
    with ExitStack() as stack:
        with world.raise_together():
            model = exported(str(args.model_name_or_path), stack)
        embed_with(replace(args, model_name_or_path=model), world)


def embed_with(args: EmbeddingFlags, world: World, making: Making = EMBEDDINGS) -> None:
    """Make OUTPUT_DIR/embeddings by a model in transformers' files, a directory or a name; all ranks together."""
    with world.raise_together():
        if args.context.homologs:
            check_family(str(args.model_name_or_path))
    with world.on_main_rank() as is_main:
        if is_main:
            identity(with_layers(args))  # reads all files first: the other ranks of the node then use the caches
    with world.raise_together():
        args = with_layers(args)
        made_from = identity(args) | making.settings
    world.assert_same(made_from)
    hashes = ("model_hash", "fasta_hash", *(["homologs_hash"] if args.context.homologs else []))
    facts = {name.encode(): made_from[name].encode() for name in hashes}
    facts[b"settings"] = json.dumps(args.settings | making.settings, sort_keys=True).encode()
    parent, build = Path(args.output_dir), None
    with ExitStack() as stack:
        with world.on_main_rank() as is_main:
            if is_main:
                recorded, record = made_from, read_record(parent / making.output)
                if record and record["made_from"] != made_from and not args.overwrite:
                    from extras.after.inference.earlier_embeddings import recorded_form

                    recorded = recorded_form(args, parent / making.output, made_from, record)
                build = stack.enter_context(building(parent, [making.output], recorded, args.overwrite))
        relative = world.broadcast_object(
            str(build.paths[making.output].relative_to(parent)) if build and build.paths else None
        )
        if relative is None:
            return
        directory = parent / relative
        with world.raise_together():
            if not directory.is_dir():
                where = f"--output_dir {parent}"
                raise UserError(f"{where}: differs from that of rank 0: give a directory that all ranks share")
            if not world.is_main:
                hold_work(parent)
        encoder, totals = begin(args, world, build, made_from, making)
        # Outside `raise_together`: a rank that fails ends at once, not when the others are done.
        make_parts(args, world, encoder, directory, facts, totals, making)
        world.watch.mark("waiting for the other ranks", 0)
        with world.raise_together():
            pass
        world.watch.rest()
        with world.on_main_rank() as is_main:
            if is_main:
                check_parts(directory, -(-totals.proteins // args.proteins_per_part), facts)
                if content_hash(args.fasta) != made_from["fasta_hash"]:
                    raise UserError(f"--fasta {args.fasta}: changed while it was read: start again")
                if any(made_from[name] != found for name, found in args.context.hashes(names_of(args)).items()):
                    raise UserError(f"--homologs {args.context.homologs}: changed while it was read: start again")
                making.finish(directory)
                build.results |= asdict(totals)
                stack.close()  # publishes
    logger.info("%s proteins of %s residues %s", f"{totals.proteins:,}", f"{totals.residues:,}", making.done)
