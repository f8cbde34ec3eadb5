"""Flags of probe.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.cli import UserError
from common.flags import Flags, Missing, flag
from extras.after.downstream.groups import Clustering
from extras.after.downstream.probes import PROBES
from extras.prepare.relatives import HELP
from extras.prepare.sources.proteins import ProteinFlags


@dataclass
class ProbeFlags(Flags):
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
    label_column: list[str] | None = flag(
        None,
        "The column of the labels, by default label; rows without one are left out. Several: a probe of each, and one "
        "table of results.",
    )
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
    probe: str | None = flag(
        None, "Default: ridge for numbers, logistic for classes; gp: a Gaussian process.", choices=PROBES
    )
    folds: int | None = flag(
        None,
        "For few labels: hold out each protein or cluster once, in so many folds; the saved probe is fitted to all.",
    )
    overwrite: bool = flag(False, "Replace an earlier output there; other files in OUTPUT_DIR stay.")
    count_relatives: bool = flag(True, HELP)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    @property
    def clustering(self) -> Clustering:
        return Clustering(self.cluster_column, self.cluster_table, self.cluster)

    @property
    def columns(self) -> list[str]:
        return self.label_column or ["label"]

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
        self.require_at_least(2, "folds")
        if len(set(self.columns)) < len(self.columns):
            raise UserError("--label_column: names a column twice: leave one")
