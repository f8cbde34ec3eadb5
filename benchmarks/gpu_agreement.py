"""Do they compute the same? Both backends, EsmForMaskedLM, FP8 and its emulation, from the same weights, on one GPU.

    NVIDIA_TF32_OVERRIDE=0 python -m benchmarks.gpu_agreement --output table.md         about a minute
    python -m benchmarks.gpu_agreement --device cpu --size tiny --tokens 1024           tries the script itself

Each row compares the step of train_ddp.py with one set of flags to that with another, on one pack: the loss, the
logits and all gradients that the optimiser gets, as relative Euclidean differences. fp32 comes first: what differs
there is wrong, or the GELU. For FP8, three steps at learning rate 0 go before, in which delayed scaling finds its
scales. The table is written after every row; a row that fails costs itself only.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu_models import MAX_LENGTH, SIZES, check_choices, failure, gpu_name
from benchmarks.measuring import publish, say, where_measured, words
from common.cli import run
from common.data.collators import to_device
from common.distributed.process_group import ProcessFlags, distributed_run
from common.distributed.world import World
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.config import esm2_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.backend import te_missing
from common.training.command_line import parse_run
from common.training.resume import ResumePlan
from common.training.set_up import set_up
from train_ddp import DdpFlags, build

STEPS_BEFORE = 3


@dataclass
class Arguments(Flags):
    device: str = flag("cuda", "cuda or cpu.")
    size: str = flag("8M", f"Which: {', '.join(SIZES)}.")
    tokens: int = flag(4096, "In the pack.")
    output: str | None = flag(None, "Also write the table there.")

    def check(self) -> None:
        check_choices(self, self.device, size=SIZES)
        self.require_at_least(MAX_LENGTH, "tokens")


@dataclass(frozen=True)
class Side:
    """Of a row: its name, and flags of train_ddp.py."""

    name: str
    flags: dict[str, object] = field(hash=False, compare=False)

    def __add__(self, other: Side) -> Side:
        return Side(f"{self.name}, {other.name}", self.flags | other.flags)


BF16, TANH = Side("BF16", {"bf16": True, "bf16_residual": False}), Side("tanh", {"gelu": "tanh"})
PEER, TORCH = Side("EsmForMaskedLM", {"backend": "hf"}), Side("torch", {"backend": "torch", "torch_compile": False})
COMPILED = Side("compiled", {"torch_compile": True})
TE = Side("TE", {"backend": "te"})
TORCH_BF16, TE_BF16 = TORCH + TANH + BF16, TE + BF16


def in_fp8(recipe: str) -> list[tuple[Side, Side]]:
    fp8 = Side(f"FP8 {recipe}", BF16.flags | {"fp8": True, "fp8_recipe": recipe})
    te, emulated = TE + fp8, TORCH + TANH + fp8 + Side("emulated", {"emulate_precision": True})
    params = te + Side("weights in FP8", {"fp8_params": True})
    return [(te, TE_BF16), (emulated, TORCH_BF16), (emulated, te), (params, te)]


PAIRS = [
    *((TORCH, PEER), (TE, TORCH + TANH), (TE, PEER)),
    *((TORCH_BF16, TORCH + TANH), (TE_BF16, TORCH + TANH), (TE_BF16, TORCH_BF16)),
    *((TORCH_BF16 + COMPILED, TORCH_BF16), (PEER + BF16, PEER)),
    (TORCH_BF16 + Side("--bf16_residual", {"bf16_residual": True}), TORCH_BF16),
    *(pair for recipe in ("delayed", "current", "block") for pair in in_fp8(recipe)),
]


class Outcome(NamedTuple):
    loss: float  # nats a masked residue
    logits: Tensor  # [T, 33], fp32, on the CPU
    gradients: Tensor  # all of them end to end, fp32, on the CPU


def outcome(side: Side, args: Arguments, world: World, place: Path) -> Outcome:
    """Of a step of this side, on the weights at `place`."""
    flags: dict[str, Any] = {"model_name_or_path": place / "weights", "dataset": "sample", "output_dir": place}
    flags |= {"max_steps": 1, "tokens_per_pack": args.tokens, "dataloader_num_workers": 0, "max_grad_norm": 0}
    flags |= {"disable_tqdm": True} | side.flags | ({"use_cpu": True} if args.device == "cpu" else {})
    if flags["backend"] == "te" and not te_missing(world.device):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()  # it would keep the scales of earlier models
    torch.compiler.reset()
    with ExitStack() as stack:
        run = set_up(parse_run("", DdpFlags, words(flags)), build, world, ResumePlan(), None, stack)
        task, model = run.task, run.built.model
        with closing(iter(task.steps(run.plan.packs_per_step, 0, run.state.position, 1, 1))) as steps:
            batches = next(steps).micro_batches
        run.strategy.model.train()
        seen: dict[str, Tensor] = {}

        def keep(*_) -> None:
            for name, weight in run.built.weights.named_parameters():
                if weight.grad is not None:
                    seen[name] = weight.grad.float().flatten().cpu()

        run.stepper.optimizer.register_step_pre_hook(keep)
        for number in range(1 + STEPS_BEFORE * bool(flags.get("fp8"))):
            result = run.stepper.step(number, 0.0, batches, task.counts(batches))
        inputs = to_device(batches[0], world.device)
        del inputs["labels"]
        with torch.no_grad(), torch.autocast(world.device.type, torch.bfloat16, enabled=bool(flags.get("bf16"))):
            logits = model(**inputs).logits.float()
    return Outcome(
        result.loss, logits[: len(batches[0]["input_ids"])].cpu(), torch.cat([seen[name] for name in sorted(seen)])
    )


@torch.no_grad()
def write_weights(size: str, place: Path) -> None:
    """Random numbers everywhere, in biases and norms too, so that a swapped tensor shows."""
    config = esm2_config(*SIZES[size])
    model: nn.Module = Esm2ForMaskedLM(config)
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        parameter.normal_(centre, 0.02, generator=torch.Generator().manual_seed(number))
    ADAPTER.save(ADAPTER.to_hf(model.get_parameter, config), config, place)


def compare(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    def relative(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    return {
        "loss": abs(ours.loss / theirs.loss - 1),
        "logits": relative(ours.logits, theirs.logits),
        "gradients": relative(ours.gradients, theirs.gradients),
    }


def rows_of(
    pairs: list[tuple[Side, Side]], args: Arguments
) -> Iterator[tuple[tuple[Side, Side], dict[str, float] | str]]:
    """(row, the differences or why there are none), one after the other."""
    with (
        tempfile.TemporaryDirectory() as place,
        distributed_run(ProcessFlags(use_cpu=args.device == "cpu")) as world,
    ):
        write_weights(args.size, Path(place, "weights"))
        run_once: Callable[[Side], Outcome] = cache(lambda side: outcome(side, args, world, Path(place)))
        for pair in pairs:
            try:
                found = compare(*map(run_once, pair))
            except Exception as error:  # what is not here, or does not fit: the other rows count
                found = failure(error)
            yield pair, found


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    logging.disable(logging.INFO)  # of each side's run
    where, command = where_measured("benchmarks.gpu_agreement", "torch", "transformers")
    lines = [f"{gpu_name(args.device)}; {where}; {args.size}, {args.tokens} tokens", "", command, ""]
    lines += ["| model | against | loss | logits | gradients |", "|---|---|--:|--:|--:|"]
    for (ours, theirs), found in rows_of(PAIRS, args):
        cells = [found, "", ""] if isinstance(found, str) else [f"{value:.1e}" for value in found.values()]
        lines.append(f"| {ours.name} | {theirs.name} | {' | '.join(cells)} |")
        say(lines[-1])
        if args.output:
            Path(args.output).write_text("\n".join(lines) + "\n")
    publish("\n".join(lines), args.output)


if __name__ == "__main__":
    run(main)
