"""What a saved probe or a fine-tuned model says of the proteins of a FASTA file, part by part, on any number of ranks.

The parts, their resumption and the ranks are those of embeddings (extras/after/inference/embedding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.csv import CSVWriter
from torch import Tensor

from common.cli import UserError
from common.distributed.world import World
from common.files.safe_files import replace_flushed
from common.flags import Flags, Missing, flag
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.calibration import probabilities_of
from extras.after.downstream.conformal import COVERAGE, interval, prediction_sets, quantile
from extras.after.downstream.probe_fits import Outputs
from extras.after.downstream.saved_probe import ABOUT, PROBE, probes_hash, read_probes
from extras.after.downstream.tuned_model import is_tuned, read_tuned
from extras.after.inference.embedding import EmbeddingFlags, Making, embed_part, embed_with
from extras.after.inference.encoder import INT8, PACK, Encoder, EncoderFlags, Facts, Protein
from extras.after.inference.exported import exported
from extras.after.inference.int8 import check_int8
from extras.prepare.output_directory import refuse_inputs
from extras.prepare.sources.proteins import ProteinFlags

PREDICTED = "predictions"  # directory in --output_dir
TABLE = "predictions.csv"  # in it


@dataclass
class PredictionFlags(Flags):
    required = ("model", "fasta", "output_dir")

    model: str | None = flag(None, "The --output_dir of probe.py or finetune.py.")
    fasta: str | None = flag(None, "The proteins, plain or compressed.")
    output_dir: str | None = flag(None, "The tables go to OUTPUT_DIR/predictions.")
    model_name_or_path: str | None = flag(
        None,
        "The model of the embeddings, or that LoRA's matrices belong to: if it has moved, or if embed.py had it.",
    )
    coverage: float = flag(COVERAGE, "How often the interval, or the set of classes, is to hold the truth.")
    tokens_per_pack: int | None = flag(None, PACK)
    proteins_per_part: int = flag(1000, "Proteins in a file; at most so many are lost when the run is stopped.")
    int8: bool = flag(False, INT8)
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    overwrite: bool = flag(False, "Replace existing tables.")
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def missing(self) -> Iterator[Missing]:
        if not self.model:
            yield Missing("--model", "the --output_dir of probe.py or finetune.py", "probed")
        if not self.fasta:
            yield Missing("--fasta", "the proteins", "new.fasta")
        if not self.output_dir:
            yield Missing("--output_dir", "where the tables go", "predicted")

    def check(self) -> None:
        self.require_at_least(1, "tokens_per_pack", "proteins_per_part")
        if self.int8:
            check_int8(EncoderFlags(use_cpu=self.use_cpu).device)
        if not 0 < self.coverage < 1:
            raise UserError(f"--coverage {self.coverage:g}: must be above 0 and below 1")
        if not Path(str(self.fasta)).is_file():
            raise UserError(f"--fasta {self.fasta}: no such file")
        inputs = {"--model": self.model, "--fasta": self.fasta, "--model_name_or_path": self.model_name_or_path}
        refuse_inputs(Path(str(self.output_dir)) / PREDICTED, inputs)


class Head(Protocol):
    """What predicts a column of labels from features. scores: how wrong it was on what it had not seen."""

    label_column: str
    classes: tuple[str, ...]
    temperature: float

    @property
    def scores(self) -> np.ndarray: ...

    def outputs(self, features: np.ndarray) -> Outputs: ...


@dataclass(frozen=True)
class Predictor:
    """model: a directory or a name, as the user knows it; model_hash: what it must be; settings: of `EmbeddingFlags`;
    hash: of the probe or the fine-tuned weights; encoder, embed: as of `Making`, the latter gives the features."""

    model: str
    model_hash: str
    settings: dict[str, Any]
    heads: Sequence[Head]
    hash: str
    encoder: Callable[..., Encoder] = Encoder
    embed: Callable[..., list[Tensor]] = embed_part


def predictor_of(args: PredictionFlags) -> Predictor:
    """UserError for a directory without a probe or a fine-tuned model."""
    directory = Path(str(args.model))
    for probe in (directory, directory / PROBE):
        if (probe / ABOUT).exists():
            return of_probe(args, probe)
    for tuned in (directory, directory.parent):
        if is_tuned(tuned):
            found = read_tuned(tuned, args.model_name_or_path)
            settings = {"max_seq_length": found.max_seq_length, "bf16": found.bf16, "per_residue": found.of_residues}
            return Predictor(found.base, found.base_hash, settings, [found], found.hash, found.encoder, found.embed)
    raise UserError(
        f"--model {directory}: nothing there that probe.py or finetune.py saved: give their --output_dir, and of an "
        "earlier version run them again with --overwrite"
    )


def of_probe(args: PredictionFlags, directory: Path) -> Predictor:
    source, probes = read_probes(directory)
    model = args.model_name_or_path or source.model
    if not model:
        raise UserError(f"--model {directory}: of embeddings by embed.py: give its model as --model_name_or_path")
    if "contexts" in source.settings:
        raise UserError(f"--model {directory}: of embeddings with --homologs, which predict.py does not read")
    names = ("max_seq_length", "bf16", "per_residue", "pooling")
    settings = {name: source.settings[name] for name in names if name in source.settings}
    layers = None if source.layer is None else [source.layer]
    return Predictor(model, source.model_hash, settings | {"repr_layers": layers}, probes, probes_hash(directory))


def predict_all(args: PredictionFlags, world: World) -> None:
    """Make OUTPUT_DIR/predictions, unless it is complete; all ranks call it together."""
    with ExitStack() as stack:
        with world.raise_together():
            predictor = predictor_of(args)
            bounds = [quantile(head.scores, args.coverage) for head in predictor.heads]
            model = exported(predictor.model, stack)
            if model_hash(model) != predictor.model_hash:
                raise UserError(
                    f"{predictor.model}: not the model of --model {args.model}, or changed since: give that one as "
                    "--model_name_or_path"
                )
        flags = EmbeddingFlags(
            model,
            tokens_per_pack=args.tokens_per_pack,
            use_cpu=args.use_cpu,
            fasta=args.fasta,
            output_dir=args.output_dir,
            proteins_per_part=args.proteins_per_part,
            overwrite=args.overwrite,
            proteins=args.proteins,
            **(predictor.settings | ({"int8": True, "bf16": False} if args.int8 else {})),
        )

        def table(rows: list[Protein], features: list[Tensor], facts: Facts, *_: Any) -> pa.Table:
            return predicted(predictor.heads, bounds, rows, features, facts)

        settings = {"predictor": predictor.hash, "coverage": args.coverage}
        making = Making(PREDICTED, "predicted", settings, predictor.encoder, predictor.embed, table, write_csv)
        embed_with(flags, world, making)


def columns_of(head: Head, outputs: Outputs, bound: float) -> dict[str, pa.Array]:
    """{name: values [N]} of what a head says of N examples. bound: of `quantile`."""
    if outputs.logits is None:
        low, high = interval(outputs.predictions, bound, outputs.sigma)
        numbers = {"prediction": outputs.predictions, "low": low, "high": high}
        return {name: pa.array(values.astype(np.float64)) for name, values in numbers.items()}
    probabilities = probabilities_of(outputs.logits, head.temperature)
    sets = prediction_sets(probabilities, bound)
    columns = {"prediction": pa.array(outputs.predictions.tolist(), pa.string())}
    columns |= {f"probability_{name}": pa.array(probabilities[:, n]) for n, name in enumerate(head.classes)}
    names = [";".join(name for name, inside in zip(head.classes, row, strict=True) if inside) for row in sets]
    return columns | {"set": pa.array(names, pa.string())}


def predicted(
    heads: Sequence[Head], bounds: Sequence[float], rows: list[Protein], features: list[Tensor], facts: Facts
) -> pa.Table:
    """A row a protein; of residues its columns are lists. features: [F], or [L, F], of each. With several heads the
    names of the columns begin with those of the labels'."""
    of_residues = features[0].dim() == 2
    values = np.concatenate([each.numpy() if of_residues else each.numpy()[None] for each in features])
    lengths = [len(each) for each in features]
    ends = pa.array(np.cumsum([0, *lengths]), pa.int32())
    made: dict[str, pa.Array] = {"id": pa.array([name for name, _ in rows])}
    made["length"] = pa.array([len(text) for _, text in rows], pa.int32())
    for head, bound in zip(heads, bounds, strict=True):
        prefix = f"{head.label_column}_" if len(heads) > 1 else ""
        for name, column in columns_of(head, head.outputs(values), bound).items():
            made[prefix + name] = pa.ListArray.from_arrays(ends, column) if of_residues else column
    return pa.table(made).replace_schema_metadata(facts)


def write_csv(directory: Path) -> None:
    """All parts as one CSV file, a row a protein or a residue."""
    with ExitStack() as stack:
        path, writer = stack.enter_context(replace_flushed(directory / TABLE)), None
        for part in sorted(directory.glob("part-*.parquet")):
            rows = flat(pq.read_table(part))
            writer = writer or stack.enter_context(CSVWriter(path, rows.schema))
            writer.write_table(rows)


def flat(part: pa.Table) -> pa.Table:
    """Without lengths; with lists, a row for each of their values and its `position`, from 1."""
    part = part.drop_columns("length").replace_schema_metadata(None).combine_chunks()
    lists = [name for name in part.column_names if pa.types.is_list(part.schema.field(name).type)]
    if not lists:
        return part
    lengths = pc.list_value_length(part[lists[0]]).to_numpy()
    parents, starts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    places = np.arange(len(parents)) - starts[parents] + 1
    rows = {"id": part["id"].take(pa.array(parents)), "position": pa.array(places)}
    return pa.table(rows | {name: pc.list_flatten(part[name]) for name in lists})
