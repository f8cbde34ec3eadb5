"""Packs of sets, and block-causal attention of them in float64 from its definition."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.models.layers.attention import rotate
from extras.families.sets.layout import SetLayout

HEADS, DIM = 3, 8
PACKS = {  # lengths of the sequences of each set
    "ragged": [[3, 5, 1, 7], [2], [9, 4, 4], [6, 30]],
    "sets of one": [[1], [12], [40]],
    "empty sequences": [[0, 3, 0, 5], [0], [4, 0, 0, 0, 0, 2]],
    "32 a set": [[1 + n % 5 for n in range(32)], [7], [2] * 31],
    "long": [[300, 700, 20, 900]],
}


def layout_of(sets: list[list[int]], fillers: int = 0) -> SetLayout:
    """With three empty sets behind the last, as in a batch that is filled up."""
    lengths = [n for lengths in sets for n in lengths] + [0] * 3
    bounds = np.cumsum([0, *lengths])
    rows = np.full((2, len(bounds)), len(lengths))
    rows[0] = bounds
    rows[1, : len(sets) + 1] = np.cumsum([0, *map(len, sets)])
    given = torch.from_numpy(rows.astype(np.int32))
    return SetLayout.of(given, given[0], int(bounds[-1]) + fillers)


def definition(qkv: Tensor, cos: Tensor, sin: Tensor, sets: list[list[int]]) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in float64, set by set, with a mask of each set's pairs."""
    out = []
    for lengths, part, c, s in zip(sets, *(x.split([sum(n) for n in sets]) for x in (qkv, cos, sin)), strict=True):
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        q, k, v = part.unbind(2)
        scores = torch.einsum("ihd,jhd->hij", rotate(q, c, s), rotate(k, c, s)) / DIM**0.5
        weights = scores.masked_fill(number[:, None] < number, -torch.inf).softmax(-1)
        out.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(out).flatten(1)


def inputs_of(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """qkv, the gradient of the output, cosines, sines; the first two exact in dtype."""
    random = torch.Generator().manual_seed(tokens)
    qkv = 2 * torch.randn(tokens, HEADS, 3, DIM, generator=random, dtype=torch.float64)
    grad = torch.randn(tokens, HEADS * DIM, generator=random, dtype=torch.float64)
    angles = 3 * torch.randn(tokens, DIM // 2, generator=random, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    kind = torch.promote_types(dtype, torch.float32)
    return qkv.to(dtype), grad.to(dtype), *(x.to(kind) for x in tables)


def attended(attend, qkv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    qkv = qkv.clone().requires_grad_()
    out = attend(qkv)
    out.backward(grad)
    assert qkv.grad is not None
    return out.detach(), qkv.grad
