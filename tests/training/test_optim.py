"""AdamW: which parameters decay, and a step by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.training.optim import OptimizerFlags, build_adamw, build_optimizer, update_unless


def arguments(**changes) -> SimpleNamespace:
    settings = {
        "learning_rate": 4e-4,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-8,
    }
    return SimpleNamespace(**settings | changes)


def test_weight_decay_skips_biases_and_norms():
    model = build_model(esm2_config(2, 64, 4), seed=0)
    optimizer = build_adamw(model.parameters(), arguments(weight_decay=0.03))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == set(names.values())
    in_a_layer = ("layernorm_qkv.weight", "proj.weight", "fc1_weight", "fc2_weight")
    decaying = {
        name
        for n in range(2)
        for name in decay
        if name.startswith(f"encoder.layers.{n}.") and name.endswith(in_a_layer)
    } | {"embeddings.word_embeddings.weight", "lm_head.dense.weight"}
    assert len(decaying) == 2 * 4 + 2
    assert decay == {name: 0.03 if name in decaying else 0.0 for name in decay}
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.9, 0.98), 1e-8, 4e-4)


def test_adamw_step_equals_hand_computation():
    """First step of AdamW (Loshchilov & Hutter, algorithm 2): p - lr (g / (|g| + eps) + decay p)."""
    model = build_model(esm2_config(1, 64, 4), seed=0)
    optimizer = build_adamw(model.parameters(), arguments(weight_decay=0.1, learning_rate=1e-2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, p in model.named_parameters():
        decay = 0.1 if p.dim() > 1 else 0.0
        expected = before[name] - 1e-2 * (p.grad / (p.grad.abs() + 1e-8) + decay * before[name])
        # An update of 1e-2 in fp32 beside weights around 1: a few units of rounding (6e-8 each).
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_update_unless_leaves_every_bit_of_a_skipped_step(optim):
    """Beside an optimiser that is not called in the skipped steps, of which one is the first."""
    flags, world = OptimizerFlags(optim=optim, learning_rate=1e-2), World(0, 0, 1, torch.device("cpu"))
    results = []
    for calls_always in (True, False):
        model = build_model(esm2_config(1, 32, 4), seed=0)
        optimizer = build_optimizer(model, model.hidden_matrices(), flags, Strategy(model), world, False)
        generator = torch.Generator().manual_seed(0)
        for skipped in (True, False, True, False):
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient * math.nan if skipped else gradient
            if calls_always:
                update_unless(optimizer, torch.tensor(float(skipped)))
            elif not skipped:
                optimizer.step()
        results.append([[p, *optimizer.state[p].values()] for p in model.parameters()])
    for ours, expected in zip(*results, strict=True):
        assert len(ours) == len(expected) > 1
        assert all(
            torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))
            for a, b in zip(ours, expected, strict=True)
        )
