"""Score the assays of ProteinGym one by one, on any number of ranks, and average them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from common.cli import UserError, log_every
from common.distributed.world import World
from common.files.content_hash import combined_hash, content_hash
from common.files.safe_files import file_name, read_json, write_json
from common.flags import Missing, flag, flat
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.outputs import Output, claimed, writing
from extras.after.downstream.results import RESULTS
from extras.after.downstream.stock_model import config_for_proteins
from extras.after.inference.causal import Causal, CausalFlags, directions_of, is_decoder, refuse_flags_of_encoders
from extras.after.inference.correlation import baselines_of
from extras.after.inference.encoder import Encoder, EncoderFlags, alphabet_of
from extras.after.inference.exported import exported
from extras.after.inference.score_columns import Scores, each_column, of_variants
from extras.after.inference.scored_files import write, written
from extras.after.proteingym.assays import Assay, Reference, Table, read_reference, read_table
from extras.after.proteingym.metrics import METRICS, metrics_of
from extras.after.proteingym.tables import (
    SKIPPED,
    SUMMARY,
    Scored,
    about_results,
    number,
    over_what,
    printed,
    results_of,
    shown,
    write_tables,
)

logger = logging.getLogger(__name__)
SCRIPT = "proteingym.py"
SCORES = "scores"  # directory of the assays' tables in --output_dir
NAMED = 5  # missing assays in a line


@dataclass
class GymFlags(EncoderFlags):
    required = ("reference", "data", "output_dir")

    reference: str | None = flag(None, "ProteinGym's reference file: a row for each assay, with its wild type.")
    data: str | None = flag(None, "The directory of the assays' tables, as its DMS_filename names them.")
    output_dir: str | None = flag(None, "For the scores and the tables; it is made.")
    wild_type_marginal_only: bool = flag(
        False, "Only the cheap score of an encoder: one pass per window of a protein, nothing masked.", "one_pass"
    )
    overwrite: bool = flag(False, "Replace an earlier output there; other files in OUTPUT_DIR stay.")
    changed: ClassVar[dict[str, Any]] = {
        "model_name_or_path": flag(
            None,
            "A run's output directory, a checkpoint, or any directory of an ESM-2, ESM C, AMPLIFY, E1 or protein "
            "decoder; or a Hub name of an encoder.",
        )
    }
    decoder: CausalFlags = field(default_factory=CausalFlags)

    def missing(self) -> Iterator[Missing]:
        if not self.reference:
            yield Missing("--reference", "the reference file", "DMS_substitutions.csv")
        if not self.data:
            yield Missing("--data", "the directory of the assays' tables", "DMS_ProteinGym_substitutions")
        if not self.output_dir:
            yield Missing("--output_dir", "for scores and tables", "proteingym")

    def check(self) -> None:
        if not Path(str(self.reference)).is_file():
            raise UserError(f"--reference {self.reference}: no such file")
        if not Path(str(self.data)).is_dir():
            raise UserError(f"--data {self.data}: no such directory")


def identity(args: GymFlags, reference: Reference) -> dict[str, Any]:
    """What decides the result: the flags, and the content of model, reference file and assays. UserError for flags
    that are not of this model."""
    model = str(args.model_name_or_path)
    settings: dict[str, Any] = {"bf16": args.bf16, "one_pass": args.wild_type_marginal_only}
    if is_decoder(model):
        is_long = args.max_seq_length != GymFlags.max_seq_length
        given = {"max_seq_length": is_long, "wild_type_marginal_only": args.wild_type_marginal_only, "int8": args.int8}
        refuse_flags_of_encoders(model, given)
        settings |= {"directions": directions_of(model, args.decoder), "count_ends": args.decoder.count_ends}
    else:
        args.decoder.refuse()
        config_for_proteins(model)
        settings |= {"max_seq_length": args.max_seq_length} | ({"int8": True} if args.int8 else {})
    hashes = {"model_hash": model_hash(model), "reference_hash": content_hash(str(args.reference))}
    return {"script": SCRIPT} | settings | hashes | {"assays_hash": combined_hash(a.path for a in reference.assays)}


class Files:
    """The scores of each assay in --output_dir, and whether they are whole."""

    def __init__(self, directory: Path, assays: list[Assay]):
        taken: set[str] = set()
        self.paths = {assay.name: directory / SCORES / f"{file_name(assay.name, taken)}.csv" for assay in assays}

    def record_of(self, assay: Assay) -> dict[str, Any] | None:
        """What was written of an assay, or None. The record is written before the table that it is of."""
        table, record, *_ = written(self.paths[assay.name])
        with suppress(OSError, ValueError, KeyError):
            found = read_json(record)
            if SKIPPED in found or found["sha256"] == content_hash(table):
                return found
        return None


def load(args: GymFlags, made_from: dict[str, Any], proteins: Iterable[bytes]) -> Encoder | Causal:
    """proteins: the wild types, in the reference's order. UserError if the model has changed since `made_from`."""
    model = str(args.model_name_or_path)
    decoder = (made_from["directions"], args.decoder.count_ends) if is_decoder(model) else None
    loaded = Causal(args, *decoder) if decoder else Encoder(args)
    if isinstance(loaded, Encoder):
        loaded.fit_int8(proteins)
    if model_hash(model) != made_from["model_hash"]:
        raise UserError(f"{model}: changed while it was read: start again")
    return loaded


def read_assay(assay: Assay, args: GymFlags) -> tuple[Table, Scores]:
    """An assay, and the columns that it gets. UserError as `read_table`, and for a column that is there already."""
    table = read_table(assay, str(args.reference))
    scores = Scores.of(is_decoder(str(args.model_name_or_path)), table.variants, args.wild_type_marginal_only)
    if twice := [name for name in scores.names if name in table.names]:
        raise UserError(f"--data {assay.path}: it has a column {twice[0]!r} already: rename it")
    return table, scores


def score_assay(model: Encoder | Causal, assay: Assay, path: Path, args: GymFlags, hidden: bool) -> None:
    """Write an assay's table with scores, and its record. hidden: no bar."""
    table, scores = read_assay(assay, args)
    if why := too_long(model, assay, table):
        path.parent.mkdir(exist_ok=True)
        write_json(written(path)[1], {SKIPPED: why})
        return
    values = each_column(scores, [None], of_variants(model, table.variants, scores), hidden)
    rows = [row | {name: f"{values[name][n]:.6f}" for name in values} for n, row in enumerate(table.rows)]
    about = {"assay": assay.name, "metrics": metrics_of_scores(values, table, assay.is_clinical)}
    about |= {"variants": len(rows), "unmeasured": int(np.isnan(table.measured).sum())}
    path.parent.mkdir(exist_ok=True)
    write(path, written(path)[1], [*table.names, *values], rows, about, "--output_dir")
    metric = "auc" if assay.is_clinical else METRICS[0]
    found = ", ".join(f"{name} {shown(each[metric])}" for name, each in about["metrics"].items())
    logger.info("%s, %s variants: %s of %s", assay.name, f"{len(rows):,}", metric, found)


def too_long(model: Encoder | Causal, assay: Assay, table: Table) -> str | None:
    """Why a decoder cannot read an assay, None if it can; an encoder reads windows."""
    if isinstance(model, Encoder):
        return None
    longest = max(len(sequence) for sequence in (assay.protein, *(each.sequence for each in table.variants)))
    return f"{longest:,} residues, and the model reads {model.longest:,}" if longest > model.longest else None


def metrics_of_scores(
    values: dict[str, np.ndarray], table: Table, is_clinical: bool
) -> dict[str, dict[str, float | None]]:
    """{score: {metric: value, None where it is not defined}} of the columns, and of what no model computes."""
    is_measured = ~np.isnan(table.measured)
    measured, fit = table.measured[is_measured], table.fit[is_measured]
    found = {}
    for name, scores in (values | baselines_of(table.variants)).items():
        metrics = metrics_of(np.array(scores)[is_measured], measured, fit)
        kept = {"auc": metrics["auc"]} if is_clinical else metrics
        found[name] = {metric: number(value) for metric, value in kept.items()}
    return found


def benchmark(args: GymFlags, world: World) -> None:
    """Make OUTPUT_DIR, unless it is finished; all ranks call it together, each exports a checkpoint for itself."""
    with ExitStack() as stack:
        with world.raise_together():
            model = exported(str(args.model_name_or_path), stack)
            named, args = args, replace(args, model_name_or_path=model)
            reference = read_reference(str(args.reference), str(args.data))
            made_from = identity(args, reference)
        world.assert_same(made_from)
        output = None
        with world.on_main_rank() as is_main:
            if is_main:
                inputs = {f"--{name}": getattr(named, name) for name in ("model_name_or_path", "reference", "data")}
                claim = claimed(Path(str(args.output_dir)), inputs, made_from, args.overwrite)
                output = stack.enter_context(claim)
        if not world.broadcast_object(output is not None):
            return
        files = Files(Path(str(args.output_dir)), reference.assays)
        pending: list[str] = []
        with world.on_main_rank() as is_main:
            if is_main:
                pending = begin(args, output, reference, files)
        score_pending(args, world, made_from, reference, files, world.broadcast_object(pending))
        with world.on_main_rank() as is_main:
            if is_main:
                finish(named, output, reference, files, made_from)


def begin(args: GymFlags, output: Output, reference: Reference, files: Files) -> list[str]:
    """Say what is there, and check what is to be scored before anything is computed: its names, largest first."""
    total = len(reference.assays) + len(reference.missing)
    if reference.missing:
        more = f" and {len(reference.missing) - NAMED} more" if len(reference.missing) > NAMED else ""
        missing = ", ".join(reference.missing[:NAMED]) + more
        logger.warning("--data %s: %d of %d assays are missing: %s", args.data, len(reference.missing), total, missing)
    output.begin(SCORES, SUMMARY, *METRICS, RESULTS)
    pending = [assay for assay in reference.assays if files.record_of(assay) is None]
    if len(pending) < len(reference.assays):
        there = len(reference.assays)
        logger.info("%d of %d assays have scores already", there - len(pending), there)
    with log_every(f"Checking {len(pending)} assays"):
        work = {assay.name: len(assay.protein) * len(read_assay(assay, args)[0].rows) for assay in pending}
    say_windows(args, [assay.protein for assay in pending])
    return sorted(work, key=lambda name: -work[name])


def say_windows(args: GymFlags, proteins: list[bytes]) -> None:
    """How many proteins an encoder reads in windows."""
    model = str(args.model_name_or_path)
    if not is_decoder(model):
        alphabet = alphabet_of(model)
        longer = sum(len(protein) > alphabet.room(protein, args.max_seq_length) for protein in proteins)
        if longer:
            of_all = f"{longer} of {len(proteins)} wild types"
            logger.info("%s exceed --max_seq_length %d: read in overlapping windows", of_all, args.max_seq_length)


def score_pending(
    args: GymFlags, world: World, made_from: dict[str, Any], reference: Reference, files: Files, pending: list[str]
) -> None:
    """Every `world.size`th assay of `pending` on this rank."""
    assays = {assay.name: assay for assay in reference.assays}
    if pending:
        with world.raise_together():
            model = load(args, made_from, (assay.protein for assay in reference.assays))
        # Outside `raise_together`: a rank that fails ends at once, not when the others are done.
        for name in pending[world.rank :: world.size]:
            score_assay(model, assays[name], files.paths[name], args, not world.is_main)
    world.watch.mark("waiting for the other ranks", 0)
    with world.raise_together():
        pass
    world.watch.rest()


def finish(args: GymFlags, output: Output, reference: Reference, files: Files, made_from: dict[str, Any]) -> None:
    """Write the tables and print the averages. UserError if the input has changed, and for no assay with scores."""
    if combined_hash(assay.path for assay in reference.assays) != made_from["assays_hash"]:
        raise UserError(f"--data {args.data}: changed while it was read: start again")
    records = {assay.name: files.record_of(assay) or {SKIPPED: "not written"} for assay in reference.assays}
    skipped = {name: record[SKIPPED] for name, record in records.items() if SKIPPED in record}
    assays = [
        Scored(assay, records[assay.name]["variants"], records[assay.name]["metrics"])
        for assay in reference.assays
        if assay.name not in skipped
    ]
    for name, why in skipped.items():
        logger.warning("%s is left out: %s", name, why)
    if not assays:
        raise UserError(f"--data {args.data}: no assay could be scored by {args.model_name_or_path}: see above")
    results = results_of(assays)
    unmeasured = sum(record.get("unmeasured", 0) for record in records.values())
    about = {"missing": reference.missing, SKIPPED: skipped, "unmeasured": unmeasured} | about_results(results)
    with writing(output.directory):
        names = write_tables(output.directory, results)
        write_json(output.directory / RESULTS, about | {"arguments": flat(args), "made_from": made_from})
    output.finish(SCORES, *names, RESULTS)
    print(printed(results))
    logger.info("%s", over_what(about, reference.is_clinical))
    logger.info("Written: %s", ", ".join(str(output.directory / name) for name in (names[0], names[1], SCORES)))
