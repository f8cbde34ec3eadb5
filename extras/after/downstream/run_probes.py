"""--eval_probe: what a model's embeddings know, while it is trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from extras.after.downstream.labels import read_rows, sequences_of, usable_rows
from extras.after.downstream.metrics import values_of
from extras.after.downstream.named_tables import named_tables
from extras.after.downstream.probe_fits import chosen_probe, predict
from extras.after.downstream.probes import Examples, Labelled, contradicting, examples_of, labelled
from extras.after.inference.encoder import Encoder, EncoderFlags, embed

logger = logging.getLogger(__name__)


class ProbeEvaluation:
    """--eval_probe: probes of tables with the columns sequence and label, and possibly split."""

    def __init__(self, paths: Sequence[str], longest: int):
        """longest: tokens of a sequence that the model takes. UserError for a table that cannot be used."""
        self.flags = EncoderFlags(max_seq_length=min(longest, EncoderFlags.max_seq_length))
        self.tables: dict[str, tuple[list[tuple[str, bytes]], Examples]] = {}
        self.baselines: dict[str, dict[str, float]] = {}
        for stem, path in named_tables("--eval_probe", paths).items():
            rows = read_sequences(str(path), f"--eval_probe {path}")
            examples, about = examples_of(rows, [None] * len(rows), None, f"--eval_probe {path}")
            contradicting(rows, examples, about, f"--eval_probe {path}")
            self.tables[stem] = [(row.name, row.sequence.encode()) for row in rows], examples
            test = int(examples.test.sum())
            counts = f"{len(rows) - test:,}", f"{test:,}"
            logger.info("%s: a probe is fitted on %s proteins and evaluated on %s others", path, *counts)

    def evaluate(self, model: Any) -> dict[str, float]:
        """`eval_probe_<stem>_<metric>` of a stock model, and `eval_probe_<stem>_baseline_<metric>`."""
        encoder = Encoder(self.flags, model.device, model)
        results: dict[str, float] = {}
        for stem, (proteins, examples) in self.tables.items():
            embedded = np.stack([vector.numpy() for vector in embed(encoder, proteins, pooling="mean")])
            examples = replace(examples, features=embedded)
            probe, labels = chosen_probe(examples, None), examples.labels[examples.test]
            if stem not in self.baselines:
                self.baselines[stem] = values_of(labels, *predict(examples, examples.baseline, probe))
            values = values_of(labels, *predict(examples, examples.features, probe))
            first = next(iter(values))
            baseline = self.baselines[stem]
            logger.info("Probe of %s: %s %.3f, baseline %.3f", stem, first, values[first], baseline[first])
            named = values | {f"baseline_{name}": value for name, value in baseline.items()}
            results |= {f"eval_probe_{stem}_{name}": value for name, value in named.items() if np.isfinite(value)}
        return results


def read_sequences(path: str, where: str) -> list[Labelled]:
    """The labelled rows of a table with the columns sequence and label, and possibly splits. UserError names the first
    row that cannot be used."""
    rows = read_rows(path, where, ("sequence", "label"))
    sequences = sequences_of(rows, "label", None, where)
    rows = [row | {"sequence": sequence} for row, sequence in zip(rows, sequences, strict=True)]
    rows, splits = usable_rows(rows, sequences, "label", None, None, where)
    names = [f"row {row['line']}" for row in rows]
    sequences = [row["sequence"] for row in rows]
    return labelled(rows, names, sequences, sequences, splits, "label", where)
