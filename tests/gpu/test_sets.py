"""Block-causal attention over sets on a GPU: by halving, in bf16 by flash attention's own kernels.

No GPU has run this yet (docs/hardware.md).
"""

from __future__ import annotations

import pytest
import torch

from extras.families.sets.layout import SetLayout
from tests.extras.families.sets.cases import PACKS, attended, definition, inputs_of, layout_of
from tests.gpu.test_training import relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
ROUNDING = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # 2^-8 a step, and a few steps; without TF32


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_attention_equals_dense_mask(pack, dtype, compiled):
    on_host = layout_of(PACKS[pack])
    qkv, grad, cos, sin = inputs_of(len(on_host.numbers), dtype)
    expected = attended(lambda x: definition(x, cos.double(), sin.double(), PACKS[pack]), qkv.double(), grad.double())
    layout, tables = SetLayout(on_host.table, torch.device("cuda")), (cos.cuda(), sin.cuda())
    assert torch.equal(layout.positions.cpu(), on_host.positions)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return layout.attention(x, *tables)

    found = attended(torch.compile(attend) if compiled else attend, qkv.cuda(), grad.cuda())
    for ours, exact in zip(found, expected, strict=True):
        assert relative(ours, exact) <= ROUNDING[dtype]
