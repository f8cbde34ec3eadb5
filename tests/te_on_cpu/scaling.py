"""Delayed scaling's update (Transformer Engine's recipe/delayed_scaling.cu): histories move on, scales follow."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tests.precision.format_reference import LARGEST, f32
from tests.te_on_cpu.casts import FP8

__all__ = ["fused_amax_and_scale_update_after_reduction"]


def fused_amax_and_scale_update_after_reduction(
    amax: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype, margin: float
) -> None:
    """amax [N]: of all tensors of all histories [L, n] in order, after the all-reduce. In place.

    A tensor that was not seen (0) leaves its history as it is, the last number in row 0 counts; its scale stays.
    """
    largest, at = f32(FP8[int(dtype)][0][-1] * 2.0**-margin), 0
    for history, scale in zip(histories, scales, strict=True):
        for column in range(history.shape[1]):
            rows = history[:, column].clone()
            last = amax[at].item() or rows[0].item()
            at += 1
            top = 0.0
            if last:
                rows[:-1] = rows[1:].clone()
                rows[-1] = last
                rows[0] = 0
                history[:, column] = rows
                top = max(last, *(value for value in rows.tolist() if not np.isnan(value)))
            if algorithm == "most_recent":
                top = last
            if 0 < top < float("inf"):
                scale[column] = float(min(largest / f32(top), LARGEST))
