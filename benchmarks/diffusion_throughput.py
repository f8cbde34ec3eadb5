"""Tokens a second of masked diffusion beside masked language modelling on the same packs, ESM-2 8M on a CPU.

    python -m benchmarks.diffusion_throughput [--output benchmarks/results/diffusion_throughput_cpu.md]

Whole training steps, collating included, fp32, one thread, of models as train_ddp.py makes them. Each pack
is trained on by both objectives in turn, in CPU time. The ratio is the median over the pairs, with the quartiles.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import publish, say, where_measured
from common.cli import run
from common.data.collators import to_device
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.training_data import masked_batches
from common.distributed.process_group import keep_freed_memory
from common.distributed.world import Mesh
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import ESM2_SIZES, esm2_config
from common.models.esm2.family import FAMILY
from common.models.esm2.model import build_model

NAME = "facebook/esm2_t6_8M_UR50D"
OBJECTIVES = {"mlm": "masked language modelling", "mdlm": "masked diffusion"}


@dataclass
class Arguments(Flags):
    tokens: int = flag(4096, "Of a pack, at most.")
    packs: int = flag(24, "That both objectives are measured on.")
    output: str | None = flag(None, "A file for the table.")


class Case:
    """A model trained by one objective; counts what it has trained on."""

    def __init__(self, objective: str, args: Arguments):
        flags = DataFlags(objective=objective, max_seq_length=512, tokens_per_pack=args.tokens)
        self.collator = masked_batches(flags, ESM2_TOKENS, Mesh())
        self.config = esm2_config(*ESM2_SIZES[NAME], token_dropout=objective == "mlm")
        self.model = build_model(self.config, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.seconds: list[float] = []
        self.tokens = self.predicted = 0
        self.flops = 0.0

    def step(self, pack: Pack, ids: np.ndarray) -> None:
        started = time.process_time()
        batch: Any = self.collator(pack, ids, 0)
        output = self.model(**to_device(batch, torch.device("cpu")))
        (output.loss_sum / batch["num_targets"]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.process_time() - started)
        predicted = int((batch["labels"] >= 0).sum())
        self.tokens, self.predicted = self.tokens + len(ids), self.predicted + predicted
        self.flops += FAMILY.flops(self.config, len(ids), batch["sum_squared_lengths"], predicted)


def packs(args: Arguments):
    """Random proteins of the lengths of UniRef90's: log-normal, median 270."""
    rng, residues = np.random.default_rng(0), np.array(ESM2_TOKENS.replacements, np.uint8)
    for number in range(args.packs + 1):
        lengths = rng.lognormal(5.6, 0.7, args.tokens).astype(np.int64).clip(30, 512)
        lengths = lengths[lengths.cumsum() <= args.tokens]
        records = np.arange(len(lengths)) + number * args.tokens
        yield Pack(records, np.zeros_like(lengths), lengths, 0), rng.choice(residues, lengths.sum())


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    cases = {objective: Case(objective, args) for objective in OBJECTIVES}
    for number, pack in enumerate(packs(args)):
        for case in list(cases.values())[:: 1 if number % 2 else -1]:  # each goes first as often
            case.step(*pack)
        if number % 6 == 0:
            say(f"pack {number} of {args.packs}")
    plain, tokens = cases["mlm"], cases["mlm"].tokens
    ratios = np.array(plain.seconds[1:]) / np.array(cases["mdlm"].seconds[1:])  # the first is for warmth
    low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    lines = [
        "# Masked diffusion beside masked language modelling on a CPU",
        "",
        f"ESM-2 8M, {args.packs} packs of at most {args.tokens:,} tokens, fp32, one thread; whole training steps.",
        "",
        "| | tokens/s of CPU time | predicted tokens | FLOPs a token, of masked language modelling |",
        "|---|--:|--:|--:|",
    ]
    for objective, case in cases.items():
        speed = tokens / (args.packs + 1) / np.median(case.seconds[1:])
        share, flops = case.predicted / tokens, case.flops / plain.flops
        lines.append(f"| {OBJECTIVES[objective]} | {speed:,.0f} | {share:.1%} | {flops:.4f} |")
    lines += [
        "",
        f"Tokens/s, of masked language modelling's: {ratio:.3f} (quartiles {low:.3f}, {high:.3f}).",
    ]
    publish("\n".join([*lines, "", *where_measured("benchmarks.diffusion_throughput", "torch")]), args.output)


if __name__ == "__main__":
    run(main)
