"""What a run of some minutes can be on a machine: chosen once, from a few timed steps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.data.token_store import open_split
from common.distributed.world import World
from common.flags import checked, with_flags
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.plan.quickstart_tuning import TuningArguments, choose, evaluated_tokens, step_seconds
from tests.forked import run_script
from tests.training_fixtures import DEFAULTS, MAX_SEQ_LENGTH, TINY_MODEL, environment, flags_of, rows


def arguments(dataset, **flags) -> TuningArguments:
    given = {"dataset_dir": str(dataset), "output_dir": "unused"} | TINY_MODEL | DEFAULTS | flags
    return checked(with_flags(TuningArguments(), **given))


@pytest.mark.parametrize(
    ("seconds", "evaluated", "chosen"),
    [
        ({"fp32": 1.0, "bf16": 0.5}, 0, ("bf16", 200, 1)),
        ({"fp32": 0.5, "bf16": 1.0}, 0, ("fp32", 200, 1)),
        ({"fp32": 0.5, "bf16": 0.48}, 0, ("fp32", 200, 1)),  # not worth its rounding
        ({"fp32": 0.5}, 0, ("fp32", 200, 1)),
        ({"bf16": 10.0}, 0, ("bf16", 10, 1)),  # too slow to time another
        ({"fp32": 0.5}, 60 * 512, ("fp32", 180, 1)),  # forward passes of 60 packs: 20 steps
        ({"fp32": 0.5}, 800 * 512, ("fp32", 133, 1 / 4)),  # 133 s, of which a third of the 100 are left
        ({"fp32": 9.0}, 0, ("fp32", 11, 1)),
        ({"fp32": 90.0}, 0, ("fp32", 8, 1)),
        ({"fp32": 0.01}, 0, ("fp32", 240, 1)),
    ],
)
def test_choose_precision_and_steps_that_fit(dataset, seconds, evaluated, chosen):
    args = arguments(dataset, tokens_per_pack=512, seconds=100)
    precision, steps, fraction, in_all = choose(args, seconds, evaluated)
    assert (precision, steps, fraction) == (*chosen[:2], pytest.approx(chosen[2]))
    assert in_all == pytest.approx(seconds[precision] * (steps + fraction * evaluated / (3 * 512)))


def test_evaluated_tokens_count_every_evaluation(dataset):
    def tokens(split: str, first: int) -> int:
        store = open_split(str(dataset), split, ESM2_TOKENS, first)
        return int(np.minimum(store.lengths(np.arange(len(store))), MAX_SEQ_LENGTH).sum())

    alone = World(0, 0, 1, torch.device("cpu"))
    assert evaluated_tokens(arguments(dataset), alone) == (0, 0)
    args = arguments(dataset, do_eval=True, eval_on_start=True, eval_steps=0.334, max_eval_samples=10)
    assert evaluated_tokens(args, alone) == (5 * tokens("validation", 10) + tokens("test", 10), 10)


def test_step_seconds_leave_out_a_slow_first_step(dataset, monkeypatch):
    clock = iter([0.0, 20.0, 20.0, 21.5, 21.5, 23.0])
    monkeypatch.setattr("extras.plan.quickstart_tuning.time", SimpleNamespace(perf_counter=clock.__next__))
    args = arguments(dataset, tokens_per_pack=512, max_steps=3)
    assert step_seconds(args, World(0, 0, 1, torch.device("cpu"))) == 1.5


def test_quickstart_tuning_writes_flags_of_train_ddp(dataset, tmp_path):
    flags = flags_of(dataset, tmp_path / "out", do_eval=True, max_eval_samples=10, max_steps=None, learning_rate=3e-3)
    own = ("--flags_file", tmp_path / "run.json", "--seconds", 1, "--least_steps", 2, "--most_steps", 3)
    done = run_script("extras.plan.quickstart_tuning", *flags, *own, env=environment())
    assert done.returncode == 0, done.stderr
    chosen = json.loads((tmp_path / "run.json").read_text())
    precision = "bf16" if chosen["bf16"] else "fp32"
    assert f"So: {precision}, {chosen['max_steps']} steps, about" in done.stderr
    assert 2 <= chosen["max_steps"] <= 3
    assert not {"seconds", "least_steps", "flags_file"} & chosen.keys()
    assert not (tmp_path / "out").exists(), "a run has begun"
    done = run_script("train_ddp.py", tmp_path / "run.json", env=environment())
    assert done.returncode == 0, done.stderr
    history = rows(tmp_path / "out")
    assert [row["step"] for row in history] == list(range(1, chosen["max_steps"] + 1))
    assert history[0]["learning_rate"] == pytest.approx(3e-3)
