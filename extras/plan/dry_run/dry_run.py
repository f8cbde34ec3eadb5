"""Dry run: the memory that a run on N ranks needs, without GPUs or data, and without writing anything.

    python train_fsdp2.py --dry_run --world_size 32 --device_memory 80 --config_name facebook/esm2_t48_15B_UR50D --bf16

Prints the peak memory of a rank in a step, by purpose; the peak for each mode of activation checkpointing; with
--device_memory whether that fits, and the largest pack that does; and what extras.plan.dry_run.time_estimate says of
days and price. Estimates a GPU, or with --use_cpu a CPU. Exit status 0, or 2 with one line if it does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from common.cli import UserError
from common.flags import flat, with_flags
from common.models.layers.initialise import count_parameters
from common.training.arguments import RunArguments
from common.training.task import Build
from extras.plan.dry_run.memory_estimate import NODE, FakeRun, MemoryEstimate, fake_run
from extras.plan.dry_run.memory_tracker import BACKWARD, ENDS, GATHERED, GRADIENTS, LAYERS, OPTIMIZER, WEIGHTS
from extras.plan.dry_run.time_estimate import step_plan, time_lines

GIB = 1 << 30
LABELS = {
    WEIGHTS: "weights",
    OPTIMIZER: "optimiser: two moments per weight",
    GRADIENTS: "gradients",
    GATHERED: "weights all-gathered or cast for use; communication buffers",
    LAYERS: "activations of the layers, saved for the backward pass",
    ENDS: "embeddings, head and loss",
    BACKWARD: "temporary in the backward pass, recomputation included",
}
MOST_TRIES = 4


def dry_run(args: RunArguments, build: Build) -> None:
    """Print the estimate. UserError if it does not fit --device_memory."""
    step, memory = args.data.max_seq_length, args.dry_run.device_bytes
    limit = memory - int(args.dry_run.device_reserve * GIB) if memory else None  # bytes that tensors may use
    with fake_run(args, build) as run:
        held = run.step(args.pack_tokens)
        parameters = count_parameters(run.built.model)
        largest = None if limit is None else largest_pack(run.step, held, limit, step)
        remarks = [*run.built.remarks, *_muon(run)]
        plan = step_plan(args, run)
    modes = [*_modes(args, build, held), *hybrid(args, build)]
    lines = [_heading(args, parameters), *remarks, "", *_table(args, held), "", *modes]
    sys.stdout.write("\n".join(lines) + "\n")
    if limit is not None:
        sys.stdout.write("\n")
        _check_fit(args, held, largest, limit)
    sys.stdout.write("\n".join(["", *time_lines(args.dry_run, args.data.max_steps, plan)]) + "\n")


def largest_pack(
    step: Callable[[int], MemoryEstimate], known: MemoryEstimate, limit: int, multiple: int
) -> MemoryEstimate | None:
    """The largest pack, in multiples of `multiple` tokens, whose estimated peak is at most `limit` bytes.

    None if not even one multiple fits. known: the estimate of any pack. The peak is nearly linear in a pack's tokens
    (attention stores no scores), so the secant through the last two packs is followed until it repeats one.
    """
    first = known if known.tokens >= 2 * multiple else step(multiple)
    second = step(multiple if first is known else 2 * multiple)
    best = max((held for held in (known, first, second) if held.peak <= limit), key=lambda h: h.tokens, default=None)
    for _ in range(MOST_TRIES):
        slope = (first.peak - second.peak) / (first.tokens - second.tokens)
        tokens = int((second.tokens + (limit - second.peak) / slope) // multiple * multiple)
        if tokens < multiple or tokens in (first.tokens, second.tokens):
            break
        first, second = second, step(tokens)
        if second.peak <= limit and (best is None or tokens > best.tokens):
            best = second
    return best


def _heading(args: RunArguments, parameters: int) -> str:
    ranks = args.dry_run.world_size or 1
    shared = f", {args.process.cp_size} of which share a pack" if args.process.cp_size > 1 else ""
    return (
        f"{args.model_named}: {parameters:,} parameters on {ranks} rank{'s' * (ranks > 1)}{shared}; "
        f"packs of {args.pack_tokens:,} tokens, {'bf16' if args.precision.bf16 else 'fp32'}"
    )


def _muon(run: FakeRun) -> list[str]:
    """What --optim muon costs a rank in a step on packs of the last size."""
    if run.muon is None:
        return []
    cost, share = run.muon, run.muon.flops / run.flops
    return [
        f"Muon: {cost.flops / 1e12:.3g} TFLOP a step on a rank, {100 * share:.2g} % of those of its packs; sends "
        f"{cost.bytes_sent / GIB:.2f} GiB a step; {cost.temporary / GIB:.2f} GiB meanwhile, without activations"
    ]


def _table(args: RunArguments, held: MemoryEstimate) -> list[str]:
    device = "the process" if args.process.use_cpu else "the device"
    labels = LABELS
    if args.optimizer.optim == "muon":
        labels = LABELS | {OPTIMIZER: "optimiser: one moment per weight of the layers' matrices, two of the rest"}
    rows = [(label, held.kinds[kind]) for kind, label in labels.items()]
    rows.append((f"peak of a step on {device} of a rank", held.peak))
    if args.dry_run.device_memory:
        reserve = int(args.dry_run.device_reserve * GIB)
        rows.append(("reserved for CUDA context, NCCL, fragmentation (device_reserve)", reserve))
        rows.append((f"needed, of {args.dry_run.device_memory:g} GiB (--device_memory)", held.peak + reserve))
    lines = [f"{'GiB':>10}", *(f"{size / GIB:10.2f}  {what}" for what, size in rows)]
    host = [
        (held.state_on_host, "weights, gradients and moments (--cpu_offload)"),
        (held.activations_on_host, "activations (--offload_activations)"),
        (held.checkpoint_copy, "copy for a checkpoint that is written in the background"),
    ]
    if args.checkpoint.memory_save_steps != 0:
        host.append((2 * held.checkpoint_copy, "the last two states, with extras.launch (--memory_save_steps)"))
        if (args.dry_run.world_size or 1) > NODE:
            host.append((2 * held.checkpoint_copy, "the same of a rank of another node"))
    on_host = [f"{size / GIB:10.2f}  {what}" for size, what in host if size]
    return [*lines, "", "In host memory, beside it, for each rank:", *on_host]


def _modes(args: RunArguments, build: Build, held: MemoryEstimate) -> list[str]:
    """The peak for each mode of storing or recomputing activations that the script has."""
    modes = args.strategy.recompute_modes()
    flags = ", ".join(f"--{name}" for name in next(iter(modes.values())))
    lines = [f"Peak by storage of activations ({flags}), GiB:"]
    for name, changes in modes.items():
        here = all(flat(args)[flag] == value for flag, value in changes.items())
        peak = held.peak
        if not here:
            with fake_run(with_flags(args, **changes), build) as run:
                peak = run.step(args.pack_tokens).peak
        lines.append(f"{peak / GIB:10.2f}  {name}{' (as configured)' * here}")
    return lines


def hybrid(args: RunArguments, build: Build) -> list[str]:
    """With weights sharded over several nodes: the peak if each node had all of them."""
    ranks, flags = args.dry_run.world_size or 1, flat(args)
    by_default = flags.get("sharding_strategy", "") is None and not args.dry_run.device_memory  # else it is decided
    if flags.get("sharding_strategy") != "full" and not by_default:
        return []
    if ranks <= NODE or ranks % NODE or flags["cp_size"] > 1:
        return []
    with fake_run(with_flags(args, sharding_strategy="hybrid", hsdp_shard_size=NODE), build) as run:
        peak = run.step(args.pack_tokens).peak
    return [
        f"{peak / GIB:10.2f}  with all weights on each node of {NODE} (--sharding_strategy hybrid), gathered there,",
        f"{'':12}which is modelled to pay where many nodes share small layers; no GPU has measured it",
    ]


def _check_fit(args: RunArguments, held: MemoryEstimate, largest: MemoryEstimate | None, limit: int) -> None:
    reserve, multiple = args.dry_run.device_reserve, args.data.max_seq_length
    most = "not even one of --max_seq_length does"
    if largest:
        most = (
            f"the largest pack that does has {largest.tokens:,} tokens ({largest.tokens // multiple} x "
            f"{multiple:,}; {largest.peak / GIB + reserve:.1f} GiB)"
        )
    needed = f"{held.peak / GIB + reserve:.1f} of {args.dry_run.device_memory:g} GiB"
    if held.peak > limit:
        raise UserError(
            f"packs of {held.tokens:,} tokens do not fit: {needed}; {most}: more ranks, recomputed or offloaded "
            "activations (--activation_checkpointing full, --offload_activations) or smaller packs take less"
        )
    sys.stdout.write(f"It fits: {needed}; {most}\n")
