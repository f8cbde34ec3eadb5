"""The last sum of a layer is made by the next one: with the same numbers, and less to read and write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.models.esm2.config import esm2_config
from common.models.esm2.layers_torch import TransformerLayer, prepare
from common.models.layers.initialise import initialise
from common.models.layers.recompute import save_activations
from common.models.layers.residual import Stream, begin, total

T, HIDDEN = 24, 32


def layers() -> torch.nn.ModuleList:
    made = torch.nn.ModuleList(TransformerLayer(esm2_config(2, HIDDEN, 4)) for _ in range(2))
    initialise(made, 1, 0.1)
    return made


def run(layers, x: Tensor, added_up: bool) -> list[Tensor]:
    bounds = torch.tensor([0, 10, T], dtype=torch.int32)
    rotary, longest = prepare(T, bounds, 14, HIDDEN // 4)
    stream = x if added_up else begin(x)
    for layer in layers:
        stream = layer(stream, rotary, bounds, longest)
        if added_up:
            stream = total(stream)
    result = total(stream)
    result.float().square().sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_residual_sum_order_changes_no_bit(residual, recomputed):
    results = []
    for added_up in (False, True):
        made = layers()
        save_activations(list(made), recomputed)
        x = torch.randn(T, HIDDEN, generator=torch.Generator().manual_seed(2)).to(residual).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            results.append(run(made, x, added_up))
    assert results[0][0].dtype == residual
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputed_layer_saves_one_tensor():
    """The sum, and not both that it is of."""
    made = layers()
    save_activations(list(made), "full")
    bounds = torch.tensor([0, T], dtype=torch.int32)
    rotary, longest = prepare(T, bounds, T, HIDDEN // 4)
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (T, HIDDEN):
            kept.append(tensor)
        return tensor

    x = torch.randn(T, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = made[0](Stream(x, torch.randn(T, HIDDEN, requires_grad=True)), rotary, bounds, longest)
    assert isinstance(result, Stream)
    assert len(kept) == 1
