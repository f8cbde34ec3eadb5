"""--dry_run's days, energy and price: arithmetic by hand, measured speeds, and no figure where none is known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.gpu_models import SIZES
from benchmarks.step_model import MEASURED as ROWS
from common.cli import UserError
from common.flags import flat
from common.models.esm2.config import esm2_config, load_config
from common.training.command_line import parse_run
from extras.plan.dry_run.memory_estimate import fake_run
from extras.plan.dry_run.time_estimate import COVERED, GPUS, MEASURED, StepPlan, step_plan, time_lines
from extras.plan.step_model.communication import Network, ddp, fsdp, hsdp
from extras.plan.step_model.model import BF16, EAGER, Shape, step_of
from extras.speed.muon import StepCost
from tests.conftest import ROOT
from tests.data_fixtures import load_script
from tests.decoder_fixtures import decoder_flags, write_text
from tests.extras.plan.dry_run.test_dry_run import script_and_arguments
from tests.forked import run_script

FSDP, DDP = "train_fsdp2.py", "train_ddp.py"
ESM2 = ["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=num_hidden_layers=1", "--max_seq_length=256"]
SMALL = Shape.of(load_config("facebook/esm2_t6_8M_UR50D"))
H100 = GPUS["H100"]


def number(text: str, what: str) -> float:
    return float(re.search(rf"([\d.,]+)  {what}", text)[1].replace(",", ""))


def test_days_energy_and_price_follow_from_the_printed_speed(tmp_path):
    flags = [*ESM2, "--bf16", "--tokens_per_pack=4096", "--tokens_per_step=131072", "--max_steps=200000000"]
    flags += ["--dry_run", "--world_size=16", "--price_per_gpu_hour=2.5", f"--output_dir={tmp_path / 'out'}"]
    done = run_script(DDP, *flags)
    assert done.returncode == 0, done.stderr
    hours = 131072 * 200_000_000 / number(done.stdout, "tokens/s") / 3600
    assert number(done.stdout, "days for 200,000,000 steps") == pytest.approx(hours / 24, rel=1e-3)
    assert number(done.stdout, "GPU-hours") == pytest.approx(16 * hours, rel=1e-4)
    assert number(done.stdout, "kWh at most: 700 W") == pytest.approx(16 * hours * 0.7, rel=1e-4)
    assert number(done.stdout, "price, at 2.5 a GPU-hour") == pytest.approx(2.5 * 16 * hours, rel=1e-4)
    assert "Modelled, not measured. " in done.stdout
    assert "1.41 x with 8M's layers (1.05 x for its own code)" in done.stdout
    assert "Several GPUs were never measured." in done.stdout


def test_speed_is_near_every_measured_row_and_the_error_is_the_printed_one():
    """The code that was measured rounded weights in each pack and added up in the layer."""
    for size, tokens, mode, found in ROWS:
        if mode == EAGER:
            continue
        shape = Shape.of(esm2_config(*SIZES[size]))
        step = step_of(shape, tokens, mode, rounded_ahead=False, added_up=True)
        ratio = step.tokens / step.seconds(H100) / found
        now = StepPlan(shape, tokens, 1, 1024)
        ratios = now.step_tokens / now.seconds(H100) / found, ratio
        assert ratios == pytest.approx(MEASURED[shape.hidden][1:], abs=0.006), size


@pytest.mark.parametrize(("ranks", "shards", "packs"), [(1, 1, 2), (16, 1, 1), (16, 16, 3), (16, 8, 3)])
def test_seconds_are_compute_and_the_communication_that_it_does_not_hide(ranks, shards, packs):
    net, options = Network(inside=0.8 * 450e9), {"rounded_ahead": shards == 1}
    alone = step_of(SMALL, 4096, BF16, packs, **options).seconds(H100)
    times = step_of(SMALL, 4096, BF16, 1, **options).times(H100)
    strategy = {1: ddp, ranks: fsdp}.get(shards, hsdp) if ranks > 1 else ddp
    plan = StepPlan(SMALL, 4096, packs, 1024, BF16, ranks, shards)
    exposed = plan.seconds(H100) - alone
    # Gradients are exchanged in the last pack only, weights gathered in each.
    once = strategy(times, ranks, net)
    assert exposed == pytest.approx(once) if shards == 1 else once < exposed < packs * once


def test_recomputed_layers_and_muon_take_more_time():
    plan = StepPlan(SMALL, 4096, 2, 1024)
    muon = replace(plan, muon=StepCost(989e12 * 0.71, 0, 0))  # a second of matmuls
    assert muon.seconds(H100) - plan.seconds(H100) == pytest.approx(1)
    again = replace(plan, recomputed=True).seconds(H100) / plan.seconds(H100)
    assert 1.15 < again < 1.4  # a forward pass is a third of a pass


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        (DDP, ["--use_cpu"], "does not cover use_cpu: True"),
        (DDP, [], "does not cover bf16: False"),
        (DDP, ["--bf16", "--sequence_packing=False"], "of packs without padding"),
        (
            FSDP,
            ["--bf16", "--activation_checkpointing=selective"],
            "activation_checkpointing: selective",
        ),
        (FSDP, ["--bf16", "--sharding_strategy=hybrid", "--hsdp_shard_size=2"], "does not cover hsdp_shard_size: 2"),
        (DDP, ["--bf16", "--model_type=amplify", "--config_name=chandar-lab/AMPLIFY_120M"], "of ESM-2, and not of "),
    ],
)
def test_no_figure_where_the_model_knows_none(script, flags, said):
    module, args = script_and_arguments(script, [*ESM2, "--dry_run", "--world_size=16", "--max_steps=9", *flags])
    with fake_run(args, module.build) as run:
        plan = step_plan(args, run)
    (line,) = time_lines(args.dry_run, 9, plan)
    assert line.startswith("No time, energy or price: ")
    assert said in line


def test_no_figure_for_a_decoder(tmp_path):
    argv = decoder_flags(write_text(tmp_path / "text"), tmp_path / "out")
    module, args = script_and_arguments(FSDP, [*argv, "--dry_run", "--world_size=2"])
    with fake_run(args, module.build) as run:
        assert "the step model is of ESM-2" in step_plan(args, run)


def test_covered_flags_are_flags():
    """Of some train script each: a renamed flag must not be covered by chance."""
    known = set()
    for script, name in ((DDP, "DdpFlags"), (FSDP, "FsdpFlags")):
        known |= set(flat(parse_run("", getattr(load_script(script), name), [*ESM2, "--dry_run"])))
    assert set(COVERED) <= known


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dry_run", "--price_per_gpu_hour=-1"], "--price_per_gpu_hour -1.0: must be at least 0"),
        (["--dry_run", "--price_per_gpu_hour=nan"], "--price_per_gpu_hour"),
        (["--price_per_gpu_hour=2"], "missing: --dry_run"),
        (["--gpu=H200"], "missing: --dry_run"),
        (["--dry_run", "--gpu=h100"], "--gpu"),
    ],
)
def test_bad_prices_and_flags_without_a_dry_run_are_refused(flags, said):
    with pytest.raises(UserError, match=said):
        script_and_arguments(DDP, [*ESM2, "--dataset_dir=x", "--output_dir=y", *flags])


def test_page_has_the_errors():
    page = (ROOT / "docs" / "dry_run.md").read_text()
    assert all(f"| {name} | {now:.2f} | {then:.2f} |" in page for name, now, then in MEASURED.values())
