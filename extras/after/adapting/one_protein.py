"""Test-time training: an encoder is trained on one protein before that is scored, then gets its weights back.

As Bushuiev et al. 2024 (arXiv:2411.02109) customise ESM-2: masked language modelling of the protein alone, at 15 %, by
SGD without momentum on all weights. A step's gradient is the sum over its batches of a mean over the batch's
sequences, each the mean over its predicted residues. Here masks are those of training runs: functions of seed, step
and sequence, so a result depends on neither other proteins nor the order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.cli import UserError
from common.console import duration
from common.data.collators import mask_tokens
from common.data.counter_rng import CROP, derive_key, hash_counters, scale
from common.flags import Flags, flag
from extras.after.inference.encoder import Encoder
from extras.after.inference.packed import packs

logger = logging.getLogger(__name__)
ADAPTED = "_adapted"  # ends the names of columns
CAN_HURT = "training on one protein can make its scores worse"
BATCH, STEPS = 4, 30
LARGE = 300_000_000  # weights, from which the settings of the 650M hold; below, those of the 35M


class Settings(NamedTuple):
    """Of a model's size: the learning rate, and batches whose gradients a step adds up."""

    rate: float
    batches: int


OF_35M, OF_650M = Settings(4e-4, 16), Settings(4e-5, 4)


@dataclass
class AdaptFlags(Flags):
    """Test-time training."""

    group = "adaptation"
    advanced = ("adapt_steps", "adapt_rate", "adapt_seed")

    adapt: bool = flag(
        False,
        f"Train an encoder on each protein by itself, and score with that, too: columns ending in {ADAPTED}. It can "
        "help or hurt, and costs thousands of passes a protein (docs/adapting.md).",
    )
    adapt_steps: int = flag(STEPS, "Steps of SGD on a protein.")
    adapt_rate: float | None = flag(None, "Their learning rate. Default: 4e-4; 4e-5 from 300M weights on.")
    adapt_seed: int = flag(0, "Of the masks.")

    def check(self) -> None:
        self.require_at_least(1, "adapt_steps")
        self.require_above(0, "adapt_rate")
        self.require_at_least(0, "adapt_seed")
        if not self.adapt:
            for name in self.advanced:
                if getattr(self, name) != getattr(AdaptFlags, name):
                    raise UserError(f"--{name}: goes with --adapt: give that too")

    @property
    def given(self) -> dict[str, Any]:
        """{flag: value} that decide a result; {} without --adapt."""
        return {name: getattr(self, name) for name in ("adapt", *self.advanced)} if self.adapt else {}


class Sequences(NamedTuple):
    """Masked copies of a protein, or crops of it: token ids, labels, and predicted residues' weights in the loss."""

    ids: list[np.ndarray]
    labels: list[np.ndarray]
    weights: list[np.ndarray]


def masked_copies(encoder: Encoder, protein: bytes, step: int, batches: int, seed: int) -> Sequences:
    """The sequences of step `step`, `batches` x BATCH, as one protein's crops of at most --max_seq_length tokens."""
    alphabet, number = encoder.alphabet, batches * BATCH
    residues, room = len(protein) // alphabet.width, alphabet.room(protein, encoder.flags.max_seq_length)
    hashes = hash_counters(derive_key(seed, step, CROP), np.arange(number))
    starts = scale(hashes, max(residues - room, 0) + 1)
    texts = [protein[start * alphabet.width : (start + room) * alphabet.width] for start in starts.tolist()]
    crops = [alphabet.encode(text) for text in texts]
    lengths = np.array([len(crop) for crop in crops])
    masked = mask_tokens(np.concatenate(crops), np.arange(number), starts, lengths, alphabet, seed, step)
    ids, labels = (np.split(each, np.cumsum(lengths)[:-1]) for each in masked)
    weights = [np.full(len(each), 1 / (BATCH * max(1, np.count_nonzero(each >= 0)))) for each in labels]
    return Sequences(ids, labels, weights)


def loss_of(encoder: Encoder, sequences: Sequences, each: Callable[[Tensor], Any] = lambda loss: None) -> float:
    """A step's loss, in nats a residue averaged over its sequences. each: called with the part of each pack, as a sum
    over batches of means."""
    total, device = 0.0, encoder.device
    for pack in packs([len(ids) for ids in sequences.ids], encoder.flags.pack_tokens):
        ids, labels, weights = (torch.from_numpy(np.concatenate([part[n] for n in pack])) for part in sequences)
        lengths = [len(sequences.ids[n]) for n in pack]
        ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        given = {"labels": labels.to(device), "weights": weights.float().to(device)}
        with torch.autocast(device.type, torch.bfloat16, enabled=encoder.flags.bf16):
            part = encoder.model(ids.long().to(device), cu_seqlens=ends, max_seqlen=max(lengths), **given).loss_sum
        each(part)
        total += part.item()
    return total * BATCH / len(sequences.ids)


@contextmanager
def adapted(encoder: Encoder, protein: bytes, name: str, flags: AdaptFlags) -> Iterator[dict[str, float]]:
    """Inside, the encoder's weights are adapted to the protein; afterwards they have the bits from before.

    Yields the loss on the first step's masks before and after. UserError if a loss is NaN or infinite.
    """
    parameters = list(encoder.model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    rate, batches = OF_650M if size >= LARGE else OF_35M
    optimizer = torch.optim.SGD(parameters, lr=flags.adapt_rate or rate)
    weights = [parameter.detach().clone() for parameter in parameters]
    first = masked_copies(encoder, protein, 0, batches, flags.adapt_seed)
    try:
        with torch.no_grad():
            before = loss_of(encoder, first)
        for step in range(flags.adapt_steps):
            sequences = masked_copies(encoder, protein, step, batches, flags.adapt_seed)
            check_finite(loss_of(encoder, sequences, Tensor.backward), name, step)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            after = check_finite(loss_of(encoder, first), name, flags.adapt_steps)
        yield {"loss_before": before, "loss_after": after}
    finally:
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)


def check_finite(loss: float, name: str, step: int) -> float:
    if not math.isfinite(loss):
        raise UserError(f"--adapt: the loss of {name} is {loss} after {step} steps: give a lower --adapt_rate")
    return loss


def by_adapted(
    encoder: Encoder,
    flags: AdaptFlags,
    proteins: Mapping[bytes, str],
    compute: Callable[[bytes], dict[str, np.ndarray]],
) -> tuple[dict[bytes, dict[str, np.ndarray]], dict[str, dict[str, float]]]:
    """({protein: what `compute` gives while the encoder is adapted to it}, {its name: its losses}).

    proteins: {text: name}. Says that adaptation can hurt, and after the first protein the time.
    """
    if encoder.alphabet.chains:
        raise UserError("--adapt: is of single proteins, and this model reads records of several chains: drop it")
    logger.warning("--adapt: %s: compare columns with and without %s", CAN_HURT, ADAPTED)
    results, losses, begin = {}, {}, time.perf_counter()
    for protein, name in proteins.items():
        with adapted(encoder, protein, name, flags) as losses[name]:
            results[protein] = compute(protein)
        logger.info("%s: loss %.4f, adapted %.4f", name[:60], *losses[name].values())
        if len(results) == 1 and len(proteins) > 1:
            seconds = (time.perf_counter() - begin) * sum(map(len, proteins)) / len(protein)
            logger.info("Adapting to %s proteins: about %s", f"{len(proteins):,}", duration(seconds))
    return results, losses


def joined(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """{column of adapted scores: values of all parts}."""
    parts = list(parts)
    return {f"{name}{ADAPTED}": np.concatenate([part[name] for part in parts]) for name in parts[0]}
