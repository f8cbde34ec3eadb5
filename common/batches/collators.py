"""From a pack and its tokens to a batch of tensors, packed end to end or padded to a rectangle.

Both kinds carry the counts that the loss, the FLOPs and the log need (of real sequences, never of padding):
`num_masked` (labels that are not -100), `num_tokens`, `sum_squared_lengths`, `num_sequences`: Python integers.

A pack without a sequence gives a batch of stand-in tokens with all counts zero and no label: every rank can run its
forward pass (sharded models need all of them to) and it adds nothing to any sum.
"""

from __future__ import annotations

import numpy as np
import torch

from common.batches.masking import IGNORE, mask_tokens
from common.batches.packing import Pack
from common.cli import UserError
from common.files.alphabet import CLS, EOS, PAD

Batch = dict[str, torch.Tensor | int]


class PackedCollator:
    """Sequences end to end, with their boundaries: no attention across them, no padding between them.

    seed, mlm_probability: of the masks; max_seq_length: longest sequence a batch may hold, mock ones included;
    pad_to: fixed number of tokens T (static shapes); pad_to_multiple_of: T is rounded up (FP8: 16, MXFP8/NVFP4: 32).
    What is padded is trailing mock sequences of `<pad>`, which `cu_seqlens` includes.
    """

    def __init__(
        self,
        seed: int,
        max_seq_length: int,
        mlm_probability: float = 0.15,
        pad_to: int | None = None,
        pad_to_multiple_of: int | None = None,
    ):
        _check_probability(mlm_probability)
        if pad_to and pad_to_multiple_of and pad_to % pad_to_multiple_of:
            raise UserError(f"{pad_to} tokens a pack are no multiple of {pad_to_multiple_of}")
        self.seed, self.max_seq_length, self.mlm_probability = seed, max_seq_length, mlm_probability
        self.pad_to, self.pad_to_multiple_of = pad_to, pad_to_multiple_of

    def __call__(self, pack: Pack, ids: np.ndarray) -> Batch:
        """The batch of a pack of B sequences whose tokens are `ids` uint8 [T].

        input_ids int64 [T'], labels int64 [T'], cu_seqlens int32 [B' + 1], max_seqlen int and the counts, where T' and
        B' include the mock sequences.
        """
        input_ids, labels = mask_tokens(
            ids, pack.records, pack.starts, pack.lengths, self.seed, pack.epoch, self.mlm_probability
        )
        counts = _counts(pack, labels)
        mock = self._mock_lengths(len(ids))
        lengths = np.concatenate((pack.lengths, mock))
        padding = int(mock.sum())
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        return {
            "input_ids": torch.from_numpy(np.pad(input_ids.astype(np.int64), (0, padding), constant_values=PAD)),
            "labels": torch.from_numpy(np.pad(labels, (0, padding), constant_values=IGNORE)),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
            "max_seqlen": int(lengths.max()),
            **counts,
        }

    def _mock_lengths(self, num_tokens: int) -> np.ndarray:
        """Lengths int64 [m] of the mock sequences after `num_tokens` real tokens."""
        total = self.pad_to or max(num_tokens, 1)
        assert total >= num_tokens, f"a pack of {num_tokens} tokens is to be padded to {total}"
        if multiple := self.pad_to_multiple_of:
            total = -(-total // multiple) * multiple
        whole, rest = divmod(total - num_tokens, self.max_seq_length)
        return np.array([self.max_seq_length] * whole + [rest] * (rest > 0), dtype=np.int64)


class PaddedCollator:
    """One sequence a row, padded on the right to the longest of the batch or, with `pad_to_max_length`, to
    max_seq_length; `pad_to_multiple_of` rounds the longest up."""

    def __init__(
        self,
        seed: int,
        max_seq_length: int,
        mlm_probability: float = 0.15,
        pad_to_max_length: bool = False,
        pad_to_multiple_of: int | None = None,
    ):
        _check_probability(mlm_probability)
        self.seed, self.max_seq_length, self.mlm_probability = seed, max_seq_length, mlm_probability
        self.pad_to_max_length, self.pad_to_multiple_of = pad_to_max_length, pad_to_multiple_of

    def __call__(self, pack: Pack, ids: np.ndarray) -> Batch:
        """The batch of a pack of B sequences whose tokens are `ids` uint8 [sum(lengths)].

        input_ids, attention_mask, labels int64 [B, S] and the counts. A pack without a sequence gives one row
        `<cls> <eos>` (attended to, so that no softmax is over nothing).
        """
        masked, flat_labels = mask_tokens(
            ids, pack.records, pack.starts, pack.lengths, self.seed, pack.epoch, self.mlm_probability
        )
        counts = _counts(pack, flat_labels)
        lengths = pack.lengths
        if len(lengths) == 0:
            lengths, masked = np.array([2]), np.array([CLS, EOS], dtype=np.uint8)
            flat_labels = np.full(2, IGNORE, dtype=np.int64)
        width = self.max_seq_length if self.pad_to_max_length else int(lengths.max())
        if multiple := self.pad_to_multiple_of:
            width = -(-width // multiple) * multiple
        real = np.arange(width) < lengths[:, None]  # [B, S]
        input_ids = np.full(real.shape, PAD, dtype=np.int64)
        labels = np.full(real.shape, IGNORE, dtype=np.int64)
        input_ids[real], labels[real] = masked, flat_labels
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
            "labels": torch.from_numpy(labels),
            **counts,
        }


def _counts(pack: Pack, labels: np.ndarray) -> dict[str, int]:
    return {
        "num_masked": int(np.count_nonzero(labels != IGNORE)),
        "num_tokens": int(pack.lengths.sum()),
        "sum_squared_lengths": int((pack.lengths**2).sum()),
        "num_sequences": len(pack.lengths),
    }


def _check_probability(mlm_probability: float) -> None:
    if not 0 <= mlm_probability <= 1:
        raise UserError(f"the masking probability lies between 0 and 1, not {mlm_probability}")
