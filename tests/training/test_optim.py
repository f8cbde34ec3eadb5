"""AdamW: which parameters decay, and a step by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.training.optim import build_adamw


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
