"""Shapes of the kernels: those of every published size are taken, and what no kernel takes is refused."""

from __future__ import annotations

import pytest
import torch

from common.models.esm2.config import ESM2_SIZES, esm2_config
from extras.formats.nvfp4 import NVFP4BlockScaling
from extras.formats.recipe import fp8_formats
from tests.te_on_cpu.contracts import Refused, check_cast, check_operand

KINDS = {
    "delayed": ("Float8Quantizer", "Float8TensorStorage"),
    "current": ("Float8CurrentScalingQuantizer", "Float8TensorStorage"),
    "block": ("Float8BlockQuantizer", "Float8BlockwiseQTensorStorage"),
    "mxfp8": ("MXFP8Quantizer", "MXFP8TensorStorage"),
    "nvfp4": ("NVFP4Quantizer", "NVFP4TensorStorage"),
}
RECIPES = {name: kind for name, kind in fp8_formats().items() if kind.te_class} | {"nvfp4": NVFP4BlockScaling}


@pytest.mark.parametrize("recipe", RECIPES)
def test_contracts_accept_the_matmuls_of_all_sizes(recipe):
    """Tokens: the least that a pack is filled up to."""
    assert KINDS.keys() == RECIPES.keys()
    quantizer, storage = KINDS[recipe]
    assert len(ESM2_SIZES) == 6
    for size in ESM2_SIZES.values():
        config, tokens = esm2_config(*size), RECIPES[recipe].multiple
        hidden, inner = config.hidden_size, config.intermediate_size
        for wide, narrow in ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)):
            weight, x, grad = (wide, narrow), (tokens, narrow), (tokens, wide)
            for shape in (weight, x, grad):
                check_cast(quantizer, shape, torch.bfloat16, transform=True)
            for shape, along in ((x, 1), (weight, 1), (grad, 1), (weight, 0), (grad, 0), (x, 0)):
                check_operand(storage, shape, along)


def test_contracts_refuse_other_shapes():
    for storage, shape, along in (
        ("Float8TensorStorage", (12, 64), 1),
        ("Float8BlockwiseQTensorStorage", (16, 72), 1),
        ("MXFP8TensorStorage", (48, 64), 1),
        ("NVFP4TensorStorage", (48, 64), 0),
        ("NVFP4TensorStorage", (60, 64), 1),
    ):
        with pytest.raises(Refused, match="multiples of"):
            check_operand(storage, shape, along)
    with pytest.raises(Refused, match="MXFP8 casts take multiples of 32, not \\(16, 64\\)"):
        check_cast("MXFP8Quantizer", (16, 64), torch.bfloat16)
    with pytest.raises(Refused, match="NVFP4 casts"):
        check_cast("NVFP4Quantizer", (24, 64), torch.bfloat16)
    with pytest.raises(Refused, match="Hadamard transform takes bf16, not torch.float32"):
        check_cast("NVFP4Quantizer", (32, 64), torch.float32, transform=True)
