"""A dry run: what a run on so many ranks needs, without a GPU, data, or anything written.

    python train_fsdp2.py --dry_run --world_size 32 --device_memory 80 --config_name facebook/esm2_t48_15B_UR50D --bf16

Prints a rank's memory at the peak of a step, by what it is for; the peak in each way of recomputing activations; and,
with --device_memory, whether that fits, and the largest pack that would. A GPU's ways are taken, or with --use_cpu a
CPU's. Status 0; 2 and a line where it does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from common.cli import UserError
from common.flags import flat, with_flags
from common.models.esm2.model import count_parameters
from common.training.arguments import RunArguments
from extras.dry_run.memory_estimate import Build, Held, rehearsed
from extras.dry_run.memory_tracker import BACKWARD, ENDS, GATHERED, GRADIENTS, LAYERS, OPTIMIZER, WEIGHTS

GIB = 1 << 30
LABELS = {
    WEIGHTS: "weights",
    OPTIMIZER: "optimiser: two moments a weight",
    GRADIENTS: "gradients",
    GATHERED: "weights gathered or rounded for use; buffers of exchanges",
    LAYERS: "activations of the layers, kept for the backward pass",
    ENDS: "embeddings, head and loss",
    BACKWARD: "under way in the backward pass, what is recomputed included",
}
MOST_TRIES = 4


def dry_run(args: RunArguments, build: Build) -> None:
    """UserError where it does not fit --device_memory."""
    step = args.data.max_seq_length
    with rehearsed(args, build) as run:
        held = run.step(args.pack_tokens)
        parameters = count_parameters(run.built.model)
        largest = largest_pack(run.step, held, _room(args), step) if args.dry_run.device_memory else None
        remarks = run.built.remarks
    lines = [_heading(args, parameters), *remarks, "", *_table(args, held), "", *_ways(args, build, held)]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.dry_run.device_memory:
        sys.stdout.write("\n")
        _judge(args, held, largest, step)


def largest_pack(step: Callable[[int], Held], known: Held, room: int, multiple: int) -> Held | None:
    """Of packs of a multiple of so many tokens the largest whose peak is within `room` bytes, as it was counted.

    None where not even one fits. known: any pack. A peak is all but a straight line of a pack's tokens, for attention
    holds no scores; the line through the last two packs is followed until it leads to a pack that was counted.
    """
    first = known if known.tokens >= 2 * multiple else step(multiple)
    second = step(multiple if first is known else 2 * multiple)
    best = max((held for held in (known, first, second) if held.peak <= room), key=lambda h: h.tokens, default=None)
    for _ in range(MOST_TRIES):
        slope = (first.peak - second.peak) / (first.tokens - second.tokens)
        tokens = int((second.tokens + (room - second.peak) / slope) // multiple * multiple)
        if tokens < multiple or tokens in (first.tokens, second.tokens):
            break
        first, second = second, step(tokens)
        if second.peak <= room and (best is None or tokens > best.tokens):
            best = second
    return best


def _room(args: RunArguments) -> int:
    """Bytes of a device that tensors may take."""
    return int((args.dry_run.device_memory - args.dry_run.device_reserve) * GIB)


def _heading(args: RunArguments, parameters: int) -> str:
    ranks = args.dry_run.world_size or 1
    shared = f", {args.process.cp_size} of which share a pack" if args.process.cp_size > 1 else ""
    return (
        f"{args.model_named}: {parameters:,} parameters on {ranks} rank{'s' * (ranks > 1)}{shared}; "
        f"packs of {args.pack_tokens:,} tokens, {'bf16' if args.precision.bf16 else 'fp32'}"
    )


def _table(args: RunArguments, held: Held) -> list[str]:
    device = "the process" if args.process.use_cpu else "the device"
    rows = [(LABELS[kind], held.kinds[kind]) for kind in LABELS]
    rows.append((f"peak of a step on {device} of a rank", held.peak))
    if args.dry_run.device_memory:
        reserve = int(args.dry_run.device_reserve * GIB)
        rows.append(("left to CUDA's context, NCCL, the allocator's gaps (--device_reserve)", reserve))
        rows.append((f"needed, of {args.dry_run.device_memory:g} GiB (--device_memory)", held.peak + reserve))
    lines = [f"{'GiB':>10}", *(f"{size / GIB:10.2f}  {what}" for what, size in rows)]
    host = [(held.state_on_host, "weights, gradients and moments (--cpu_offload)")]
    host += [(held.activations_on_host, "activations (--offload_activations)")]
    host += [(held.checkpoint_copy, "copy for a checkpoint that is written in the background")]
    told = [f"{size / GIB:10.2f}  {what}" for size, what in host if size]
    return [*lines, "", "In host memory, beside it, for each rank:", *told]


def _ways(args: RunArguments, build: Build, held: Held) -> list[str]:
    """The peak in each way of keeping activations that the script has."""
    ways = args.strategy.recompute_modes()
    flags = ", ".join(f"--{name}" for name in next(iter(ways.values())))
    lines = [f"Peak by what becomes of activations ({flags}), GiB:"]
    given = flat(args)
    for name, way in ways.items():
        here = way.items() <= given.items()
        peak = held.peak
        if not here:
            with rehearsed(with_flags(args, **way), build) as run:
                peak = run.step(args.pack_tokens).peak
        lines.append(f"{peak / GIB:10.2f}  {name}{' (as here)' * here}")
    return lines


def _judge(args: RunArguments, held: Held, largest: Held | None, multiple: int) -> None:
    reserve = args.dry_run.device_reserve
    most = "not even one of --max_seq_length does"
    if largest:
        most = (
            f"the largest pack that does has {largest.tokens:,} tokens ({largest.tokens // multiple} x "
            f"{multiple:,}; {largest.peak / GIB + reserve:.1f} GiB)"
        )
    needed = f"{held.peak / GIB + reserve:.1f} of {args.dry_run.device_memory:g} GiB"
    if held.peak > _room(args):
        raise UserError(
            f"packs of {held.tokens:,} tokens do not fit: {needed}; {most}: more ranks, recomputed activations "
            "(--activation_checkpointing full) or smaller packs take less"
        )
    sys.stdout.write(f"It fits: {needed}; {most}\n")
