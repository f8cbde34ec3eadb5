"""Transformer Engine's layers recorded as CUDA graphs (--cuda_graphs) beside the same layers, not recorded."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from common.data.collators import FillingCollator
from common.distributed.strategy import ReplicaFlags, replicate
from common.distributed.world import World
from common.models.esm2.alphabet import PAD
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.residual import Model
from tests.gpu.test_te import CONFIG, SMALL, TANH, te_like
from tests.gpu.test_te_decoders import model_of
from tests.gpu.test_training import on_gpu, relative
from tests.models.reference import packed, random_batch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]
TOKENS, SEQUENCES, LONGEST = 192, 8, 96
STEPS = ([[96, 50, 30], [40, 17, 65, 1, 60]], [[90, 80], [3, 5, 7]])  # lengths, of two packs each
OTHER_SHAPE = [[96, 50, 30], [96, 90, 70]]  # the second pack is longer than what is recorded


def batch_of(lengths: list[int], seed: int = 0) -> dict:
    batch = packed(random_batch(lengths, seed=seed))
    return on_gpu(FillingCollator(lambda *_: batch, TOKENS, SEQUENCES, LONGEST, 64, PAD)(None, None))


def loss_of(model: Model, batch: dict) -> torch.Tensor:
    taken = batch if hasattr(model, "encoder") else {k: v for k, v in batch.items() if k != "predicted"}
    with torch.autocast("cuda", torch.bfloat16):
        return model(**taken).loss_sum


@pytest.mark.parametrize("family", ["esm", "llama"])
def test_recorded_layers_equal_eager_ones(family):
    """Losses and gradients of accumulated packs whose boundaries differ, before and after a step of the optimiser."""
    from extras.speed.te_graphs import record_layers

    def fresh() -> Model:
        if family == "llama":
            return model_of("llama3_1_8b", "te")
        return te_like(build_model(esm2_config(*CONFIG, **TANH), 0, "cuda"))

    models, world = (fresh(), fresh()), World(0, 0, 1, torch.device("cuda"))
    record_layers(models[1], batch_of([1]), loss_of)
    flags = ReplicaFlags(), ReplicaFlags(cuda_graphs=True)
    strategies = [replicate(model, world, of) for model, of in zip(models, flags, strict=True)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for packs in (*STEPS, OTHER_SHAPE):
        found = []
        for strategy, optimizer in zip(strategies, optimizers, strict=True):
            tensors = {}
            for number, lengths in enumerate(packs):
                tensors[f"loss {number}"] = loss_of(strategy.model, batch_of(lengths, seed=number))
                tensors[f"loss {number}"].backward()
            tensors |= {name: p.grad.clone() for name, p in strategy.model.named_parameters()}
            strategy.clip(1.0)
            optimizer.step()
            strategy.clear_gradients()
            strategy.model.eval()
            with torch.no_grad():
                tensors["evaluation"] = loss_of(strategy.model, batch_of([20, 30]))
            strategy.model.train()
            found.append(tensors)
        for name, expected in found[0].items():
            if SMALL:  # on a GPU, kernels of backward passes add in any order
                assert torch.equal(found[1][name], expected), (packs, name)
            else:
                assert relative(found[1][name], expected) < 0.01, (packs, name)
    if SMALL:
        from tests.te_on_cpu.graphs import CUDAGraph

        used = [graph for graph in CUDAGraph.made if graph.captures]
        layers = len(models[1].layers)
        assert [(graph.captures, graph.replays) for graph in used[-2 * layers :]] == [(1, 5)] * 2 * layers
