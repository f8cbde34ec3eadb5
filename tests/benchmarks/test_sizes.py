"""docs/sizes.md: flags that make the paper's batches and that scripts know, figures that the code makes."""

from __future__ import annotations

import re

import pytest

from benchmarks.dry_run import parsed
from benchmarks.sizes import H100, PAGE, PLANS, SHOWN, Plan, checkpoints, of_one_node, of_plan
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh
from common.models.esm2.config import ESM2_SIZES

TEXT = PAGE.read_text()
TABLE = [row.split(" | ") for row in re.findall(r"^\| (\d+[MB] \| \d+ \| .*) \|$", TEXT, re.M)]
ROWS = {(row[0], int(row[1])): row for row in TABLE}  # by size and GPUs
RECIPES = {row[0]: row for row in (r.split(" | ") for r in re.findall(r"^\| (\d+[MB] \| `.*) \|$", TEXT, re.M))}


def row_of(plan: Plan) -> list[str]:
    return ROWS[plan.size, plan.gpus]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_page_has_rows_and_a_command_per_size():
    assert list(dict.fromkeys(plan.name for plan in PLANS)) == list(ESM2_SIZES)
    assert list(ROWS) == [(plan.size, plan.gpus) for plan in PLANS]
    assert list(RECIPES) == list(dict.fromkeys(plan.size for plan in PLANS))
    assert {gpus for _, gpus in ROWS} == {8, 32, 64, 256}
    shown = [plan for plan in PLANS if (plan.size, plan.gpus) in SHOWN]
    assert {plan.size for plan in shown} == set(RECIPES)
    assert all(plan.command in TEXT for plan in shown)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.size}-{plan.gpus}")
def test_plans_have_the_tokens_of_the_paper(plan):
    row = row_of(plan)
    args = parsed(plan.script, plan.gpus, plan.command.replace("\\\n", " ").partition(".py ")[2].split())
    packs = packs_per_step(args.data, Mesh(size=plan.gpus), args.pack_tokens).plain
    assert args.pack_tokens == number(row[2])
    assert packs == plan.gpus * int(row[3])
    assert packs * args.pack_tokens == plan.step_tokens == number(RECIPES[plan.size][2])
    tokens = plan.step_tokens
    assert tokens == pytest.approx(3.2e6 if plan.size == "15B" else 2e6, rel=0.05)
    assert args.optimizer.learning_rate == (1.6e-4 if plan.size == "15B" else 4e-4)
    assert (args.data.max_seq_length, args.data.mlm_probability, args.checkpoint.save_total_limit) == (1024, 0.15, 3)
    assert (float(row[4]) <= 80) == (row[5] != "does not fit")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_days_hours_and_energy_follow_from_the_speed(row):
    if row[5] == "does not fit":
        return
    tokens, steps = map(number, RECIPES[row[0]][2:4])
    hours = tokens * steps / number(row[5]) / 3600
    assert number(row[6]) == pytest.approx(hours / 24, abs=0.051)
    assert number(row[7]) == pytest.approx(hours * int(row[1]), abs=0.51)
    assert number(row[8]) == pytest.approx(hours * int(row[1]) * 700 / 1e6, abs=0.051)


def test_page_has_the_memory_disk_and_speed_of_the_code():
    (smallest, *_) = PLANS
    memory, step = of_plan(smallest)
    assert row_of(smallest)[4] == f"{memory:.0f}"
    assert number(row_of(smallest)[5]) == pytest.approx(step.step_tokens / step.seconds(H100), rel=1e-3)
    assert RECIPES["8M"][5] == f"{checkpoints(smallest):.1f}" == f"{12 * 7_512_353 * 4 / 1e9:.1f}"


def test_page_has_the_commands_of_the_readme():
    commands = [f"`{script}.py {' '.join(words)}`" for script, words in of_one_node()]
    assert len(commands) == 2
    assert all(command in TEXT for command in commands)
