"""Round the number of rows of a matmul up, so that few different shapes occur whatever a batch holds."""

from __future__ import annotations

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
    """So many rows and the fillers behind them."""
    return -(-rows // SHAPE_MULTIPLE) * SHAPE_MULTIPLE
