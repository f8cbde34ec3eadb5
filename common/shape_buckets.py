"""Sizes that batches are filled up to, so that few different shapes occur whatever a batch holds."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

# Numbers of tokens and of predicted positions are rounded up to this with fillers: CPU and GPU libraries make, and
# keep, a kernel for every new shape of a product, in milliseconds and up to megabytes each.
SHAPE_MULTIPLE = 64


def predicted_positions(labels: Tensor) -> Tensor:
    """Where labels [T] ask for something (those that are not -100), int64 [P], filled up with -1."""
    positions = (labels != -100).nonzero().squeeze(1)
    return F.pad(positions, (0, filled_up(len(positions)) - len(positions)), value=-1)


def filled_up(rows: int) -> int:
    """Round up to a multiple of SHAPE_MULTIPLE."""
    return -(-rows // SHAPE_MULTIPLE) * SHAPE_MULTIPLE


def sequences_of_packs(tokens: int, longest: int) -> int:
    """More sequences than packs of so many tokens usually have, none longer than `longest` tokens.

    UniRef90's proteins have 340 tokens on average: 65 at most in a pack of 16,384, 229 in one of 65,536 (8,000
    proteins, 5 epochs), where this gives 128 and 512.
    """
    return max(16, tokens // 128, 2 * tokens // longest)


def most_predicted(tokens: int, fraction: float) -> int:
    """More positions than are predicted of so many tokens, each with this probability: six standard deviations."""
    deviation = math.sqrt(tokens * fraction * (1 - fraction))
    return min(tokens, filled_up(math.ceil(tokens * fraction + 6 * deviation)))
