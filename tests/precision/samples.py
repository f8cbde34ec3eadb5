"""Tensors that casts are held against their definitions with."""

from __future__ import annotations

import torch


def samples(shape: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 tensors, the last ones awkward."""
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    outlier = normal.clone()
    outlier[0, 1] = 3e7
    zeros_within = normal.clone()
    zeros_within[: shape[0] // 2] = 0
    spread = normal * torch.exp2(torch.linspace(-40, 40, normal.numel()).view(shape))
    return {
        "normal": normal,
        "bf16": normal.bfloat16().float(),
        "outlier": outlier,
        "spread": spread,
        "zeros": torch.zeros(shape),
        "zeros within": zeros_within,
        "all equal": torch.full(shape, -0.37),
        "largest of E4M3": torch.full(shape, 448.0),
        "tiny": normal * 1e-30,
        "subnormal": normal * 1e-40,
        "huge": (normal * 1e37).clamp(-3e38, 3e38),
    }
