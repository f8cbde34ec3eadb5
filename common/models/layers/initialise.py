"""Initial weights, N(0, std) for matrices and embeddings, zeros for biases, ones for norms; and parameter counts.

Every 256 rows of every tensor have their own random stream, keyed by (seed, name, block) and drawn on the CPU in fp32.
So the values depend neither on the device, nor on the order of construction, nor on the world size; a rank that holds
a shard draws its own rows only.

A model may say: `zero_rows`, {parameter: rows that start as zeros}, and `padded_vocab`, {parameter: rows that are
tokens}, where a vocabulary is padded to a multiple that matrix units like; `uniform`: matrices and embeddings are
uniform in (-std, std) instead.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from common.distributed.shards import local_shard

ROWS_PER_STREAM = 256


@torch.no_grad()
def initialise(model: nn.Module, seed: int, std: float) -> None:
    """Set every parameter of a model, whole or sharded (then this rank's rows)."""
    zero_rows, uniform = getattr(model, "zero_rows", {}), getattr(model, "uniform", False)
    for name, parameter in model.named_parameters():
        rows, first = local_shard(parameter)
        if name.endswith("bias"):
            rows.zero_()
        elif parameter.dim() == 1:
            rows.fill_(1.0)
        else:
            _draw(rows, first, len(parameter), f"{seed}:{name}", std, uniform)
        for row in zero_rows.get(name, ()):
            if first <= row < first + len(rows):
                rows[row - first].zero_()


def _draw(rows: Tensor, first: int, total: int, key: str, std: float, uniform: bool) -> None:
    """Rows [first, first + n) of the `total` of a tensor."""
    for begin in range(first - first % ROWS_PER_STREAM, first + len(rows), ROWS_PER_STREAM):
        digest = hashlib.blake2b(f"{key}:{begin // ROWS_PER_STREAM}".encode(), digest_size=8).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(min(ROWS_PER_STREAM, total - begin), *rows.shape[1:], dtype=torch.float32)
        if uniform:
            values.uniform_(-std, std, generator=stream)
        else:
            values.normal_(0.0, std, generator=stream)
        own = values[max(0, first - begin) : first + len(rows) - begin]
        row = max(0, begin - first)
        rows[row : row + len(own)].copy_(own)


def count_parameters(model: nn.Module) -> int:
    """Trainable parameters, without a vocabulary's padding rows. Works on the meta device and on wrapped models."""
    padded = getattr(getattr(model, "module", model), "padded_vocab", {})
    total = 0
    for name, parameter in model.named_parameters():
        rows = padded.get(name.removeprefix("module."), parameter.shape[0])
        total += rows * math.prod(parameter.shape[1:]) if parameter.requires_grad else 0
    return total
