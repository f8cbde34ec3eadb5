"""Run a protein decoder on many sequences, packed without padding: the log-probability of each residue."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.cli import UserError
from common.files.runs import resolve_directory
from common.flags import Flags, flag
from common.models.esm2.alphabet import BYTE_TO_ID
from common.models.family import family_of
from common.models.layers.hf_directory import read_config
from extras.after.inference.encoder import EncoderFlags, Progress, in_parts
from extras.after.inference.likelihoods import Variants, differences, positions_of, sequences_of
from extras.after.inference.mutation_scores import RESIDUES, Mutation, Variant
from extras.after.inference.packed import loaded, packs
from extras.families.decoders.config import DIRECTIONS
from extras.families.decoders.residues import RESIDUE_TOKENS, encode_direction, reads_residues

logger = logging.getLogger(__name__)
GROUP = 256  # sequences whose log-probabilities are in memory at a time


@dataclass
class CausalFlags(Flags):
    """How a decoder's likelihood is computed."""

    group = "protein decoders"

    directions: str | None = flag(
        None,
        "For a mean over both directions, or only from the N-terminus. Default: as the model was trained.",
        choices=("forward", "both"),
    )
    count_ends: bool = flag(False, "To count also the two tokens that end a protein, in sums and means.")

    def refuse(self) -> None:
        """UserError for flags that are given to an encoder."""
        for name in ("directions", "count_ends"):
            if getattr(self, name):
                raise UserError(f"--{name}: is of protein decoders, and the model is none: drop it")


def refuse_flags_of_encoders(model: str, given: dict[str, bool]) -> None:
    """UserError for flags that are given (those that are true) to a decoder."""
    for name in (name for name, is_given in given.items() if is_given):
        raise UserError(f"--{name}: is of encoders, and {model} is a decoder: drop it")


def is_decoder(name: str) -> bool:
    """Whether a directory's config.json is that of a decoder."""
    try:
        return family_of(read_config(resolve_directory(name) / "config.json")["model_type"]).task == "clm"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def directions_of(name: str, flags: CausalFlags) -> str:
    """The directions in which a model reads: as asked, else as its run recorded. UserError for a decoder of text, and
    for directions that its run did not train."""
    directory = resolve_directory(name)
    if not reads_residues(directory):
        raise UserError(f"{name}: a decoder whose tokenizer is not of residues (--tokenizer residues): has no scores")
    trained = read_config(directory / "config.json").get(DIRECTIONS)
    if trained == "forward" and flags.directions == "both":
        raise UserError(f"--directions both: {name} has read proteins forwards alone: drop it")
    return flags.directions or ("both" if trained == "both" else "forward")


class Causal:
    """A protein decoder with its weights, on a GPU if there is one.

    directions: `forward`, or `both`, for means over the two; ends: whether the two tokens that end a sequence count
    too. UserError for weights that are missing, damaged or not finite.
    """

    def __init__(self, flags: EncoderFlags, directions: str, ends: bool = False):
        self.flags, self.ends, self.device = flags, ends, flags.device
        self.reversed = (False, True) if directions == "both" else (False,)
        name = str(flags.model_name_or_path)
        family = family_of(read_config(resolve_directory(name) / "config.json")["model_type"])
        config = family.load_config(name)
        self.context = config.context
        pieces, _ = family.adapter.read(name, config)
        self.model: Any = loaded(family, config, pieces, self.device)
        size = (config.num_hidden_layers, config.hidden_size)
        logger.info("%s: decoder of %d layers of %d, on %s, %s", name, *size, self.device, directions)

    @property
    def longest(self) -> int:
        """Residues of the longest sequence that fits the context."""
        return self.context - RESIDUE_TOKENS.num_special

    def tokens_of(self, sequences: Sequence[bytes]) -> int:
        """What `log_likelihoods` of them has to read."""
        return sum(len(each) + RESIDUE_TOKENS.num_special for each in sequences) * len(self.reversed)

    def check(self, sequences: Iterable[bytes]) -> None:
        """UserError for a sequence longer than the model's context."""
        for sequence in sequences:
            if len(sequence) > self.longest:
                raise UserError(
                    f"{sequence[:20].decode()}...: {len(sequence):,} residues, and the model reads "
                    f"{self.longest:,}: leave this protein out"
                )

    def log_likelihoods(
        self, sequences: Sequence[bytes], done: Progress = lambda tokens: None
    ) -> Iterator[np.ndarray]:
        """log p(residue | those before it) of each residue, float64 [length], a mean over the directions; with `ends`
        [length + 2]. done: called after each pack with its number of tokens.

        UserError for a sequence longer than the model's context, before anything is computed.
        """
        self.check(sequences)
        return (row for group in in_parts(sequences, GROUP) for row in self._of_group(group, done))

    def _of_group(self, sequences: Sequence[bytes], done: Progress) -> Iterator[np.ndarray]:
        tokens = [encode_direction(each, reverse) for each in sequences for reverse in self.reversed]
        rows = iter(self._next_tokens(tokens, done))
        head = len(RESIDUE_TOKENS.head) - 1  # predicted tokens before the first residue
        for sequence in sequences:
            directions = []
            for reverse in self.reversed:
                row = next(rows)[head:]
                residues, ends = np.split(row, [len(sequence)])
                directions.append(np.concatenate([residues[::-1] if reverse else residues, ends[: 2 * self.ends]]))
            yield np.mean(directions, 0)

    @torch.inference_mode()
    def _next_tokens(self, sequences: Sequence[np.ndarray], done: Progress) -> list[np.ndarray]:
        """log p of each token of each sequence but the first, float64 [tokens - 1]."""
        results: list[Any] = [None] * len(sequences)
        for pack in packs([len(each) for each in sequences], self.flags.pack_tokens):
            lengths = [len(sequences[number]) for number in pack]
            ids = torch.from_numpy(np.concatenate([sequences[number] for number in pack]).astype(np.int64))
            ids = ids.to(self.device)
            ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.flags.bf16):
                logits = self.model(ids, cu_seqlens=ends, max_seqlen=max(lengths)).logits
            # The last token of a sequence is followed by the next one's first: that value is dropped.
            log_p = logits[:-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu()
            done(len(ids))
            for number, row in zip(pack, torch.cat([log_p, log_p[:1]]).split(lengths), strict=True):
                results[number] = row[:-1].numpy()
                if not np.isfinite(results[number]).all():
                    raise UserError(
                        f"{self.flags.model_name_or_path}: gives NaN or infinity for a sequence of "
                        f"{len(sequences[number])} tokens: try it without --bf16, or take another checkpoint"
                    )
        return results


def log_likelihoods(
    causal: Causal,
    variants: Variants,
    done: Progress = lambda tokens: None,
    planned: Progress = lambda tokens: None,
) -> dict[str, np.ndarray]:
    """`differences` of a decoder. done, planned: as of `log_probabilities`."""
    by_protein = sequences_of(variants)
    causal.check(sequence for sequences in by_protein.values() for sequence in sequences)
    planned(sum(map(causal.tokens_of, by_protein.values())))

    def read(_: bytes, sequences: list[bytes]) -> Iterator[np.ndarray]:
        for sequence, log_p in zip(sequences, causal.log_likelihoods(sequences, done), strict=True):
            ends = np.arange(len(sequence), len(log_p))
            yield log_p[np.concatenate([positions_of(sequence), ends])]

    return differences(variants, read)


def matrices_of(
    causal: Causal,
    proteins: Sequence[bytes],
    done: Progress = lambda tokens: None,
    planned: Progress = lambda tokens: None,
) -> np.ndarray:
    """The sums of `log_likelihoods` of all single mutants, float64 [residues of all proteins, 20] in the order of
    `RESIDUES`; NaN where the wild type is no amino acid."""
    variants, at, rows = [], [], 0
    for protein in proteins:
        for position, column in itertools.product(positions_of(protein).tolist(), range(len(RESIDUES))):
            mutation = Mutation(int(BYTE_TO_ID[protein[position]]), position, int(BYTE_TO_ID[ord(RESIDUES[column])]))
            variants.append(Variant(protein, (mutation,)))
            at.append((rows + position, column))
        rows += len(protein)
    scores = np.full((rows, len(RESIDUES)), np.nan)
    scores[tuple(np.transpose(at))] = log_likelihoods(causal, variants, done, planned)[""]
    return scores
