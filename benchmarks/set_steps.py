r"""Estimate a training step on sets of homologs on several GPUs, without one: E1-600M on sets of 32,768 tokens.

python -m benchmarks.set_steps --output benchmarks/results/set_steps.md

The roofline of extras/plan/step_model, whose efficiencies are those of ESM-2 650M on one H100: matmuls and attention
by the family's formulas, other kernels by the bytes a token of a compiled 650M layer. Global layers attend in halves
that are merged in fp32 (extras/families/sets/attention.py), which moves bytes of its own. Communication as in
extras/plan/step_model/communication.py. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measuring import publish, where_measured
from common.cli import run
from common.flags import Flags, flag, parse_arguments
from extras.families.e1.family import FAMILY
from extras.plan.step_model.communication import BF16, FP32, Network, Times, ddp
from extras.plan.step_model.model import DEVICES

NAME = "Profluent-Bio/E1-600m"
MOVED = 2.36e9 / 16384  # bytes a token of a layer, forward and backward: results/step_model.md, bf16 residual stream
PREDICTED = 0.15  # of the tokens
MERGED = 3 * 5 * FP32  # bytes of a number of a row that is merged: read two, write one, forward; gradients twice that
DEVICE = DEVICES[0]


@dataclass
class Arguments(Flags):
    set_tokens: int = flag(32768, "Tokens of a set; a pack is one set.")
    output: str | None = flag(None, "A file for the table.")


@dataclass(frozen=True)
class Sets:
    """A pack of one set of `members` equal sequences, `tokens` in all; 0 members: proteins of 256 tokens alone."""

    tokens: int
    members: int

    @property
    def squared_lengths(self) -> int:
        return self.tokens**2 // self.members if self.members else self.tokens * 256

    @property
    def pairs(self) -> int:
        """In a global layer."""
        return (self.tokens**2 + self.squared_lengths) // 2 if self.members else self.squared_lengths


def times_of(sets: Sets, cp: int) -> Times:
    """Of one GPU's share of a pack, without communication."""
    config = FAMILY.load_config(NAME)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    counts = sets.tokens, sets.squared_lengths, round(PREDICTED * sets.tokens)
    matmuls = FAMILY.flops(config, sets.tokens, 0, counts[2])
    attention = FAMILY.flops(config, *counts, set_pairs=sets.pairs) - matmuls
    across = sum(config.is_global(n) for n in range(layers))
    levels = math.ceil(math.log2(sets.members)) if sets.members > 1 else 0
    merged = across * levels * sets.tokens / 2 * hidden * MERGED
    seconds = matmuls / DEVICE.peak / DEVICE.of_matmuls + attention / DEVICE.peak / DEVICE.of_attention
    seconds += (sets.tokens * layers * MOVED + merged) / DEVICE.bandwidth / DEVICE.of_bandwidth
    global_attention = 4 * hidden * sets.pairs / DEVICE.peak / DEVICE.of_attention
    each, weights = seconds / cp / layers, parameters()
    return Times(
        *(seconds / cp, layers, each / 3, each * 2 / 3, (global_attention, 2 * global_attention)),
        *((weights // layers, 0), sets.tokens // cp, hidden),
    )


def parameters() -> int:
    config = FAMILY.load_config(NAME)
    hidden, ffn = config.hidden_size, config.intermediate_size
    return config.num_hidden_layers * (4 * hidden * hidden + 3 * hidden * ffn)


def exposed(times: Times, cp: int, gpus: int, net: Network) -> float:
    """Seconds that are not hidden: keys and values in the ring behind the attention to one block, gradients behind the
    backward pass. Of layers within sequences too, whose attention hides less: taken as none."""
    config = FAMILY.load_config(NAME)
    across = sum(config.is_global(n) for n in range(config.num_hidden_layers))
    block = 2 * times.tokens * times.hidden
    total = 0.0
    for layers, attention in ((across, times.attention), (config.num_hidden_layers - across, (0.0, 0.0))):
        for size, turns, computes in ((BF16, cp - 1, attention[0]), (BF16 + FP32, cp if cp > 1 else 0, attention[1])):
            arrives = size * block / net.inside + net.hop_inside
            total += layers * turns * max(0.0, arrives - computes / cp / cp)
    return total + ddp(times, gpus, net)


def table(set_tokens: int) -> Iterator[str]:
    net = Network()
    yield f"E1-600M, sets of {set_tokens:,} tokens, a set a pack, H100, bf16, compiled layers. Modelled: no GPU ran."
    yield (
        "Attention is charged with the efficiency measured on proteins of a few hundred tokens; kernels reach more "
        "on long sequences, so that its share is an upper bound.\n"
    )
    yield "| members | CP | seconds of a pack on one rank | of that attention | 8 GPUs, tokens/s | 64 GPUs, tokens/s |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for members in (0, 1, 16, 64, 128):
        for cp in (1, 2, 8):
            sets = Sets(set_tokens, members)
            times = times_of(sets, cp)
            pairs = FAMILY.flops(FAMILY.load_config(NAME), sets.tokens, sets.squared_lengths, 0, set_pairs=sets.pairs)
            pairs -= FAMILY.flops(FAMILY.load_config(NAME), sets.tokens, 0, 0)
            share = pairs / DEVICE.peak / DEVICE.of_attention / cp / times.seconds
            speeds = []
            for gpus in (8, 64):
                seconds = times.seconds + exposed(times, cp, gpus, net)
                speeds.append(f"{set_tokens * gpus / cp / seconds:,.0f}")
            name = str(members) if members else "proteins of 256 tokens alone"
            yield f"| {name} | {cp} | {times.seconds:.3f} | {share:.0%} | {' | '.join(speeds)} |"


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    lines = [*table(args.set_tokens), "", *where_measured("benchmarks.set_steps", "torch")]
    publish("\n".join(lines), args.output)


if __name__ == "__main__":
    run(main)
