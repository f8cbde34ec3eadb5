"""Training speed, MFU and memory on one GPU: both backends beside transformers' EsmForMaskedLM, in one run.

    python -m benchmarks.gpu_throughput --output table.md                     on a GPU, in less than ten minutes
    python -m benchmarks.gpu_throughput --device cpu --sizes tiny --tokens 512 --steps 2      tries the script itself

All do the same training steps (forward, backward, clipping, fused AdamW on fp32 weights, bf16 autocast) on the same
generated proteins, whose lengths are distributed as UniRef50's: median about 270, cropped at 1,024. Ours get packs;
the peer gets the same sequences as padded batches (to the longest), of as many positions as packs have tokens, with
scaled-dot-product attention. Speeds are real tokens a second: padding counts for nobody. MFU is of the dense bf16 peak
(for FP8 too), and counts attention by the sum of squared lengths.

The table and its JSON are written after every row, the most telling sizes come first, and no row is begun after
--minutes: a run that is cut off leaves what it measured.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import EsmConfig, EsmForMaskedLM

from common.alphabet import CLS, EOS
from common.arguments import flag
from common.backend import te_missing
from common.batches import to_device
from common.cli import UserError, parse_arguments, run
from common.collators import Batch, PackedCollator, PaddedCollator
from common.esm2 import build_model, compile_layers
from common.gelu import HIDDEN_ACT
from common.metrics import peak_flops, peak_memory_gb, step_flops
from common.packing import Pack
from common.precision_plan import FP8_RECIPES
from common.presets import esm2_config

# layers, hidden size, heads; of 15B as many layers as fit beside their optimiser
SIZES = {
    "650M": (33, 1280, 20),
    "3B": (36, 2560, 40),
    "8M": (6, 320, 20),
    "150M": (30, 640, 20),
    "15B/8": (6, 5120, 40),
    "tiny": (2, 64, 4),
}
MODES = {
    "te-bf16": "TE, BF16",
    "te-fp8": "TE, FP8",
    "torch-compiled": "torch, compiled, BF16",
    "torch": "torch, BF16",
    "peer": "EsmForMaskedLM, padded, sdpa, BF16",
}
MAX_LENGTH = 1024
LOG_MEDIAN, LOG_SPREAD = 5.6, 0.75  # of the lengths


@dataclass
class Arguments:
    device: str = flag("cuda", "cuda or cpu.")
    sizes: str = flag("650M,3B,8M,150M,15B/8", f"Which, in this order: {', '.join(SIZES)}.")
    modes: str = flag(",".join(MODES), "Which rows of each size.")
    tokens: int = flag(16384, "Tokens in a pack; positions in a padded batch.")
    steps: int = flag(8, "Steps timed, after --warmup that are not.")
    warmup: int = flag(3, "Steps before.")
    fp8_recipe: str = flag("delayed", f"Of the FP8 rows: {', '.join(FP8_RECIPES)}.")
    minutes: float = flag(9.0, "Begin no row after this.")
    output: str | None = flag(None, "Write the table there, and its rows beside it as .json.")

    def __post_init__(self) -> None:
        for name, known in (("sizes", SIZES), ("modes", MODES), ("fp8_recipe", FP8_RECIPES)):
            for value in getattr(self, name).split(","):
                if value not in known:
                    raise UserError(f"--{name} {value}: choose {', '.join(known)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: no GPU here; --device cpu --sizes tiny tries the script itself")
        if self.tokens < MAX_LENGTH and self.device == "cuda":
            raise UserError(f"--tokens {self.tokens}: at least one sequence of {MAX_LENGTH}")


def proteins(tokens: int, rng: np.random.Generator) -> tuple[Pack, np.ndarray]:
    """A pack of `tokens` tokens, or two less: (pack, ids uint8 [tokens])."""
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(np.clip(np.exp(rng.normal(LOG_MEDIAN, LOG_SPREAD)), 30, MAX_LENGTH - 2)) + 2
        lengths.append(left if left - length < 3 else length)
    lengths = np.minimum(np.array(lengths), MAX_LENGTH)
    ids = rng.integers(4, 24, lengths.sum()).astype(np.uint8)
    ends = lengths.cumsum()
    ids[ends - lengths], ids[ends - 1] = CLS, EOS
    number = np.arange(len(lengths))
    return Pack(records=number, starts=np.zeros_like(number), lengths=lengths, epoch=0), ids


def prepare(mode: str, args: Arguments) -> list[Batch]:
    rng = np.random.default_rng(0)
    packs = [proteins(args.tokens, rng) for _ in range(args.warmup + args.steps)]
    if mode != "peer":
        return [PackedCollator(0, MAX_LENGTH)(*pack) for pack in packs]
    collate, batches = PaddedCollator(0, MAX_LENGTH), []
    for pack, ids in packs:  # as many of its sequences as fit when padded
        rows = next(n for n in range(len(pack.lengths), 0, -1) if n * pack.lengths[:n].max() <= args.tokens or n == 1)
        part = Pack(pack.records[:rows], pack.starts[:rows], pack.lengths[:rows], 0)
        batches.append(collate(part, ids[: part.lengths.sum()]))
    return batches


def build(mode: str, config: EsmConfig, args: Arguments) -> nn.Module:
    if mode == "peer":
        config._attn_implementation = "sdpa"
        return EsmForMaskedLM(config).to(args.device)
    backend = "te" if mode.startswith("te") else "torch"
    if backend == "te":
        if missing := te_missing(torch.device(args.device)):
            raise UserError(missing)
        config.hidden_act = HIDDEN_ACT["tanh"]
    model = build_model(config, seed=0, device=args.device, backend=backend)
    if mode == "torch-compiled":
        torch._dynamo.reset()
        compile_layers(model, args.device)
    if mode == "te-fp8":
        from common.precision_te import Quantised

        Quantised(model, (FP8_RECIPES[args.fp8_recipe](),) * config.num_hidden_layers)
    return model


def measure(mode: str, size: str, args: Arguments) -> dict:
    """One row: real tokens a second, MFU, peak memory, the last loss."""
    device = torch.device(args.device)
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    config = esm2_config(*SIZES[size])
    batches = prepare(mode, args)
    model = build(mode, config, args).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    tokens, flops = 0, 0.0
    for number, batch in enumerate(batches):
        if number == args.warmup:
            finish()
            started = time.perf_counter()
        inputs = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            output = model(**inputs)
            loss = output.loss if mode == "peer" else output.loss_sum / batch["num_masked"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number >= args.warmup:
            tokens += batch["num_tokens"]
            flops += step_flops(config, *(batch[k] for k in ("num_tokens", "sum_squared_lengths", "num_masked")))
    finish()
    seconds = time.perf_counter() - started
    row = {"tokens_per_second": tokens / seconds, "peak_gb": peak_memory_gb(device), "loss": loss.item()}
    if peak := peak_flops(device, bf16=True):
        row["mfu"] = flops / seconds / peak
    return row


def table(args: Arguments, rows: list[dict]) -> str:
    import transformers

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    lines = [
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; {args.tokens} tokens a step, FP8 recipe {args.fp8_recipe}",
        "",
        f"`{' '.join(['python -m benchmarks.gpu_throughput', *sys.argv[1:]])}`",
        "",
        "| model | layers by | tokens/s | against the peer | against TE, BF16 | MFU | peak memory, GB | loss |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['size']} | {MODES[row['mode']]} | {row['error']} | | | | | |")
            continue
        ratios = [
            next((f"{row['tokens_per_second'] / r['tokens_per_second']:.2f} x" for r in rows if _is(r, row, base)), "")
            for base in ("peer", "te-bf16")
        ]
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        lines.append(
            f"| {row['size']} | {MODES[row['mode']]} | {row['tokens_per_second']:,.0f} | {' | '.join(ratios)} | {mfu} "
            f"| {row['peak_gb']:.1f} | {row['loss']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _is(row: dict, like: dict, mode: str) -> bool:
    return row["size"] == like["size"] and row["mode"] == mode and "error" not in row


def main() -> None:
    (args,) = parse_arguments(__doc__, Arguments)
    begun, rows = time.monotonic(), []
    for size in args.sizes.split(","):
        for mode in args.modes.split(","):
            if time.monotonic() - begun > args.minutes * 60:
                continue
            row = {"size": size, "mode": mode}
            try:
                row |= measure(mode, size, args)
            except Exception as error:  # out of memory, a library that does not fit: the other rows count
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".replace("|", "/")
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            rows.append(row)
            print(f"{time.monotonic() - begun:5.0f} s  {json.dumps(row)}", file=sys.stderr, flush=True)
            if args.output:
                Path(args.output).write_text(table(args, rows))
                Path(args.output).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(args, rows))


if __name__ == "__main__":
    run(main)
