"""docs/sizes.md: flags that make the paper's batches and that scripts know, figures that the code makes."""

from __future__ import annotations

import re

import pytest

from benchmarks.dry_run import parsed
from benchmarks.sizes import PAGE, PLANS, checkpoints, memory, of_one_node
from common.models.esm2.config import ESM2_SIZES

TEXT = PAGE.read_text()
ROWS = {row.split(" | ")[0]: row.split(" | ") for row in re.findall(r"^\| (\d+M .*|\d+B .*) \|$", TEXT, re.M)}


def test_page_has_a_row_and_a_command_per_size():
    assert [plan.name for plan in PLANS] == list(ESM2_SIZES)
    assert list(ROWS) == [plan.size for plan in PLANS]
    assert all(plan.command in TEXT for plan in PLANS)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.size)
def test_plans_have_the_tokens_of_the_paper(plan):
    args = parsed(plan.script, plan.gpus, plan.command.partition(".py ")[2].split())
    tokens = plan.gpus * args.data.gradient_accumulation_steps * args.pack_tokens
    assert tokens == plan.step_tokens == int(ROWS[plan.size][5].replace(",", ""))
    assert tokens == pytest.approx(3.2e6 if plan.size == "15B" else 2e6, rel=0.05)
    assert args.optimizer.learning_rate == (1.6e-4 if plan.size == "15B" else 4e-4)
    assert (args.data.max_seq_length, args.data.mlm_probability, args.checkpoint.save_total_limit) == (1024, 0.15, 3)
    assert float(ROWS[plan.size][7]) <= 75


def test_page_has_the_memory_and_disk_of_the_code():
    (smallest, *_) = PLANS
    assert ROWS["8M"][7] == f"{memory(smallest):.0f}"
    assert ROWS["8M"][8] == f"{checkpoints(smallest):.1f}" == f"{12 * 7_512_353 * 4 / 1e9:.1f}"


def test_page_has_the_commands_of_the_readme():
    commands = [f"`{script}.py {' '.join(words)}`" for script, words in of_one_node()]
    assert len(commands) == 3
    assert all(command in TEXT for command in commands)
