"""docs/sizes.md: flags that make the paper's batches and that scripts know, figures that the code makes."""

from __future__ import annotations

import re

import pytest

from benchmarks.dry_run import parsed
from benchmarks.sizes import PAGE, PLANS, Plan, checkpoints, memory, of_one_node
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh
from common.models.esm2.config import ESM2_SIZES

TEXT = PAGE.read_text()
TABLE = [row.split(" | ") for row in re.findall(r"^\| (\d+M .*|\d+B .*) \|$", TEXT, re.M)]
ROWS = {(row[0], int(row[2].split()[0])): row for row in TABLE}  # by size and GPUs


def row_of(plan: Plan) -> list[str]:
    return ROWS[plan.size, plan.gpus]


def test_page_has_a_row_and_a_command_per_size():
    assert list(dict.fromkeys(plan.name for plan in PLANS)) == list(ESM2_SIZES)
    assert list(ROWS) == [(plan.size, plan.gpus) for plan in PLANS]
    assert {("650M", 8), ("650M", 32)} < ROWS.keys()
    assert all(plan.command in TEXT for plan in PLANS)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.size}-{plan.gpus}")
def test_plans_have_the_tokens_of_the_paper(plan):
    args = parsed(plan.script, plan.gpus, plan.command.partition(".py ")[2].split())
    packs = packs_per_step(args.data, Mesh(size=plan.gpus), args.pack_tokens).plain
    assert packs == plan.gpus * int(row_of(plan)[4])
    assert packs * args.pack_tokens == plan.step_tokens == int(row_of(plan)[5].replace(",", ""))
    tokens = plan.step_tokens
    assert tokens == pytest.approx(3.2e6 if plan.size == "15B" else 2e6, rel=0.05)
    assert args.optimizer.learning_rate == (1.6e-4 if plan.size == "15B" else 4e-4)
    assert (args.data.max_seq_length, args.data.mlm_probability, args.checkpoint.save_total_limit) == (1024, 0.15, 3)
    assert float(row_of(plan)[7]) <= 75


def test_page_has_the_memory_and_disk_of_the_code():
    (smallest, *_) = PLANS
    assert row_of(smallest)[7] == f"{memory(smallest):.0f}"
    assert row_of(smallest)[8] == f"{checkpoints(smallest):.1f}" == f"{12 * 7_512_353 * 4 / 1e9:.1f}"


def test_page_has_the_commands_of_the_readme():
    commands = [f"`{script}.py {' '.join(words)}`" for script, words in of_one_node()]
    assert len(commands) == 2
    assert all(command in TEXT for command in commands)
