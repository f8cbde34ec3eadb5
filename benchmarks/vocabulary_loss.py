"""Memory of the loss over a large vocabulary: logits in parts, beside all of them at once.

    python -m benchmarks.vocabulary_loss [--tokens 2048] [--output table.md]

A forward and backward pass of the LM head and its loss in a fresh process; the table has the peak of resident memory
beyond that of the inputs.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os
from dataclasses import dataclass

from benchmarks.measuring import measured_afresh, where_measured, worker_or_table
from common.cli import run
from common.flags import Flags, flag, parse_arguments

WAYS = {"parts": "in parts (`vocabulary_loss`)", "whole": "`F.cross_entropy` of all logits"}


@dataclass
class Arguments(Flags):
    tokens: int = flag(2048, "Tokens of a pack.")
    vocabulary: int = flag(128256, "Words.")
    hidden: int = flag(64, "Hidden size.")
    output: str | None = flag(None, "Also write the table there.")
    worker: str | None = flag(None, "Internal: measure this one in this process and print JSON.")


def measure(args: Arguments) -> dict:
    """One way in this process."""
    import torch
    import torch.nn.functional as F

    from common.training.log_row import peak_memory_gb
    from extras.families.decoders.model import vocabulary_loss

    cpu = torch.device("cpu")
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.hidden, requires_grad=True)
    labels = torch.randint(args.vocabulary, (args.tokens,))
    before = peak_memory_gb(cpu)
    if args.worker == "parts":
        loss, *_ = vocabulary_loss(hidden, weight, labels)
    else:
        loss = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    loss.backward()
    return {"gb": peak_memory_gb(cpu) - before, "loss": loss.item()}


def compare(args: Arguments) -> str:
    import torch  # noqa: F401  (its version)

    flags = {name: getattr(args, name) for name in ("tokens", "vocabulary", "hidden")}
    hardware, command = where_measured("benchmarks.vocabulary_loss", "torch")
    lines = [f"{args.tokens:,} tokens, {args.vocabulary:,} words, hidden size {args.hidden}, fp32, {hardware}", ""]
    lines += [command, "", "| logits | loss | peak beyond the inputs, GB |", "|---|--:|--:|"]
    for way, name in WAYS.items():
        found = measured_afresh("benchmarks.vocabulary_loss", {"worker": way} | flags, dict(os.environ), way)
        lines.append(f"| {name} | {found['loss']:,.0f} | {found['gb']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    worker_or_table(parse_arguments(__doc__, Arguments), measure, compare)


if __name__ == "__main__":
    run(main)
