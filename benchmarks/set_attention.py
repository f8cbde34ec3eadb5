"""Block-causal attention over sets of sequences on this CPU: its time, and that of its pairs in one flash call.

    python -m benchmarks.set_attention [--output benchmarks/results/set_attention_cpu.md]

One layer's attention of the 8M model, forward and backward, fp32, one thread; CPU time, the ways in turns, the best of
the rounds. A pack has as many sequences of one length in each row, in sets of so many members. Pairs: of a query and a
key that it attends to. `one call` is torch's flash kernel alone, without rotation, on one sequence of as many pairs.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.flags import flag, parse_arguments

HEADS, DIM = 20, 16  # of the 8M model


@dataclass
class Arguments:
    tokens: int = flag(8192, "Of a pack.")
    length: int = flag(512, "Of a sequence.")
    members: str = flag("1,4,16", "Sequences of a set.")
    rounds: int = flag(5, "Times that every way is measured.")
    output: str | None = flag(None, "Also write the table there.")

    def __post_init__(self) -> None:
        for members in self.members.split(","):
            if self.tokens % (self.length * int(members)):
                raise UserError(f"--tokens {self.tokens} is no whole number of sets of {members} x {self.length}")


def compare(args: Arguments) -> str:
    hardware, command = where_measured("benchmarks.set_attention", "torch")
    lines = [
        "# Block-causal attention over sets on a CPU",
        "",
        f"{HEADS} heads of {DIM}, {args.tokens:,} tokens in sequences of {args.length}, fp32, one thread. {hardware}",
        "",
        command,
        "",
        "| members | million pairs | sets, s | plain packs, s | of plain packs | one call, s | of one call |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for members in map(int, args.members.split(",")):
        pairs = args.tokens * args.length * (members + 1) // 2
        sets, plain, call = measure(args, members, pairs)
        lines.append(
            f"| {members} | {pairs / 1e6:.1f} | {sets:.2f} | {plain:.2f} | {sets / plain:.2f} | {call:.2f} "
            f"| {sets / call:.2f} |"
        )
        say(lines[-1])
    return "\n".join(lines) + "\n"


def measure(args: Arguments, members: int, pairs: int) -> list[float]:
    """Seconds of sets, of plain packs, and of one call."""
    import torch

    from common.distributed.process_group import keep_freed_memory
    from common.models.layers import cpu
    from common.models.layers.attention import rotary_tables
    from extras.families.sets.layout import SetLayout

    keep_freed_memory()
    torch.set_num_threads(1)
    tables = rotary_tables(torch.arange(args.tokens), DIM)
    cu_seqlens = torch.arange(0, args.tokens + 1, args.length, dtype=torch.int32)
    numbers = torch.arange(0, len(cu_seqlens), members)
    of_sets = numbers.new_full((len(cu_seqlens),), len(cu_seqlens) - 1).index_copy(0, numbers // members, numbers)
    layout = SetLayout.of(torch.stack((cu_seqlens, of_sets.int())), cu_seqlens, args.tokens)
    qkv, grad = torch.randn(args.tokens, HEADS, 3, DIM).requires_grad_(), torch.randn(args.tokens, HEADS * DIM)
    side = math.isqrt(pairs)
    q, k, v, grad_call = (torch.randn(side, HEADS, DIM) for _ in range(4))

    def one_call() -> None:
        cpu.flash_backward(grad_call, q, k, v, *cpu.flash(q, k, v))

    ways: list[Callable[[], object]] = [
        lambda: layout.attention(qkv, *tables).backward(grad),
        lambda: cpu.attention(qkv, *tables, cu_seqlens).backward(grad),
        one_call,
    ]
    best = [math.inf] * len(ways)
    for number in range(args.rounds + 1):  # the first is for warmth
        for n, way in enumerate(ways):
            qkv.grad, started = None, time.process_time()
            way()
            if number:
                best[n] = min(best[n], time.process_time() - started)
    return best


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    publish(compare(args), args.output)


if __name__ == "__main__":
    run(main)
