"""Flags for each size of ESM-2, as it was trained, with what they need: memory, disk, and time by the step's model.

    python -m benchmarks.sizes          makes the tables of docs/sizes.md anew

Batches, rates and steps are the paper's (supplement of Lin et al. 2023), in configs/sizes/, which the job scripts use.
Memory is what --dry_run says, checkpoints are 12 bytes a parameter, speed is that of benchmarks/step_model.py: an
estimate.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

from benchmarks.dry_run import parsed, predicted
from benchmarks.measuring import ROOT, where_measured
from benchmarks.step_model import COMPILED, DEVICES, Step, step_of
from common.checkpoint.checkpointer import CheckpointFlags
from common.cli import UserError, run
from common.flags import Flags, flag, flat, parse_arguments, read_file_of_flags
from common.models.esm2.config import ESM2_SIZES
from common.training.arguments import DryRunFlags
from extras.preflight.node import bytes_needed, named_model

GIB = 2**30
PAGE = ROOT / "docs" / "sizes.md"
RESERVE = DryRunFlags.device_reserve  # GiB that --dry_run leaves to what it does not count
DDP, FSDP2 = "train_ddp", "train_fsdp2"
MEETING = "--rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500 --rdzv_id=NAME"


def size_file(name: str) -> str:
    """The file of flags of a model on the Hub, as the job scripts find it."""
    return f"configs/sizes/{name.rpartition('/')[2]}.yaml"


@dataclass(frozen=True)
class Plan:
    """flags: those of its file; also: those that not all sizes have. perplexity: published, after all steps."""

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
        }
        if str(self.flags["learning_rate"]) == "4e-4":
            usual.add("learning_rate")
        return {name: value for name, value in self.flags.items() if name not in usual}

    @property
    def tokens_per_pack(self) -> int:
        return self.flags["per_device_train_batch_size"] * self.flags["max_seq_length"]

    @property
    def accumulation(self) -> int:
        return round(self.flags["tokens_per_step"] / (self.gpus * self.tokens_per_pack))

    @property
    def steps(self) -> int:
        return self.flags["max_steps"]

    @property
    def step_tokens(self) -> int:
        return self.gpus * self.tokens_per_pack * self.accumulation

    @property
    def nodes(self) -> int:
        return -(-self.gpus // 8)

    @property
    def command(self) -> str:
        """The same on every node."""
        places = {"dataset_dir": "data/processed/arrow", "output_dir": f"out-{self.size}"}
        flags = " ".join(f"--{name} {value}" for name, value in places.items())
        nodes = f"--nnodes={self.nodes} {MEETING} " * (self.nodes > 1)
        return f"python -m extras.launch {nodes}--nproc_per_node=8 {self.script}.py {size_file(self.name)} {flags}"

    @property
    def step(self) -> Step:
        """Of one GPU, as the step's model counts it. Rounding ahead is for replicas only."""
        return step_of(self.size, self.tokens_per_pack, COMPILED, self.accumulation, self.script == DDP)

    @property
    def seconds(self) -> float:
        """A step, by the model, with communication fully overlapped."""
        once, h100 = self.step, DEVICES[0]
        if self.flags.get("activation_checkpointing") != "full":
            return once.seconds(h100)
        again = replace(once, phases=[once.layer[0] * (ESM2_SIZES[self.name][0] * self.accumulation)])
        return once.seconds(h100) + again.seconds(h100)

    @property
    def days(self) -> float:
        return self.steps * self.seconds / 86400

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


PLANS = [
    Plan.read("8M", DDP, 8, 10.26),
    Plan.read("35M", DDP, 8),
    Plan.read("150M", DDP, 8),
    Plan.read("650M", DDP, 8, 7.14),
    Plan.read("650M", DDP, 32, 7.14),
    Plan.read("3B", FSDP2, 128, 6.42),
    Plan.read("15B", FSDP2, 256),
]


@dataclass
class Arguments(Flags):
    page: str = flag(str(PAGE), "The page to put the tables into, between its comments.")


def memory(plan: Plan) -> float:
    """GiB of a GPU, with what --dry_run adds for what it does not count."""
    return predicted(plan.script, plan.gpus, [str(ROOT / size_file(plan.name))]) / GIB + RESERVE


def checkpoints(plan: Plan) -> float:
    """GB of those that are kept, and the one that is being written."""
    return bytes_needed(named_model(plan.name), CheckpointFlags.save_total_limit) / 1e9


def plans_table() -> Iterator[str]:
    yield "| model | script | GPUs | tokens of a pack | accumulation | tokens a step | also "
    yield "| memory of a GPU, GiB | checkpoints, GB | tokens/s | days | held-out loss |\n"
    yield "|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|\n"
    for plan in PLANS:
        flags = " ".join(f"`--{name} {value}`" for name, value in plan.also.items())
        nodes = f" ({plan.nodes} nodes)" if plan.nodes > 1 else ""
        rate = plan.step_tokens / plan.seconds
        yield f"| {plan.size} | `{plan.script}.py` | {plan.gpus}{nodes} | {plan.tokens_per_pack:,} "
        yield f"| {plan.accumulation} | {plan.step_tokens:,} | {flags} | {memory(plan):.0f} "
        yield f"| {checkpoints(plan):,.1f} | {rate:,.0f} "
        yield f"| {plan.days:.1f} | {plan.loss} |\n"


def of_one_node() -> list[tuple[str, list[str]]]:
    """The README's training commands for 8 GPUs: (script, its words)."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^python -m extras\.launch --nproc_per_node=8 (\w+)\.py (.*)$", text, re.M)
    return [(script, words.split()) for script, words in found]


def one_node_table() -> Iterator[str]:
    yield "| command | memory of a GPU, GiB | checkpoints, GB | days | held-out loss |\n|---|--:|--:|--:|--:|\n"
    for script, flags in of_one_node():
        args, needed = parsed(script, 8, flags), predicted(script, 8, flags) / GIB + RESERVE
        plan = next((plan for plan in PLANS if plan.name == flat(args).get("config_name")), None)
        yield f"| `{script}.py {' '.join(flags)}` | {needed:.0f} | "
        if plan is None:
            yield " | | |\n"
            continue
        pack = args.data.tokens_per_pack
        own = {"per_device_train_batch_size": pack // args.data.max_seq_length, "max_steps": args.data.max_steps}
        own |= {"tokens_per_step": 8 * pack * args.data.gradient_accumulation_steps}
        plan = replace(plan, gpus=8, flags=plan.flags | own)
        yield f"{checkpoints(plan):,.1f} | {plan.days:.1f} | {plan.loss} |\n"


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
    commands = "\n".join(["```sh", *(plan.command for plan in PLANS), "```"])
    where = "\n\n".join(where_measured("benchmarks.sizes", "torch"))
    for name, part in (
        ("plans", "".join(plans_table())),
        ("commands", commands),
        ("one node", "".join(one_node_table())),
        ("where", where),
    ):
        text = put(text, name, part)
    Path(args.page).write_text(text)


if __name__ == "__main__":
    run(main)
