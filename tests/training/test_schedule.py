"""Learning rates step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    TrainingArguments,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_scheduler,
    get_wsd_schedule,
)

from common.cli import UserError
from common.flags import checked
from common.training.schedule import ScheduleFlags, warmup_steps
from extras.families.decoders.causal_arguments import DecayFlags
from tests.training_fixtures import run_forked


def arguments(**changes) -> ScheduleFlags:
    return ScheduleFlags(**changes).resolve()


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
    lr = arguments().schedule(500_000)
    assert lr(steps_taken - 1) == pytest.approx(4e-4 * of_peak, rel=1e-12)


def test_esm2_schedule_never_jumps():
    lr = arguments().schedule(10_000)
    values = [lr(step) for step in range(10_000)]
    assert max(abs(a - b) for a, b in zip(values, values[1:], strict=False)) <= 4e-4 / 500 * 1.0001
    assert max(values) == 4e-4
    assert values.index(4e-4) == 499  # 5 % of a run that is too short for 2,000 steps
    assert values[-1] == pytest.approx(4e-5)


@pytest.mark.parametrize("total_steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [None, 0, 1, 5])
def test_esm2_schedule_of_very_short_runs(total_steps, warmup):
    lr = arguments(warmup_steps=warmup).schedule(total_steps)
    assert all(0 < lr(step) <= 4e-4 for step in range(total_steps))


@pytest.mark.parametrize(
    "name",
    ["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_restarts"],
)
@pytest.mark.parametrize("steps", [1, 2, 50, 333])
@pytest.mark.parametrize("warmup", [0, 1, 7, 60, 0.06, 0.9])
def test_lr_schedule_equals_transformers_schedulers(name, warmup, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    flags = arguments(learning_rate=3e-4, lr_scheduler_type=name, warmup_steps=warmup)
    in_steps = TrainingArguments("", warmup_steps=warmup).get_warmup_steps(steps)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=in_steps, num_training_steps=steps)
    assert isinstance(scheduler, LambdaLR)
    lr = flags.schedule(steps)
    assert [lr(step) for step in range(steps)] == [3e-4 * scheduler.lr_lambdas[0](step) for step in range(steps)]


def factors_of(schedule, steps: int, warmup: int, **settings) -> list[float]:
    """transformers' own, as fractions of the peak."""
    scratch = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    factor = schedule(scratch, num_warmup_steps=warmup, num_training_steps=steps, **settings).lr_lambdas[0]
    return [factor(step) for step in range(steps)]


def rates(steps: int, **flags) -> list[float]:
    return list(map(arguments(learning_rate=1.0, **flags).schedule(steps), range(steps)))


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", ["cosine", "cosine_with_min_lr"])
def test_cosine_with_floor_equals_transformers(name, floor, warmup):
    found = rates(50, lr_scheduler_type=name, warmup_steps=warmup, min_lr_rate=floor)
    assert found == factors_of(get_cosine_with_min_lr_schedule_with_warmup, 50, warmup, min_lr_rate=floor)


@pytest.mark.parametrize(
    ("step", "of_peak"),
    [(0, 0.0), (500, 0.5), (1000, 1.0), (225_750, 0.6953535), (450_500, 0.3475), (675_250, 0.1428356), (900_000, 0.1)],
)
def test_cosine_linear_schedule_is_amplifys(step, of_peak):
    """Worked out by hand at the quarters of the 899,000 steps after the warm-up: 0.1 + 0.9 x (1 + cos) / 2 x (1 - 0.9
    of the way). A cosine alone has 0.55 half-way."""
    flags = arguments(learning_rate=1e-3, lr_scheduler_type="cosine_linear", warmup_steps=1000, min_lr_rate=0.1)
    assert flags.schedule(900_000)(step) == pytest.approx(1e-3 * of_peak, rel=1e-6)


def test_cosine_with_restarts_equals_transformers():
    found = rates(50, lr_scheduler_type="cosine_with_restarts", warmup_steps=7)
    assert found == pytest.approx(factors_of(get_cosine_with_hard_restarts_schedule_with_warmup, 50, 7), rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("floor", [None, 0.0, 0.1])
@pytest.mark.parametrize(("given", "decay"), [(None, 10), (0.3, 15), (1, 1), (20, 20)])
def test_wsd_equals_transformers(given, decay, floor, warmup):
    for name in ("wsd", "warmup_stable_decay"):
        found = rates(50, lr_scheduler_type=name, warmup_steps=warmup, lr_decay_steps=given, min_lr_rate=floor)
        expected = factors_of(
            get_wsd_schedule, 50, warmup, num_decay_steps=decay, decay_type="linear", min_lr_ratio=floor or 0
        )
        assert found[warmup:] == pytest.approx(expected[warmup:], rel=1e-12, abs=1e-15)
        if not floor:  # theirs rises from the floor, ours from 0
            assert found[:warmup] == pytest.approx(expected[:warmup], rel=1e-12)


@pytest.mark.parametrize("total_steps", [1, 2, 10, 100, 1000])
@pytest.mark.parametrize("floor", [None, 0.0, 0.25, 1.0])
@pytest.mark.parametrize("name", ["esm2", "linear", "cosine", "cosine_linear", "wsd"])
def test_schedule_rises_stays_and_falls_to_the_floor(name, floor, total_steps):
    found = rates(total_steps, lr_scheduler_type=name, min_lr_rate=floor)
    warmup = warmup_steps(arguments(), total_steps)
    lowest = floor if floor is not None else 0.1 if name == "esm2" else 0.0
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert max(found) == 1.0
    assert min(falling) >= lowest - 1e-12
    if total_steps == 1000:
        assert found[-1] == pytest.approx(lowest, abs=0.006)  # a step before the end: linear's and wsd's last steps
    if total_steps == 1000 and name == "wsd" and lowest < 1:
        assert sum(rate == 1.0 for rate in found) == 1000 - warmup - 200 + 1


@pytest.mark.parametrize("total_steps", [1, 5, 20])
@pytest.mark.parametrize("warmup", [0, 4, 30])
@pytest.mark.parametrize("decay", [0.5, 1, 100])
def test_wsd_of_very_short_runs(total_steps, warmup, decay):
    """The decay takes what the warm-up leaves."""
    found = rates(total_steps, lr_scheduler_type="wsd", warmup_steps=warmup, lr_decay_steps=decay, min_lr_rate=0.1)
    assert all(0 <= rate <= 1 for rate in found)
    assert found[:warmup] == [step / warmup for step in range(min(warmup, total_steps))]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"min_lr_rate": 1.5}, "--min_lr_rate 1.5: a fraction of the peak, 0 to 1"),
        ({"min_lr_rate": math.nan}, "--min_lr_rate nan: a fraction"),
        (
            {"min_lr_rate": 0.1, "lr_scheduler_type": "constant"},
            "--min_lr_rate 0.1: goes with --lr_scheduler_type esm2",
        ),
        ({"min_lr_rate": 0.1, "lr_scheduler_type": "annealing"}, "--min_lr_rate 0.1: goes with"),
        (
            {"lr_decay_steps": 0.1, "lr_scheduler_type": "cosine"},
            "--lr_decay_steps 0.1: goes with --lr_scheduler_type wsd, not cosine: drop one",
        ),
        ({"lr_decay_steps": 0, "lr_scheduler_type": "wsd"}, "--lr_decay_steps 0: must be above 0"),
        ({"lr_decay_steps": math.nan, "lr_scheduler_type": "wsd"}, "--lr_decay_steps nan: must be above 0"),
        (
            {"learning_rate": 1e-7, "lr_scheduler_type": "polynomial"},
            "--learning_rate 1e-07: --lr_scheduler_type polynomial falls to 1e-07: give a higher one",
        ),
        ({"warmup_steps": -1}, "--warmup_steps -1: must be a number that is not negative"),
    ],
)
def test_schedule_flags_refuse_nonsense(flags, message):
    with pytest.raises(UserError, match=message):
        arguments(**flags).check()


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
    flags = {"learning_rate": 3e-4, "lr_scheduler_type": "annealing", "warmup_steps": warmup}
    for total, end in ((1, None), (2, None), (7, None), (100, None), (100, 40), (100, 400), (5000, None)):
        of_end = warmup if warmup >= 1 else warmup * (end or total)
        rate = DecayFlags(**flags, min_lr=low, lr_decay_iters=end).schedule(total)
        if of_end >= (end or total):  # theirs would be 0 or negative
            assert [rate(step) for step in range(total)] == [3e-4 * step / of_end for step in range(total)]
            continue
        expected = rates_of_annealing_lr(3e-4, low, of_end, end or total, total)
        assert [rate(step) for step in range(total)] == pytest.approx(expected, rel=1e-9, abs=1e-15)
        if not low and end is None:
            of_encoders = arguments(**flags).schedule(total)
            assert [of_encoders(step) for step in range(total)] == [rate(step) for step in range(total)]


def test_warmup_steps_are_steps_a_fraction_or_default():
    assert warmup_steps(arguments(warmup_steps=300), 10_000) == 300
    assert warmup_steps(arguments(warmup_steps=0.06), 1010) == 61  # rounded up, as transformers does
    assert warmup_steps(arguments(warmup_steps=0), 10_000) == 0


def test_default_warmup_has_a_floor():
    of_run = {1: 0, 6: 0, 7: 1, 30: 4, 250: 37, 666: 99, 667: 100, 1000: 100, 2000: 100}
    of_run |= {2020: 101, 10_000: 500, 40_000: 2000, 500_000: 2000}  # from 2,000 steps on ESM-2's own
    assert {total: warmup_steps(arguments(), total) for total in of_run} == of_run


@pytest.mark.parametrize("name", ["lineer", "reduce_lr_on_plateau", "greedy"])
def test_lr_schedule_refuses_unknown_names(name):
    said = f"--lr_scheduler_type {name}: choose esm2, linear, cosine, cosine_linear, wsd"
    with pytest.raises(UserError, match=said):
        checked(arguments(lr_scheduler_type=name))


def test_lr_schedule_error_comes_before_overwriting_a_run(dataset, tmp_path):
    earlier = tmp_path / "metrics.jsonl"
    earlier.write_text('{"step": 1}\n')
    done = run_forked(dataset, tmp_path, lr_scheduler_type="lineer", overwrite_output_dir=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --lr_scheduler_type lineer: choose")
    assert done.stderr.count("\n") == 1
    assert earlier.exists()
