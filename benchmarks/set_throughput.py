"""Tokens a second of a training step on sets of 1, 4 and 16 members, beside plain packs of the same tokens, on a CPU.

    python -m benchmarks.set_throughput [--output benchmarks/results/set_throughput_cpu.md]

Forward and backward of the 8M model that reads sets (`esm_sets`: six layers of ESM-2 and two over sets), and of ESM-2
8M itself, fp32, on one pack. CPU time of one thread, in turns, the best of the rounds. Every row has the same tokens
in sequences of the same length. FLOPs are those of the families' formulas, of matmuls and attention alike: their rate
says whether attention over sets costs more than its size.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.data.collators import MaskingCollator, to_device
from common.data.crops import Pack
from common.distributed.process_group import keep_freed_memory
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.family import Family, family_of
from common.models.layers.initialise import initialise
from extras.prepare.sources.sets import SetCollator

NAME = "facebook/esm2_t6_8M_UR50D"


@dataclass
class Arguments(Flags):
    tokens: int = flag(8192, "Of a pack.")
    length: int = flag(256, "Of a sequence.")
    set_tokens: int = flag(8192, "Of a set of the largest row; smaller sets fill the pack, too.")
    rounds: int = flag(3, "Times that every row is measured.")
    output: str | None = flag(None, "A file for the table.")

    def check(self) -> None:
        if self.tokens % (16 * self.length):
            raise UserError(f"--tokens {self.tokens}: no whole number of sets of 16 x {self.length}")


class Case:
    """A model and its batch. members: of a set, 0 for none."""

    def __init__(self, family: Family, args: Arguments, members: int):
        config = family.load_config(NAME)
        with torch.device("meta"):
            self.model: Any = family.make(config)
        self.model.to_empty(device="cpu")
        initialise(self.model, 0, config.initializer_range)
        count = args.tokens // args.length
        lengths, starts = np.full(count, args.length), np.zeros(count, np.int64)
        bounds = np.arange(0, count + 1, members) if members else None
        pack = Pack(np.arange(count), starts, lengths, 0, sets=bounds)
        ids = np.random.default_rng(0).choice(np.array(ESM2_TOKENS.replacements, np.uint8), args.tokens)
        batch = SetCollator(MaskingCollator(ESM2_TOKENS, 0))(pack, ids, 0)
        self.inputs = to_device(batch, torch.device("cpu"))
        pairs: dict[str, int] = {"set_pairs": batch["set_pairs"]} if members else {}
        if not members:
            self.inputs.pop("sets", None)
        sizes = batch["num_tokens"], batch["sum_squared_lengths"], batch["num_targets"]
        self.flops = family.flops(config, *sizes, **pairs)

    def seconds(self) -> float:
        self.model.zero_grad()
        started = time.process_time()
        self.model(**self.inputs).loss_sum.backward()
        return time.process_time() - started


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    plain, sets = family_of("esm"), family_of("esm_sets")
    most = args.set_tokens // args.length
    cases = {"ESM-2, plain packs": Case(plain, args, 0)}
    for members in sorted({1, 4, 16, most}):
        cases[f"sets of {members} ({members * args.length:,} tokens)"] = Case(sets, args, members)
    best = dict.fromkeys(cases, math.inf)
    for number in range(args.rounds + 1):  # the first is for warmth
        for name, case in cases.items():
            seconds = case.seconds()
            if number:
                best[name] = min(best[name], seconds)
        say(f"round {number} of {args.rounds}")
    first, one = list(best.values())[:2]
    plain_flops, of_one = (case.flops for case in list(cases.values())[:2])
    of_one /= one
    lines = [
        "# Training on sets of homologs on a CPU",
        "",
        f"{args.tokens:,} tokens in sequences of {args.length}, fp32, one thread.",
        "",
        "| | tokens/s | FLOPs a token, of plain packs | time a token, of plain packs | of sets of one | GFLOP/s "
        "| of those of sets of one |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, seconds in best.items():
        speed = cases[name].flops / seconds
        lines.append(
            f"| {name} | {args.tokens / seconds:,.0f} | {cases[name].flops / plain_flops:.2f} "
            f"| {seconds / first:.2f} | {seconds / one:.2f} | {speed / 1e9:.1f} | {speed / of_one:.2f} |"
        )
    publish("\n".join([*lines, "", *where_measured("benchmarks.set_throughput", "torch")]), args.output)


if __name__ == "__main__":
    run(main)
