"""Flags for each size of ESM-2, as it was trained, with what they need: memory, disk, and time by the step's model.

    python -m benchmarks.sizes          makes the tables of docs/sizes.md anew

Batches, rates and steps are the paper's (supplement of Lin et al. 2023), in configs/sizes/, which the job scripts use.
Memory, tokens a second, days and energy are what --dry_run says, an estimate; checkpoints are 12 bytes a parameter.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path

from benchmarks.dry_run import parsed
from benchmarks.measuring import ROOT, where_measured
from common.checkpoint.checkpointer import CheckpointFlags
from common.cli import UserError, run
from common.flags import Flags, flag, flat, parse_arguments, read_file_of_flags
from common.models.esm2.config import ESM2_SIZES
from common.training.arguments import DryRunFlags
from extras.plan.dry_run.memory_estimate import fake_run
from extras.plan.dry_run.time_estimate import GPUS, StepPlan, step_plan
from extras.preflight.node import bytes_needed, named_model

GIB = 2**30
PAGE = ROOT / "docs" / "sizes.md"
RESERVE = DryRunFlags.device_reserve  # GiB that --dry_run leaves to what it does not count
DDP, FSDP2 = "train_ddp", "train_fsdp2"
MEETING = "--rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500"
NODE, MEMORY, H100 = 8, 80, GPUS["H100"]  # GPUs of a node, GiB of each


def size_file(name: str) -> str:
    """The file of flags of a model on the Hub, as the job scripts find it."""
    return f"configs/sizes/{name.rpartition('/')[2]}.yaml"


@dataclass(frozen=True)
class Plan:
    """flags: those of its file; perplexity: published, after all steps."""

    size: str
    script: str
    gpus: int
    flags: dict
    perplexity: float | None = None  # of held-out UniRef50

    @classmethod
    def read(cls, size: str, script: str, gpus: int, perplexity: float | None = None) -> Plan:
        name = next(name for name in ESM2_SIZES if f"_{size}_" in name)
        return cls(size, script, gpus, read_file_of_flags(str(ROOT / size_file(name))), perplexity)

    @property
    def name(self) -> str:
        return self.flags["config_name"]

    @property
    def also(self) -> dict:
        usual = {
            "config_name",
            "bf16",
            "max_seq_length",
            "per_device_train_batch_size",
            "tokens_per_step",
            "max_steps",
            "sample_clusters",
        }
        if str(self.flags["learning_rate"]) == "4e-4":
            usual.add("learning_rate")
        return {name: value for name, value in self.flags.items() if name not in usual}

    @property
    def sequences(self) -> int:
        """Of --max_seq_length in a pack: those of the file, or fewer where the GPUs' packs would exceed a step."""
        return min(
            self.flags["per_device_train_batch_size"],
            self.flags["tokens_per_step"] // (self.gpus * self.flags["max_seq_length"]),
        )

    @property
    def tokens_per_pack(self) -> int:
        return self.sequences * self.flags["max_seq_length"]

    @property
    def accumulation(self) -> int:
        return round(self.flags["tokens_per_step"] / (self.gpus * self.tokens_per_pack))

    @property
    def step_tokens(self) -> int:
        return self.gpus * self.tokens_per_pack * self.accumulation

    @property
    def steps(self) -> int:
        return self.flags["max_steps"]

    @property
    def words(self) -> list[str]:
        """Of its command, behind the script."""
        smaller = self.sequences < self.flags["per_device_train_batch_size"]
        return [size_file(self.name), *[f"--per_device_train_batch_size={self.sequences}"] * smaller]

    @property
    def command(self) -> str:
        """The same on every node."""
        places = [f"--dataset_dir=data/processed/arrow --output_dir=out-{self.size}"]
        nodes = [f"--nnodes={self.gpus // NODE} --rdzv_id=NAME", MEETING] if self.gpus > NODE else []
        launch = [f"python -m extras.launch --nproc_per_node={NODE}", *nodes]
        return " \\\n    ".join([*launch, " ".join([f"{self.script}.py", *self.words]), *places])

    @property
    def loss(self) -> str:
        """The published one, or between those of the next sizes that have one."""
        if self.perplexity:
            return f"{log(self.perplexity):.2f}"
        sizes = list(dict.fromkeys(plan.size for plan in PLANS))
        known = {plan.size: log(plan.perplexity) for plan in PLANS if plan.perplexity}
        here = sizes.index(self.size)
        smaller = next(known[size] for size in reversed(sizes[:here]) if size in known)
        larger = [known[size] for size in sizes[here:] if size in known]
        return f"{larger[0]:.2f} to {smaller:.2f}" if larger else f"below {smaller:.2f}"


RECIPES = [("8M", DDP, 10.26), ("35M", DDP, None), ("150M", DDP, None), ("650M", DDP, 7.14)]
RECIPES += [("3B", FSDP2, 6.42), ("15B", FSDP2, None)]
PLANS = [Plan.read(size, script, gpus, found) for size, script, found in RECIPES for gpus in (8, 32, 64, 256)]
SHOWN = {("8M", 8), ("35M", 8), ("150M", 8), ("650M", 8), ("650M", 32), ("3B", 64), ("15B", 256)}  # commands


@dataclass
class Arguments(Flags):
    page: str = flag(str(PAGE), "The page to put the tables into, between its comments.")


@cache
def estimated(script: str, gpus: int, words: tuple[str, ...]) -> tuple[float, StepPlan | str]:
    """(GiB of a GPU, with what --dry_run adds for what it does not count, the plan of a step) of a run."""
    args = parsed(script, gpus, [*words, f"--device_memory={MEMORY}"])
    with fake_run(args, importlib.import_module(script).build) as run:
        return run.step(args.pack_tokens).peak / GIB + RESERVE, step_plan(args, run)


def of_plan(plan: Plan) -> tuple[float, StepPlan]:
    file, *rest = plan.words
    memory, step = estimated(plan.script, plan.gpus, (str(ROOT / file), *rest))
    assert isinstance(step, StepPlan), step
    return memory, step


def checkpoints(plan: Plan) -> float:
    """GB of those that are kept, and the one that is being written."""
    return bytes_needed(named_model(plan.name), CheckpointFlags.save_total_limit) / 1e9


def recipes_table() -> Iterator[str]:
    yield "| model | script | tokens a step | steps | also | checkpoints, GB | held-out loss |\n"
    yield "|---|---|--:|--:|---|--:|--:|\n"
    for plan in PLANS:
        if plan.gpus == PLANS[0].gpus:
            flags = " ".join(f"`--{name} {value}`" for name, value in plan.also.items())
            yield f"| {plan.size} | `{plan.script}.py` | {plan.flags['tokens_per_step']:,} | {plan.steps:,} | {flags} "
            yield f"| {checkpoints(plan):,.1f} | {plan.loss} |\n"


def gpus_table() -> Iterator[str]:
    yield "| model | GPUs | pack | accumulation | GiB of a GPU | tokens/s | days | GPU-hours | MWh |\n"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    for plan in PLANS:
        memory, step = of_plan(plan)
        seconds = step.seconds(H100)
        hours = plan.steps * seconds / 3600
        yield f"| {plan.size} | {plan.gpus} | {plan.tokens_per_pack:,} | {plan.accumulation} | {memory:.0f} "
        if memory > MEMORY:
            yield "| does not fit | | | |\n"
            continue
        yield f"| {plan.step_tokens / seconds:,.0f} | {hours / 24:.1f} | {plan.gpus * hours:,.0f} "
        yield f"| {plan.gpus * hours * H100.watts / 1e6:,.1f} |\n"


def of_one_node() -> list[tuple[str, list[str]]]:
    """The README's training commands for 8 GPUs: (script, its words)."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^python -m extras\.launch --nproc_per_node=8 (\w+)\.py (.*)$", text, re.M)
    return [(script, words.split()) for script, words in found]


def one_node_table() -> Iterator[str]:
    yield "| command | memory of a GPU, GiB | checkpoints, GB | days | held-out loss |\n|---|--:|--:|--:|--:|\n"
    for script, flags in of_one_node():
        args, (needed, step) = parsed(script, 8, flags), estimated(script, 8, tuple(flags))
        plan = next((plan for plan in PLANS if plan.name == flat(args).get("config_name")), None)
        yield f"| `{script}.py {' '.join(flags)}` | {needed:.0f} | "
        if plan is None or isinstance(step, str):
            yield " | | |\n"
            continue
        days = args.data.max_steps * step.seconds(H100) / 86400
        yield f"{checkpoints(plan):,.1f} | {days:.1f} | {plan.loss} |\n"


def put(page: str, name: str, text: str) -> str:
    """The page with this text between the comments of that name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise UserError(f"{PAGE}: lacks the comments {begin.strip()} and {end}")
    head, _, rest = page.partition(begin)
    return head + begin + text.strip() + "\n" + end + rest.partition(end)[2]


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    text = Path(args.page).read_text()
    shown = [plan for plan in PLANS if (plan.size, plan.gpus) in SHOWN]
    commands = "\n".join(["```sh", *(plan.command for plan in shown), "```"])
    where = "\n\n".join(where_measured("benchmarks.sizes", "torch"))
    for name, part in (
        ("recipes", "".join(recipes_table())),
        ("GPUs", "".join(gpus_table())),
        ("commands", commands),
        ("one node", "".join(one_node_table())),
        ("where", where),
    ):
        text = put(text, name, part)
    Path(args.page).write_text(text)


if __name__ == "__main__":
    run(main)
