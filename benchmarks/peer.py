"""What transformers' model is fed in side-by-side measurements: the same sequences and masks as rows, padded."""

from __future__ import annotations

import torch
from torch import Tensor

from common.data.collators import Batch


def padded(batch: Batch, width: int = 0) -> dict[str, Tensor]:
    """The sequences of a pack as rows: input_ids, attention_mask, labels int64 [B, S]; S: the longest, or `width`."""
    lengths = batch["cu_seqlens"].long().diff()
    rows = [batch[name].split(lengths.tolist()) for name in ("input_ids", "labels")]
    ids, labels = (torch.nn.utils.rnn.pad_sequence(row, True, fill) for row, fill in zip(rows, (1, -100), strict=True))
    more = (0, max(0, width - ids.shape[1]))
    ids, labels = torch.nn.functional.pad(ids, more, value=1), torch.nn.functional.pad(labels, more, value=-100)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
