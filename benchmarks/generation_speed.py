r"""Proteins a minute of generate.py's ancestral sampler beside a plain loop over transformers' EsmForMaskedLM.

python -m benchmarks.generation_speed --model facebook/esm2_t6_8M_UR50D [--proteins 8] [--output FILE]

Both begin at masks alone and open a mask with probability (t - s) / t in each of --steps steps. The loop calls the
model in each step for all proteins of its batch. A protein of generate.py is part of a forward pass in those steps
alone in which one of its masks opens. Rounds in turns, in one process, every protein computed to its end. Seconds are
of the process on its CPUs, so that other processes of the machine count little.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import publish, say, where_measured
from common.cli import run
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.after.generation.draws import Sampling
from extras.after.generation.encoders import drawable, generated
from extras.after.generation.templates import Template
from extras.after.generation.unmask import Schedule
from extras.after.inference.encoder import Encoder, EncoderFlags


@dataclass
class Arguments(Flags):
    model: str | None = flag(None, "An ESM-2.")
    proteins: int = flag(8, "Of each round.")
    length: int = flag(200, "Their residues.")
    steps: list[int] | None = flag(None, "Of the samplers. Default: 200 500.")
    batches: list[int] | None = flag(None, "Of the loop. Default: 1 8.")
    rounds: int = flag(3, "Of which the median counts.")
    tokens_per_pack: int = flag(2048, "As of generate.py.")
    output: str | None = flag(None, "A file for the table.")

    def missing(self) -> Iterator[Missing]:
        if not self.model:
            yield Missing("--model", "an ESM-2", "facebook/esm2_t6_8M_UR50D")


@torch.inference_mode()
def plain_loop(model: Any, args: Arguments, steps: int, batch: int) -> None:
    """The same sampler by transformers alone."""
    letters = torch.from_numpy(drawable(ESM2_TOKENS, "ESM-2"))
    for first in range(0, args.proteins, batch):
        ids = torch.full((min(batch, args.proteins - first), args.length + 2), ESM2_TOKENS.mask)
        ids[:, 0], ids[:, -1] = ESM2_TOKENS.begin, ESM2_TOKENS.end
        for step in range(steps):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[..., letters]
            opens = (ids == ESM2_TOKENS.mask) & (torch.rand(ids.shape) < 1 / (steps - step))
            drawn = torch.distributions.Categorical(logits=logits).sample()
            ids = torch.where(opens, letters[drawn], ids)
        assert not (ids == ESM2_TOKENS.mask).any()


def ours(encoder: Encoder, args: Arguments, steps: int) -> None:
    begun = [Template("", (0, n), b"X" * args.length, np.ones(args.length, bool)) for n in range(args.proteins)]
    assert len(list(generated(encoder, begun, Schedule(steps=steps), Sampling(), 1))) == args.proteins


def seconds(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    from transformers import EsmForMaskedLM

    args = parse_arguments(__doc__, Arguments)
    model = EsmForMaskedLM.from_pretrained(args.model).eval()
    flags = EncoderFlags(args.model, tokens_per_pack=args.tokens_per_pack, use_cpu=True)
    encoders = {"generate.py": Encoder(flags), "generate.py --bf16": Encoder(replace(flags, bf16=True))}
    lines = [
        f"{args.proteins} proteins of {args.length} residues a round, median of {args.rounds} rounds in turns; "
        f"{torch.get_num_threads()} threads, fp32.",
        "",
        "| steps | what | CPU s a protein | CPU hours for 1,000 | against the fp32 `generate.py` |",
        "|--:|---|--:|--:|--:|",
    ]
    for steps in args.steps or [200, 500]:
        works = {name: partial(ours, encoder, args, steps) for name, encoder in encoders.items()}
        for batch in args.batches or [1, 8]:
            works[f"transformers, batches of {batch}"] = partial(plain_loop, model, args, steps, batch)
        taken: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(args.rounds):
            for name, work in works.items():
                taken[name].append(seconds(work) / args.proteins)
                say(f"{steps} steps, {name}: {taken[name][-1]:.2f} s")
        medians = {name: statistics.median(values) for name, values in taken.items()}
        for name, value in medians.items():
            ratio = f"{value / medians['generate.py']:.2f} x"
            lines.append(f"| {steps} | {name} | {value:.2f} | {value / 3.6:.2f} | {ratio} |")
    publish(
        "\n".join([*lines, "", *where_measured("benchmarks.generation_speed", "torch", "transformers")]), args.output
    )


if __name__ == "__main__":
    run(main)
