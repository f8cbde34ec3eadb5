"""Collate a pack to a batch of tensors for masked language modelling.

A batch has the sequences of its pack end to end without padding, their boundaries (cu_seqlens), and the counts that
loss, FLOPs and log need, as Python integers (`Counts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Required, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError
from common.data import TokenSet
from common.data.counter_rng import GAMMA, MASKING, derive_key, hash_counters, mix
from common.data.crops import Pack
from common.hooks import extra
from common.shape_buckets import filled_up, predicted_positions

IGNORE = -100  # label of a token without loss: the default ignore_index of torch's cross-entropy
MASK_KIND_KEY = 0x5851F42D4C957F2D  # derives the hash that decides between <mask>, random and unchanged


@dataclass(frozen=True)
class MaskRates:
    """How much to mask, and how. Names and defaults are those of transformers' DataCollatorForLanguageModeling, and
    ESM-2's (Lin et al. 2023).

    mlm_probability: of the residues are selected; of those mask_replace_prob become `<mask>`, random_replace_prob a
    random amino acid, and the rest stays. end: mlm_probability at the last of total_steps, to which it falls linearly.
    """

    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    end: float | None = None
    total_steps: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.mlm_probability <= 1:
            raise UserError(f"the masking probability lies between 0 and 1, not {self.mlm_probability}")

    def at(self, step: int) -> MaskRates:
        """The rates of a step, 0-based."""
        if self.end is None:
            return self
        done = min(1.0, step / max(1, self.total_steps - 1))
        return replace(self, mlm_probability=self.mlm_probability * (1 - done) + self.end * done, end=None)

    @property
    def mask_ratio(self) -> float:
        """Expected fraction of <mask> among the tokens."""
        return self.mlm_probability * self.mask_replace_prob


ESM2_MASK_RATES = MaskRates()


def mask_tokens(
    ids: np.ndarray,
    records: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    tokens: TokenSet,
    seed: int,
    epoch: int,
    rates: MaskRates = ESM2_MASK_RATES,
    probabilities: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """BERT masking (Devlin et al. 2019) of the crops of n sequences, laid end to end.

    The choice is a hash of (seed, epoch, record, position): a token is masked in the same way in every batch, and one
    that is selected at some mlm_probability is also selected at every higher one. Special tokens are never selected.

    ids: `tokens.dtype` [T]; records: int64 [n], the store's index of each sequence; starts: int64 [n], where in its
    sequence each crop begins; lengths: int64 [n], T in sum; probabilities: float64 [n], of each sequence, in place of
    rates.mlm_probability. Returns input ids, as `ids`, and labels int64 [T], the original id where a token was
    selected and -100 elsewhere.
    """
    # A residue is hashed by its number in the protein, from 1, so that every crop and family masks the same ones:
    # state = hash(record) + number * GAMMA, with number = start + (index in the batch - index of the crop) - more.
    state = hash_counters(derive_key(seed, epoch, MASKING), records)
    more = tokens.num_head - 1
    state += (starts - (np.cumsum(lengths) - lengths) - more).astype(np.uint64) * np.uint64(GAMMA)
    hashes = np.repeat(state, lengths)
    hashes += np.arange(len(ids), dtype=np.uint64) * np.uint64(GAMMA)
    hashes = mix(hashes)

    is_residue = tokens.is_maskable[ids]
    # 53 bits, so that a probability of 1.0 has a threshold
    each = rates.mlm_probability if probabilities is None else np.repeat(probabilities, lengths)
    below = np.round(np.multiply(each, 2.0**53)).astype(np.uint64)
    selected = np.flatnonzero(((hashes >> np.uint64(11)) < below) & is_residue)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[selected] = ids[selected]

    kinds = mix(hashes[selected] ^ np.uint64(MASK_KIND_KEY))
    which, residue = kinds >> np.uint64(32), kinds & np.uint64(0xFFFFFFFF)
    replacements = np.array(tokens.replacements, tokens.dtype)
    amino_acids = replacements[(residue * np.uint64(len(replacements))) >> np.uint64(32)]
    masked_below = np.uint64(rates.mask_replace_prob * 2**32)
    random_below = np.uint64((rates.mask_replace_prob + rates.random_replace_prob) * 2**32)
    input_ids = ids.copy()
    shown = np.where(which < random_below, amino_acids, ids[selected])
    input_ids[selected] = np.where(which < masked_below, tokens.masked_ids[ids[selected]], shown)
    return input_ids, labels


# Of a model.
INPUTS = ("input_ids", "labels", "predicted", "weights", "attention_mask", "cu_seqlens", "max_seqlen", "mask_ratio")
INPUTS += ("sets",)


class Batch(TypedDict, total=False):
    """A pack as a model's forward takes it; see `MaskingCollator`. Flat: a worker sends all tensors in one."""

    input_ids: Required[Tensor]  # int64 [T]
    labels: Required[Tensor]  # int64 [T]
    cu_seqlens: Required[Tensor]  # int32 [B + 1]
    max_seqlen: Required[int]
    predicted: Tensor  # int64 [P]
    weights: Tensor  # float32 [T], of each token's loss, above 0 where one may be asked; without: 1
    mask_ratio: float  # in training
    source: int  # in training: of a mixture (`Pack.source`)
    records: Tensor  # int64 [B], in an evaluation: which of the store's the sequences are
    # The fields of `Counts`.
    num_targets: Required[int]
    num_tokens: Required[int]
    sum_squared_lengths: Required[int]
    num_sequences: Required[int]
    num_unknown: Required[int]
    set_pairs: int
    sets: Tensor  # int32 [2, B + 1], on the host: of homologs (extras.prepare.sources.sets.SetCollator)
    cp_targets: int  # of the whole pack, where ranks share it
    # With context parallelism also the fields of a CpPack, cp_positions and so on (extras.speed.cp_batches).


class Counts(NamedTuple):
    """Summed over batches."""

    num_targets: int  # what the loss is divided by: labels that are not -100; with weights: those that are above 0
    num_tokens: int
    sum_squared_lengths: int
    num_sequences: int
    num_unknown: int = 0  # <unk> tokens: characters that are not residues
    set_pairs: int = 0  # of tokens, in attention over sets of homologs

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Counts:
        return cls(
            sum(batch["num_targets"] for batch in batches),
            sum(batch["num_tokens"] for batch in batches),
            sum(batch["sum_squared_lengths"] for batch in batches),
            sum(batch["num_sequences"] for batch in batches),
            sum(batch["num_unknown"] for batch in batches),
            sum(batch.get("set_pairs", 0) for batch in batches),
        )


class Collator(Protocol):
    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """The batch of a pack whose tokens are `ids`. step: of training, so that anything in a batch may follow a
        schedule; None in an evaluation, which follows none."""


class MaskingCollator:
    """Batches of masked language modelling. seed: as `mask_tokens`."""

    def __init__(self, tokens: TokenSet, seed: int, rates: MaskRates = ESM2_MASK_RATES):
        self.tokens, self.seed, self.rates = tokens, seed, rates

    def probabilities(self, pack: Pack) -> np.ndarray | None:
        """Of selecting a residue, float64 [B], if each sequence has its own."""
        return None

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """The batch of a pack of B sequences whose tokens are `ids` [T].

        input_ids int64 [T], labels int64 [T], predicted int64 [P] (`predicted_positions` of them), cu_seqlens int32
        [B + 1], max_seqlen int and the counts; in training also mask_ratio, for the model's token dropout, in an
        evaluation records.
        An empty pack gives one `<pad>` without a label, and all counts zero: the rank can run its forward pass
        (sharded models need all ranks to) and adds nothing to any sum.
        """
        rates = self.rates if step is None else self.rates.at(step)
        input_ids, labels = mask_tokens(
            *(ids, pack.records, pack.starts, pack.lengths, self.tokens, self.seed, pack.epoch, rates),
            self.probabilities(pack),
        )
        lengths = pack.lengths
        if len(ids) == 0:
            lengths = np.array([1])
            input_ids, labels = np.array([self.tokens.pad]), np.array([IGNORE])
        batch: Batch = {
            "input_ids": torch.from_numpy(input_ids.astype(np.int64)),
            "labels": torch.from_numpy(labels),
            "predicted": predicted_positions(torch.from_numpy(labels)),
            "cu_seqlens": torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
            "max_seqlen": int(lengths.max()),
            "num_targets": int(np.count_nonzero(labels != IGNORE)),
            "num_tokens": len(ids),
            "sum_squared_lengths": int((pack.lengths**2).sum()),
            "num_sequences": len(pack.lengths),
            "num_unknown": int(np.count_nonzero(ids == self.tokens.unknown)),
        }
        if step is None:
            batch["records"] = torch.from_numpy(pack.records.astype(np.int64))
        else:
            batch["mask_ratio"], batch["source"] = rates.mask_ratio, pack.source
        return batch


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The model's inputs of a batch without the counts, all but `sets` on the device. On the CPU nothing is copied."""
    inputs: dict[str, Any] = {name: batch[name] for name in INPUTS if name in batch}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name != "sets":
            inputs[name] = value.to(device, non_blocking=True)
    if "cp_positions" in batch:  # slices of one that ranks share
        inputs["cp_pack"] = extra().cp_pack(batch, device)
    return inputs


@dataclass(frozen=True)
class FillingCollator:
    """Fills the batches of `collator` up to one shape: compiled layers are then one graph, and a GPU's libraries
    select kernels once.

    Behind a batch's tokens come fillers (`pad`), in sequences of their own, none longer than `longest`: in attention
    they would cost squares. Behind those come empty sequences, [T, T). A batch that has more sequences than
    `sequences` is filled up to a multiple of it by a power of two; one with more tokens than `tokens`, or with more
    predicted positions than `predicted`, stays as it is.
    """

    collator: Collator
    tokens: int
    sequences: int
    longest: int
    predicted: int
    pad: int

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """max_seqlen is `longest`; the counts are those of the batch without fillers."""
        batch = self.collator(pack, ids, step)
        tokens, bounds = len(batch["input_ids"]), batch["cu_seqlens"]
        filled = filled_up(max(tokens, self.tokens))
        ends = torch.arange(filled, tokens, -self.longest, dtype=bounds.dtype).flip(0)
        bounds = torch.cat((bounds, ends))
        sequences = self.sequences
        while sequences < len(bounds) - 1:
            sequences *= 2
        full: Any = batch | {
            "input_ids": F.pad(batch["input_ids"], (0, filled - tokens), value=self.pad),
            "labels": F.pad(batch["labels"], (0, filled - tokens), value=IGNORE),
            "cu_seqlens": F.pad(bounds, (0, sequences + 1 - len(bounds)), value=filled),
            "max_seqlen": max(batch["max_seqlen"], self.longest),
        }
        if "weights" in batch:
            full["weights"] = F.pad(batch["weights"], (0, filled - tokens))
        if "predicted" in batch:
            lacking = max(0, self.predicted - len(batch["predicted"]))
            full["predicted"] = F.pad(batch["predicted"], (0, lacking), value=-1)
        return full
