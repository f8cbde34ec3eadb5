"""Which parameters decay, and learning rates step by step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from common.cli import UserError
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.training.optim import annealing, build_adamw, lr_schedule, warmup_steps
from tests.training_fixtures import run_forked


def arguments(**changes) -> SimpleNamespace:
    settings = {
        "learning_rate": 4e-4,
        "lr_scheduler_type": "esm2",
        "warmup_steps": None,
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


@pytest.mark.parametrize(
    ("steps_taken", "of_peak"),
    [
        (1, 1 / 2000),
        (1000, 0.5),
        (2000, 1.0),  # the peak, after 2,000 steps of warm-up
        (2001, 1.0),  # and the decay starts
        (2001 + 224_000, 0.55),  # half-way between 2,000 and 450,000
        (450_001, 0.1),  # a tenth at 90 % of 500,000
        (500_000, 0.1),  # and constant from there
    ],
)
def test_esm2_schedule_is_the_papers(steps_taken, of_peak):
    lr = lr_schedule(arguments(), total_steps=500_000)
    assert lr(steps_taken - 1) == pytest.approx(4e-4 * of_peak, rel=1e-12)


def test_esm2_schedule_never_jumps():
    lr = lr_schedule(arguments(), total_steps=10_000)
    values = [lr(step) for step in range(10_000)]
    assert max(abs(a - b) for a, b in zip(values, values[1:], strict=False)) <= 4e-4 / 500 * 1.0001
    assert max(values) == 4e-4
    assert values.index(4e-4) == 499  # 5 % of a run that is too short for 2,000 steps
    assert values[-1] == pytest.approx(4e-5)


@pytest.mark.parametrize("total_steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [None, 0, 1, 5])
def test_esm2_schedule_of_very_short_runs(total_steps, warmup):
    lr = lr_schedule(arguments(warmup_steps=warmup), total_steps)
    assert all(0 < lr(step) <= 4e-4 for step in range(total_steps))


@pytest.mark.parametrize(
    "name",
    ["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_restarts"],
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_lr_schedule_equals_transformers_schedulers(name, warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=50)
    lr = lr_schedule(arguments(learning_rate=3e-4, lr_scheduler_type=name, warmup_steps=warmup), 50)
    for step in range(50):
        assert lr(step) == scheduler.get_last_lr()[0], step
        optimizer.step()
        scheduler.step()


def rates_of_annealing_lr(peak, low, warmup, end, steps):
    """AnnealingLR of the FSDP guides with decay_style cosine, as a loop over the steps that it has counted."""
    rates = []
    for counted in range(steps):
        kept = counted if counted < end - warmup else end - warmup
        if counted <= warmup != 0:
            rates.append(kept / warmup * peak)
        else:
            cosine = 0.5 + 0.5 * math.cos(math.pi * (kept - warmup) / end)
            rates.append(peak * cosine if peak * cosine > low else low)
    return rates


@pytest.mark.parametrize("warmup", [0, 0.0032, 0.01, 0.25, 0.6, 0.99, 1, 5, 16])
@pytest.mark.parametrize("low", [0.0, 1e-5, 3e-4])
def test_annealing_is_the_guides_schedule(warmup, low):
    flags = arguments(learning_rate=3e-4, lr_scheduler_type="annealing", warmup_steps=warmup)
    for total, end in ((1, None), (2, None), (7, None), (100, None), (100, 40), (100, 400), (5000, None)):
        of_end = warmup if warmup >= 1 else warmup * (end or total)
        rate = annealing(flags, total, low, end)
        if of_end >= (end or total):  # theirs would be 0 or negative
            assert [rate(step) for step in range(total)] == [3e-4 * step / of_end for step in range(total)]
            continue
        expected = rates_of_annealing_lr(3e-4, low, of_end, end or total, total)
        assert [rate(step) for step in range(total)] == pytest.approx(expected, rel=1e-9, abs=1e-15)
        if not low and end is None:
            assert [lr_schedule(flags, total)(step) for step in range(total)] == [rate(step) for step in range(total)]


def test_warmup_steps_are_steps_a_fraction_or_default():
    assert warmup_steps(arguments(warmup_steps=300), 10_000) == 300
    assert warmup_steps(arguments(warmup_steps=0.06), 1010) == 61  # rounded up, as transformers does
    assert warmup_steps(arguments(warmup_steps=0), 10_000) == 0
    assert warmup_steps(arguments(), 500_000) == 2000
    assert warmup_steps(arguments(), 1000) == 50


@pytest.mark.parametrize("name", ["lineer", "reduce_lr_on_plateau", "warmup_stable_decay", "greedy"])
def test_lr_schedule_refuses_unknown_names(name):
    with pytest.raises(UserError, match=f"--lr_scheduler_type {name}: choose esm2, linear, cosine"):
        lr_schedule(arguments(lr_scheduler_type=name), 100)


def test_lr_schedule_error_comes_before_overwriting_a_run(dataset, tmp_path):
    earlier = tmp_path / "metrics.jsonl"
    earlier.write_text('{"step": 1}\n')
    done = run_forked(dataset, tmp_path, lr_scheduler_type="lineer", overwrite_output_dir=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --lr_scheduler_type lineer: choose")
    assert done.stderr.count("\n") == 1
    assert earlier.exists()
