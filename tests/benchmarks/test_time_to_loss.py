"""benchmarks.time_to_loss: when a curve reaches a loss, which setting is chosen, what is run again, the table."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.dry_run import parsed
from benchmarks.loss_curves import Tuned, last_loss, table, tokens_to, tokens_to_stay, verdict
from benchmarks.recipes import CPU_PLANS, DECISIVE_PLANS
from benchmarks.time_to_loss import (
    Arguments,
    Run,
    listing,
    missing_runs,
    report,
    runs_of,
    tuned,
)
from common.cli import UserError
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh
from common.files.safe_files import read_json_lines
from common.flags import checked
from tests.forked import run_script
from tests.training_fixtures import TINY_OVERRIDES, environment
from tests.warm_python import python

TOKENS = np.linspace(100_000, 1_000_000, 10)


def curve_of(last: float, speed: float = 1.0) -> list[tuple[float, float]]:
    """It falls from about 3 to `last`."""
    losses = last + (3 - last) * (np.exp(-TOKENS * speed / 3e5) - np.exp(-TOKENS[-1] * speed / 3e5))
    return list(zip(TOKENS.tolist(), losses.tolist(), strict=True))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def mean_and_error(values) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


@pytest.fixture
def args(tmp_path):
    """The smallest plan, with two recipes."""
    flags = {"dataset_dir": "unused", "output_dir": str(tmp_path), "sizes": "1M", "only": "adamw,muon"}
    return checked(Arguments(**flags))


def finish(args: Arguments, each: Run, curve, dataset: str = "proteins") -> None:
    curve = [(tokens, loss, loss - 0.1) for tokens, loss in curve]  # of hidden residues, of all
    saved = {"name": each.name, "flags": each.flags, "dataset": dataset, "unigram": 2.9, "curve": curve}
    with args.runs.open("a") as file:
        file.write(json.dumps(saved) + "\n")


def finish_all(args: Arguments, curves) -> list[Run]:
    """Runs in the order in which they would be started; curves: (recipe, rate, warm-up, seed) -> curve."""
    started = []
    for each in missing_runs(args):
        started.append(each)
        finish(args, each, curves(each.recipe, each.rate, each.warmup, each.seed))
    return started


@pytest.mark.parametrize("loss", [2.95, 2.7, 2.6, 2.51])
def test_tokens_to_interpolates_between_evaluations(loss):
    curve = curve_of(2.5)
    tokens, losses = np.array(curve).T
    assert tokens_to(curve, loss) == pytest.approx(np.interp(-loss, -losses, tokens), rel=1e-12)


def test_tokens_to_takes_the_first_crossing():
    curve = [(100, 3.0), (200, 2.8), (300, 2.9), (400, 2.7)]
    assert tokens_to(curve, 2.8) == 200
    assert tokens_to(curve, 2.85) == pytest.approx(175)
    assert tokens_to(curve, 3.1) == 100
    assert tokens_to(curve, 2.6) is None
    assert tokens_to([(100, math.nan), (200, math.nan)], 2.6) is None


def test_tokens_to_stay_takes_the_last_crossing():
    curve = [(100, 3.0), (200, 2.8), (300, 2.9), (400, 2.7)]
    assert tokens_to_stay(curve, 2.8) == pytest.approx(350)
    assert tokens_to_stay(curve, 2.95) == pytest.approx(125)
    assert tokens_to_stay(curve, 3.1) == 100
    assert tokens_to_stay(curve, 2.6) is None
    assert tokens_to_stay([(100, 2.5), (200, math.nan)], 2.6) is None


def test_table_has_paired_ratios_and_their_errors():
    seeds, losses = (1, 2, 3), (2.7, 2.6, 2.2)
    base = Tuned(1e-3, 0.05, {seed: curve_of(2.5 + 0.01 * seed) for seed in seeds})
    other = Tuned(2e-3, 0.15, {seed: curve_of(2.4 + 0.02 * seed, 1.5) for seed in seeds})
    slow = Tuned(2e-3, 0.15, {1: curve_of(2.8)})
    recipes = {"adamw": base, "muon": other, "slow": slow}
    rows = {cells(line)[0]: cells(line) for line in table(recipes, losses)}
    assert rows["muon"][1:4] == ["0.002", "15%", "3"]

    def crossing(curve, loss: float) -> float:
        tokens, values = np.array(curve).T
        return float(np.interp(-loss, -values, tokens))

    def expect(cell: str, values) -> None:
        digits = len(cell.split(" ± ")[0].partition(".")[2])
        found = [float(number.replace(",", "")) for number in cell.split(" ± ")]
        assert found == pytest.approx(mean_and_error(values), abs=0.51 * 10.0**-digits)

    expect(rows["muon"][4], [last_loss(other.curves[seed]) for seed in seeds])
    expect(rows["muon"][5], [last_loss(other.curves[seed]) - last_loss(base.curves[seed]) for seed in seeds])
    own = [crossing(other.curves[seed], base.curves[seed][-1][1]) for seed in seeds]
    expect(rows["muon"][6], np.array(own) / 1000)
    expect(rows["muon"][7], np.array(own) / 1e6)
    for number, loss in enumerate(losses[:2]):
        pairs = [(crossing(other.curves[seed], loss), crossing(base.curves[seed], loss)) for seed in seeds]
        expect(rows["muon"][9 + 2 * number], [a / 1000 for a, _ in pairs])
        expect(rows["muon"][10 + 2 * number], [a / b for a, b in pairs])
    assert rows["muon"][8] == rows["muon"][7], "these curves only fall"
    assert rows["muon"][13:] == ["not reached (3 of 3)", ""]
    assert rows["slow"][6:9] == ["not reached (1 of 1)", "", ""]
    assert rows["adamw"][5] == ""
    assert rows["adamw"][7] == "1.00 ± 0.00"

    mean, error = mean_and_error(np.array(own) / 1e6)
    assert verdict(recipes, 0.65, 3).endswith(
        f"Best: muon, {mean:.2f} ± {error:.2f} to reach it: met; {mean:.2f} ± {error:.2f} to stay there."
    )
    assert ": not met;" in verdict(recipes, 0.1, 3)
    assert "No other recipe" in verdict({"adamw": base, "slow": slow}, 0.65, 3)


def test_runs_are_all_settings_then_the_best_on_other_seeds(args):
    last = {2.5e-4: 2.60, 5e-4: 2.55, 1e-3: 2.50, 2e-3: math.nan, 4e-3: math.nan}

    def curves(recipe, rate, warmup, seed):
        if math.isnan(last[rate]):
            return [(100, 3.0), (200, math.nan)]
        return curve_of(last[rate] - 0.02 * (warmup == 0.15) - 0.05 * (seed != 42))

    started = finish_all(args, curves)
    adamw = [each for each in started if each.recipe == "adamw"]
    rates = [rate for rate in last if rate < 4e-3]
    assert [(each.rate, each.warmup) for each in adamw[:8]] == [(rate, w) for w in (0.05, 0.15) for rate in rates]
    assert {each.seed for each in adamw[:8]} == {42}
    assert [(each.rate, each.warmup, each.seed) for each in adamw[8:]] == [(1e-3, 0.15, seed) for seed in (43, 44)]
    (plan,) = args.plans.values()
    best = tuned(args, "1M", plan, "adamw")
    assert (best.rate, best.warmup, sorted(best.curves)) == (1e-3, 0.15, [42, 43, 44])
    assert best.loss == pytest.approx(np.mean([2.48, 2.43, 2.43]))
    assert len(started) == 8 + 2 + 3 + 2
    assert not list(missing_runs(args))


def test_runs_are_made_again_where_a_flag_has_changed(args):
    finish_all(args, lambda recipe, rate, warmup, seed: curve_of(2.5 + rate))
    (plan,) = args.plans.values()
    changed = replace(plan, flags=plan.flags | {"max_seq_length": 128})
    assert all(each.curve(args) is None for each in runs_of(args, "1M", changed, "adamw"))
    assert all(each.curve(args) is not None for each in runs_of(args, "1M", plan, "adamw"))


def test_runs_of_chosen_seeds_only(args):
    assert not list(missing_runs(replace(args, seeds="43"))), "the first seed selects"
    started = finish_all(replace(args, seeds="42"), lambda *setting: curve_of(2.5))
    assert {each.seed for each in started} == {42}
    later = finish_all(replace(args, seeds="44"), lambda *setting: curve_of(2.5))
    assert {each.seed for each in later} == {44}
    assert len(later) == 2


def test_report_names_what_has_not_been_run(args, capsys):
    args = replace(args, only="adamw,muon,muon-mask25")
    finish_all(replace(args, only="adamw"), lambda *setting: curve_of(2.5))
    finish_all(replace(args, only="muon", seeds="42"), lambda *setting: curve_of(2.4))
    report(args)
    text = (args.directory / "time_to_loss.md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert "12 evaluations. The unigram predictor has 2.9000 nats.\n" in text
    left = [f"0.001-warmup0.15-seed{seed}" for seed in (43, 44)]
    assert f"Not run: muon ({', '.join(left)}), muon-mask25.\n" in text
    assert "Held-out proteins: drawn one by one.\n" in text
    dropped = runs_of(args, "1M", args.plans["1M"], "muon")[0].name
    lines = args.runs.read_text().splitlines(keepends=True)
    args.runs.write_text("".join(line for line in lines if dropped not in line))
    report(args)
    then = "0.001-warmup0.15-seed42, then the best on the other seeds"
    assert f"Not run: muon ({then}), muon-mask25.\n" in capsys.readouterr().out
    (args.directory / "train" / "clusters").mkdir(parents=True)
    report(replace(args, dataset_dir=str(args.directory)))
    assert "Held-out proteins: whole clusters.\n" in capsys.readouterr().out
    assert (args.directory / "time_to_loss.png").read_bytes().startswith(b"\x89PNG")


def test_report_refuses_runs_of_two_datasets(args):
    for number, each in enumerate(runs_of(args, "1M", args.plans["1M"], "adamw")):
        finish(args, each, curve_of(2.5), dataset=f"proteins {number % 2}")
    with pytest.raises(UserError, match="runs of different datasets"):
        report(args)


def test_plans_compare_what_they_promise():
    for plan in CPU_PLANS.values():
        adamw = plan.recipes["adamw"]
        assert len(adamw.rates) >= 4
        assert len(adamw.warmups) >= 2 or plan is CPU_PLANS["8M"]
        assert all(len(recipe.rates) >= 3 for recipe in plan.recipes.values()), "each at its own best rate"
        assert len(plan.seeds) >= 3
        assert plan.goal == 0.65
    assert all(plan.goal == 0.55 and len(plan.seeds) == 2 for plan in DECISIVE_PLANS.values())
    assert all(len(recipe.rates) == 3 for plan in DECISIVE_PLANS.values() for recipe in plan.recipes.values())


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("size", "tokens", "target"), [("8M-UniRef50", 0.09e9, 2.58), ("35M-UniRef50", 0.40e9, 2.49)])
def test_decisive_commands_are_of_train_ddp(size, tokens, target, ranks):
    args = checked(Arguments(decisive=True, list=True, ranks=ranks))
    plan = args.plans[size]
    assert target in plan.losses
    lines = [line for line in "".join(listing(args)).splitlines() if f" {size}-" in line]
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line)
        flags = parsed("train_ddp", ranks, words[words.index("train_ddp.py") + 1 :])
        packs = packs_per_step(flags.data, Mesh(size=ranks), flags.pack_tokens).plain
        assert packs * flags.pack_tokens == plan.tokens_per_step == 524_288
        assert flags.data.max_steps * 524_288 == pytest.approx(tokens, rel=0.005)
        assert flags.eval_steps * plan.evaluations == flags.data.max_steps
        assert (flags.data.max_seq_length, flags.data.mlm_probability, flags.precision.bf16) == (512, 0.15, True)
        assert flags.data.eval_mlm_probability == 0.15
        assert flags.model.config_name.endswith(f"_{size.partition('-')[0]}_UR50D")


def test_recipes_have_flags_of_train_ddp(args):
    plan = CPU_PLANS["1M"]
    for name, recipe in plan.recipes.items():
        each = Run("1M", plan, name, recipe.rates[0], recipe.warmups[0], 42)
        command = each.command(args)
        flags = parsed("train_ddp", 1, command[command.index("train_ddp.py") + 1 :])
        assert flags.optimizer.learning_rate == recipe.rates[0]
        assert flags.data.max_steps == 240
        assert ("benchmarks.candidates" in command) == (recipe.change is not None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sizes": "1M,2M"}, "--sizes 2M: choose of 1M,1M-long,8M"),
        ({"only": "adam"}, "--only adam: choose of adamw,"),
        ({"only": "normuon", "decisive": True}, "--only normuon: choose of adamw,muon"),
        ({"seeds": "a"}, "--seeds a: expected numbers such as 42,43"),
        ({"max_steps": 1}, "--max_steps 1: must be at least 2"),
    ],
)
def test_flags_that_are_wrong(flags, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        checked(Arguments(**{"dataset_dir": "x", "output_dir": "y"} | flags))


def test_runs_are_made_in_pieces(dataset, tmp_path):
    flags = ["--dataset_dir", dataset, "--output_dir", tmp_path, "--sizes", "1M", "--only", "adamw", "--max_steps", 2]
    flags += ["--config_overrides", TINY_OVERRIDES, "--max_runs"]
    how = {"env": environment(), "settings": {"sys.executable": python()}}
    for number in (1, 0):  # the second time only the table
        done = run_script("benchmarks.time_to_loss", *flags, number, **how)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("starting") == number
    (saved,) = read_json_lines(tmp_path / "runs.jsonl")
    curve = saved["curve"]
    assert len(curve) == 2
    assert 2048 < curve[1][0] <= 4096
    assert not (tmp_path / saved["name"]).exists(), "the run's own files stay"
    assert f"| adamw | 0.00025 | 5% | {curve[-1][1]:.4f} |" in done.stdout
    assert curve[-1][1] != curve[-1][2], "hidden residues, and all"
