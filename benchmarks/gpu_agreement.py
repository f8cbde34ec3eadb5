"""Do they compute the same? Both backends, EsmForMaskedLM, FP8 and its emulation, from the same weights, on one GPU.

    NVIDIA_TF32_OVERRIDE=0 python -m benchmarks.gpu_agreement --output table.md         about a minute
    python -m benchmarks.gpu_agreement --device cpu --size tiny --tokens 512            tries the script itself

Each row compares one model with another on one batch: the loss, the logits and all gradients, as relative Euclidean
differences. fp32 comes first: what differs there is wrong, or the GELU. For FP8, three passes go before, in which
delayed scaling finds its scales. The table is written after every row; a row that fails costs itself only.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_models import SIZES, batches_for, build, check_choices, failure, gpu_name
from benchmarks.measuring import publish, say, where_measured
from common.cli import run
from common.data.collators import to_device
from common.distributed.world import World
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.config import HIDDEN_ACT, esm2_config

PASSES_BEFORE = 3


@dataclass
class Arguments(Flags):
    device: str = flag("cuda", "cuda or cpu.")
    size: str = flag("8M", f"Which: {', '.join(SIZES)}.")
    tokens: int = flag(4096, "In the batch.")
    output: str | None = flag(None, "Also write the table there.")

    def check(self) -> None:
        check_choices(self, self.device, size=SIZES)


class Model(NamedTuple):
    """A row's name, benchmarks.gpu_models' kind, the layers' GELU, and what it computes in."""

    name: str
    kind: str
    gelu: str = "tanh"
    bf16: bool = True
    fp8_recipe: str = "delayed"


PEER, PEER_BF16 = Model("EsmForMaskedLM, fp32", "peer", "exact", False), Model("EsmForMaskedLM, BF16", "peer", "exact")
TORCH, TORCH_TANH = Model("torch, fp32", "torch", "exact", False), Model("torch, tanh, fp32", "torch", bf16=False)
TORCH_BF16, COMPILED = Model("torch, tanh, BF16", "torch"), Model("torch, tanh, compiled, BF16", "torch-compiled")
TE, TE_BF16 = Model("TE, fp32", "te", bf16=False), Model("TE, BF16", "te")


def in_fp8(recipe: str) -> list[tuple[Model, Model]]:
    fp8 = Model(f"TE, FP8 {recipe}", "te-fp8", fp8_recipe=recipe)
    params = Model(f"TE, FP8 {recipe}, weights in FP8", "te-fp8-params", fp8_recipe=recipe)
    emulated = Model(f"emulated FP8 {recipe}", "emulated", fp8_recipe=recipe)
    return [(fp8, TE_BF16), (emulated, TORCH_BF16), (emulated, fp8), (params, fp8)]


PAIRS = [
    *((TORCH, PEER), (TE, TORCH_TANH), (TE, PEER)),
    *((TORCH_BF16, TORCH_TANH), (TE_BF16, TORCH_TANH), (TE_BF16, TORCH_BF16), (COMPILED, TORCH_BF16)),
    (PEER_BF16, PEER),
    *(pair for recipe in ("delayed", "current", "block") for pair in in_fp8(recipe)),
]


class Outcome(NamedTuple):
    loss: float  # nats a masked residue
    logits: Tensor  # [T, 33], fp32, on the CPU
    gradients: Tensor  # all of them end to end, fp32, on the CPU


def outcome(which: Model, args: Arguments) -> Outcome:
    device = torch.device(args.device)
    config = esm2_config(*SIZES[args.size])
    config.hidden_act = HIDDEN_ACT[which.gelu]
    model, precision = build(which.kind, config, args.device, which.fp8_recipe)
    emulation = precision.quantiser if which.kind == "emulated" else None
    (batch,) = batches_for("torch", args.tokens, 1)
    inputs = to_device(batch, device)
    masters = precision.masters
    if masters:  # a step that changes nothing makes the stored weights from them anew, by then with good scales
        still = torch.optim.SGD(masters.weights.parameters(), lr=0.0)
        masters.attach(still)
    passes = 1 + PASSES_BEFORE * ("fp8" in which.kind or emulation is not None)
    model.train()
    for number in range(passes):
        model.zero_grad()
        if emulation:
            emulation.begin_pack(number, 0)
        with torch.autocast(device.type, torch.bfloat16, enabled=which.bf16):
            loss = model(**inputs).loss_sum / batch["num_targets"]
        loss.backward()
        if emulation:
            emulation.end_step(World(0, 0, 1, device), False)
        if masters and number + 1 < passes:
            still.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    del inputs["labels"]
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=which.bf16):
        logits = model(**inputs).logits.float()
    flat = torch.cat([gradients[name].float().flatten().cpu() for name in sorted(gradients)])
    return Outcome(loss.item(), logits[: len(batch["input_ids"])].cpu(), flat)


def compare(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    def relative(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    return {
        "loss": abs(ours.loss / theirs.loss - 1),
        "logits": relative(ours.logits, theirs.logits),
        "gradients": relative(ours.gradients, theirs.gradients),
    }


def rows_of(pairs: list[tuple[Model, Model]], args: Arguments):
    """(row, the differences or why there are none), one after the other."""
    run_once: Callable[[Model], Outcome] = cache(lambda which: outcome(which, args))
    for pair in pairs:
        try:
            found = compare(*map(run_once, pair))
        except Exception as error:  # what is not here, or does not fit: the other rows count
            found = failure(error)
        yield pair, found


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
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
