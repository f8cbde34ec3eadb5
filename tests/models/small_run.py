"""A small model's loss and gradients, in a process of its own: python -m tests.models.small_run PACK OUTPUT."""

from __future__ import annotations

import platform
import sys

import torch

from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.cpu import BF16_MATMULS


def loss_and_gradients(pack: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = build_model(esm2_config(layers=2, hidden_size=64, heads=4), seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(**pack).loss_sum
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def main() -> None:
    """Of both precisions, where the libraries are told that there are no bf16 instructions."""
    if platform.machine() == "x86_64":
        assert not BF16_MATMULS
    pack = torch.load(sys.argv[1])
    torch.save([loss_and_gradients(pack, dtype) for dtype in (torch.float32, torch.bfloat16)], sys.argv[2])


if __name__ == "__main__":
    main()
