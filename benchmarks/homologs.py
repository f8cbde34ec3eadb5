r"""The loss of hidden residues by the number of homologs shown, beside what the homologs can give.

python -m benchmarks.homologs --models 1.2M=out/final_model --dataset_dir processed/arrow [--divergence 0.2] \
    [--output TABLE.md]

The same held-out proteins, with the same residues hidden, follow 0, 1, 2, 4 and 8 members of their own cluster, none
of which equals, is a part of or contains them. Beside the models: of planted families (--divergence) the least
loss that is possible (benchmarks/planted_families.py); of others a letter table over alignments
(benchmarks/aligned_relatives.py), of the same relatives, in which the hidden residues are hidden too, and once more
where the alignment may see them.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.aligned_relatives import OTHER, LetterTable, aligned_letters
from benchmarks.measuring import publish, say, where_measured
from benchmarks.planted_families import least_loss
from common.cli import UserError, run
from common.data.clusters import open_clusters
from common.data.counter_rng import derive_key, hash_counters
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.token_store import TokenStore, open_split
from common.data.training_data import held_out_masks
from common.distributed.world import World
from common.figures import ONE_COLUMN, figure_style, save_figure, series_style
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.families.sets.evaluation import HeldOutSets, held_out_sets, losses_with_homologs
from extras.prepare.synthetic_structures import RESIDUES

PAIRS = 3000  # of training proteins, that the letter table is counted over
LOOKED_UP = np.full(256, OTHER)
LOOKED_UP[np.frombuffer(RESIDUES.encode(), np.uint8)] = np.arange(20)


@dataclass
class Arguments(Flags):
    models: list[str] | None = flag(None, "NAME=DIRECTORY of each model.")
    dataset_dir: str | None = flag(None, "What step 1 wrote, with clusters: processed/arrow.")
    split: str = flag("validation", "Whose proteins are asked.")
    numbers: list[int] | None = flag(None, "Of homologs shown. Default: 0 1 2 4 8.")
    set_tokens: int = flag(8192, "Most tokens of a set.")
    max_seq_length: int = flag(1024, "Tokens of a protein; a longer one is cropped.")
    max_samples: int | None = flag(None, "Of the proteins that have enough homologs, the first so many.")
    divergence: float | None = flag(None, "Of planted families: states the least possible loss.")
    output: str | None = flag(None, "A file for the table, and beside it a picture.")

    def missing(self) -> Iterator[Missing]:
        if not self.models:
            yield Missing("--models", "what is measured", "1.2M=out/final_model")
        if not self.dataset_dir:
            yield Missing("--dataset_dir", "what 1.tokenize_uniref_csv.py wrote", "processed/arrow")

    def check(self) -> None:
        for text in self.models or ():
            if "=" not in text:
                raise UserError(f"--models {text}: expected NAME=DIRECTORY")


Row = tuple[float, float]  # mean loss, standard error over clusters


class Question:
    """Held-out proteins, which of their residues are hidden, and their homologs in order."""

    def __init__(self, args: Arguments, numbers: list[int]):
        self.flags = DataFlags(dataset_dir=args.dataset_dir, max_seq_length=args.max_seq_length)
        self.directory = Path(str(args.dataset_dir))
        self.store = open_split(self.directory, args.split, ESM2_TOKENS)
        self.clusters = open_clusters(self.directory / args.split, len(self.store)).numbers()
        most = max(numbers)
        limits = most + 1, args.set_tokens, args.max_seq_length
        sets = held_out_sets(self.store, self.clusters, *limits, ESM2_TOKENS).with_at_least(most)
        if args.max_samples is not None:
            sets = self._sample(sets, args.max_samples)
        self.sets = sets

    def _sample(self, sets: HeldOutSets, count: int) -> HeldOutSets:
        """So many proteins, by a hash: of families of any size."""
        chosen = np.sort(np.argsort(hash_counters(derive_key(0, 0, 0), sets.proteins), kind="stable")[:count])
        spans = zip(sets.proteins[chosen], sets.bounds[chosen], sets.bounds[chosen + 1], strict=True)
        return HeldOutSets.of({int(n): sets.records[a : b - 1].tolist() for n, a, b in spans}, sets.copies)

    def letters(self, store: TokenStore, records: np.ndarray) -> list[np.ndarray]:
        """Letters 0 to 21 (aligned_relatives) of the first residues of each record."""
        table = np.array([LOOKED_UP[ord(token)] if len(token) == 1 else OTHER for token in ESM2_TOKENS.letters])
        lengths = np.minimum(store.lengths(records), self.flags.max_seq_length)
        ids, offsets = store.gather(records, np.zeros_like(records), lengths)
        return [table[ids[a + 1 : b - 1]] for a, b in zip(offsets, offsets[1:], strict=False)]

    def hidden(self) -> list[np.ndarray]:
        """Which residues of each protein stand behind <mask>, bool [its residues]."""
        proteins = self.sets.proteins
        lengths = self.store.lengths(proteins)
        if (lengths > self.flags.max_seq_length).any():
            raise UserError("--max_seq_length: crops held-out proteins, whose alignment needs them whole: raise it")
        starts = np.zeros_like(proteins)
        ids, offsets = self.store.gather(proteins, starts, lengths)
        batch = held_out_masks(self.flags, ESM2_TOKENS)(Pack(proteins, starts, lengths, 0), ids)
        is_mask = batch["input_ids"].numpy() == ESM2_TOKENS.mask
        return [is_mask[a + 1 : b - 1] for a, b in zip(offsets, offsets[1:], strict=False)]

    def of_model(self, encoder: Encoder, number: int) -> Row:
        """With the last `number` homologs before each protein."""
        world = World(0, 0, 1, torch.device("cpu"))
        store = open_split(self.directory, self.store.path.name, encoder.alphabet)
        sets = self.sets.with_at_least(number, only=number)
        losses = losses_with_homologs(encoder.model, store, sets, encoder.alphabet, self.flags, world)
        assert losses is not None, "nothing stops this"
        return self._mean(losses)

    def _mean(self, losses: ProteinLosses) -> Row:
        return mean_and_error(losses.loss_sum, losses.masked, self.clusters)

    def of_alignment(self, numbers: list[int], sees: bool) -> dict[int, Row]:
        """By the letter table. sees: whether the alignment may see the hidden residues."""
        table, hidden = self._table(), self.hidden()
        sums = {number: np.zeros(len(self.store)) for number in numbers}
        masked = np.zeros(len(self.store), np.int64)
        for n, protein in enumerate(self.sets.proteins.tolist()):
            records = self.sets.records[self.sets.bounds[n] : self.sets.bounds[n + 1]]
            *relatives, query = self.letters(self.store, records)
            asked = hidden[n] & (query < 20)
            masked[protein] = asked.sum()
            unseen = np.zeros_like(hidden[n]) if sees else hidden[n]
            beside = np.array([aligned_letters(query, each, unseen)[asked] for each in relatives])
            for number in numbers:
                sums[number][protein] = table.losses(query[asked], beside[len(beside) - number :]).sum()
        return {number: self._mean(ProteinLosses(sums[number], masked)) for number in numbers}

    def _table(self) -> LetterTable:
        """Counted over pairs of members of training clusters, a pair a cluster in turn."""
        train = open_split(self.directory, "train", ESM2_TOKENS)
        clusters = open_clusters(self.directory / "train", len(train))
        several = np.flatnonzero(np.diff(clusters.offsets) > 1)
        generator, pairs = np.random.default_rng(0), []
        for cluster in np.resize(generator.permutation(several), PAIRS if len(several) else 0):
            members = clusters.members[int(clusters.offsets[cluster]) : int(clusters.offsets[cluster + 1])]
            chosen = np.sort(generator.choice(members, 2, replace=False).astype(np.int64))
            query, relative = self.letters(train, chosen)
            pairs.append((query, aligned_letters(query, relative, generator.random(len(query)) < 0.12)))
        return LetterTable(pairs)


def cell(row: Row) -> str:
    return f"{row[0]:.3f} ± {row[1]:.3f}"


def picture(path: Path, numbers: list[int], columns: dict[str, dict[int, float]]) -> None:
    """path: without a suffix."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(ONE_COLUMN, 0.9 * ONE_COLUMN), layout="constrained")
        axes = figure.subplots()
        for row, (name, values) in enumerate(columns.items()):
            style = {"linestyle": "-"} | series_style(row, marker=True)
            axes.plot(range(len(numbers)), [values[number] for number in numbers], label=name, **style)
        axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        axes.set(xlabel="homologs shown", ylabel="loss of hidden residues (nats)")
        figure.legend(loc="outside lower center")
    save_figure(figure, path)


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    numbers = args.numbers or [0, 1, 2, 4, 8]
    question = Question(args, numbers)
    columns: dict[str, dict[int, Any]] = {}
    for text in args.models or ():
        name, _, directory = text.partition("=")
        encoder = Encoder(EncoderFlags(model_name_or_path=directory, use_cpu=True))
        columns[name] = {}
        for number in numbers:
            columns[name][number] = question.of_model(encoder, number)
            say(f"{name}, {number} homologs: {cell(columns[name][number])}")
    if args.divergence is not None:
        columns["least possible"] = {number: (least_loss(args.divergence, number), 0.0) for number in numbers}
    else:
        columns["alignment"] = question.of_alignment(numbers, sees=False)
        columns["alignment that sees the hidden residues"] = question.of_alignment(numbers, sees=True)
    families = len(np.unique(question.clusters[question.sets.proteins]))
    lines = [
        f"{len(question.sets.proteins):,} held-out proteins of {families:,} clusters, each with at least "
        f"{max(numbers)} others of its cluster. Nats a hidden residue, ± standard error over clusters.",
        "",
        "| homologs shown | " + " | ".join(columns) + " |",
        "|--:|" + "--:|" * len(columns),
        *(f"| {n} | " + " | ".join(cell(rows[n]) for rows in columns.values()) + " |" for n in numbers),
        "",
        *where_measured("benchmarks.homologs", "torch"),
    ]
    publish("\n".join(lines), args.output)
    if args.output:
        means = {name: {n: row[0] for n, row in rows.items()} for name, rows in columns.items()}
        picture(Path(args.output).with_suffix(""), numbers, means)


if __name__ == "__main__":
    run(main)
