"""From a pack of text and its tokens to a batch for a causal model: each token asks for the next one."""

from __future__ import annotations

import numpy as np
import torch

from common.batches.collators import Batch, Counts
from common.batches.context import shared_batches
from common.batches.loader import Collator
from common.batches.masking import IGNORE
from common.batches.windows import Pack
from common.ranks.world import Mesh
from common.text.flags import TextFlags


class CausalCollator:
    """Contexts of at most `context` tokens end to end, with the boundaries of what attention runs on.

    document_masks: those are the documents' pieces in the contexts (a pack's own pieces), else the contexts.
    """

    def __init__(self, context: int, document_masks: bool = False):
        self.context, self.document_masks = context, document_masks

    def __call__(self, pack: Pack, ids: np.ndarray) -> Batch:
        """The batch of a pack whose tokens are `ids` [T], of any integer type; see common.text.data.

        A pack without a token gives one token without a label, with all counts zero: every rank can run its forward
        pass (sharded models need all of them to) and it adds nothing to any sum.
        """
        tokens = len(ids)
        begins = np.arange(0, max(tokens, 1), self.context)
        counts = Counts(0, 0, 0, 0)
        if tokens and self.document_masks:
            ends = np.cumsum(pack.lengths)
            begins = np.union1d(begins, ends[:-1])  # no piece of a pack goes beyond its context
        cu_seqlens = np.append(begins, max(tokens, 1)).astype(np.int32)
        lengths = np.diff(cu_seqlens).astype(np.int64)
        input_ids = np.zeros(max(tokens, 1), np.int64)
        labels = np.full(len(input_ids), IGNORE, np.int64)
        if tokens:
            input_ids[:] = ids
            labels[:-1] = input_ids[1:]
            labels[cu_seqlens[1:] - 1] = IGNORE
            contexts = -(-tokens // self.context)
            counts = Counts(tokens - len(lengths), tokens, int((lengths**2).sum()), contexts)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
            "max_seqlen": int(lengths.max()),
            **counts._asdict(),
        }


def causal_batches(flags: TextFlags, mesh: Mesh) -> Collator:
    """What makes a rank's batches of text: whole packs, or its slices of them."""
    return shared_batches(CausalCollator(flags.max_seq_length, flags.document_masks), flags, mesh)
