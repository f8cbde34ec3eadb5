"""Initial weights: N(0, 0.02) matrices and embeddings, zero biases, unit norms; <pad> embeds to zero.

Every 256 rows of every tensor have a random stream of their own, keyed by (seed, name, number) and drawn on the CPU in
fp32. So the values depend neither on device and order of construction nor on the world size, and a rank that holds a
shard draws its own rows only.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from common.distributed.strategy import local_rows
from common.models.esm2.alphabet import PAD, VOCAB_SIZE

ROWS_PER_STREAM = 256
VOCABULARY = ("embeddings.word_embeddings.weight", "lm_head.bias")  # their rows are tokens, and some more as padding


@torch.no_grad()
def initialise(model: nn.Module, seed: int, std: float) -> None:
    """Set every parameter of a model, whole or sharded (then this rank's rows)."""
    for name, parameter in model.named_parameters():
        rows, first = local_rows(parameter)
        if name.endswith("bias"):
            rows.zero_()
        elif parameter.dim() == 1:
            rows.fill_(1.0)
        else:
            _draw(rows, first, len(parameter), f"{seed}:{name}", std)
        if name in VOCABULARY:
            rows[max(0, VOCAB_SIZE - first) :].zero_()
            if rows.dim() > 1 and first <= PAD < first + len(rows):
                rows[PAD - first].zero_()


def _draw(rows: Tensor, first: int, total: int, key: str, std: float) -> None:
    """Rows [first, first + n) of the `total` of a tensor."""
    for begin in range(first - first % ROWS_PER_STREAM, first + len(rows), ROWS_PER_STREAM):
        digest = hashlib.blake2b(f"{key}:{begin // ROWS_PER_STREAM}".encode(), digest_size=8).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(min(ROWS_PER_STREAM, total - begin), *rows.shape[1:], dtype=torch.float32)
        values.normal_(0.0, std, generator=stream)
        here = values[max(0, first - begin) : first + len(rows) - begin]
        at = max(0, begin - first)
        rows[at : at + len(here)].copy_(here)
