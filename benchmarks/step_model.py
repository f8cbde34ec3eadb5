"""Count what a training step launches on a GPU, without one, and estimate its time by a roofline model.

    python -m benchmarks.step_model --output benchmarks/results/step_model.md

The model is extras/plan/step_model, which --dry_run uses too. It is checked on measurements of
`benchmarks.gpu_throughput`, and on published ones.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu_models import SIZES
from benchmarks.measuring import publish, where_measured
from benchmarks.step_graphs import graphs_table
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.config import esm2_config
from common.models.esm2.model import Esm2ForMaskedLM
from extras.plan.step_model import model
from extras.plan.step_model.communication import Network, Times, cp_ddp, ddp, fsdp, hsdp
from extras.plan.step_model.counts import Work
from extras.plan.step_model.model import A100, BF16, COMPILED, DEVICES, EAGER, GELU, MODES, Shape, Step
from extras.speed.muon import HeldParameter, Ranks, StepCost, assign, step_cost

NETWORK = Network()
FA4 = 1.7  # times as fast as FA2: assumed
STATE = 16  # bytes a parameter: weight, gradient, two moments
GPUS = (8, 64, 128, 512)
# Model, tokens, layers by, tokens a second: results/gpu_throughput.md. Published: see the text of the table.
MEASURED = [
    ("8M", 16384, EAGER, 537983),
    ("8M", 16384, COMPILED, 702815),
    ("150M", 16384, EAGER, 88110),
    ("150M", 16384, COMPILED, 177054),
    ("650M", 16384, EAGER, 63200),
    ("650M", 16384, COMPILED, 88253),
    ("15B/8", 8192, EAGER, 13032),
    ("15B/8", 8192, COMPILED, 12871),
]
PUBLISHED = [
    (DEVICES[0], "650M", 95900),
    (DEVICES[0], "3B", 26800),
    (A100, "650M", 42700),
    (A100, "3B", 11000),
]
STRATEGIES: dict[str, Callable[[Times, int, Network], float]] = {
    "DDP": ddp,
    "FSDP2, full": fsdp,
    "FSDP2, hybrid in a node": hsdp,
    "CP 8 x DDP": cp_ddp,
}


def step_of(size: str, tokens: int, mode: str, *args, **options) -> Step:
    return model.step_of(Shape.of(esm2_config(*SIZES[size])), tokens, mode, *args, **options)


def bytes_sent(parameters: int, ranks: int) -> dict[str, float]:
    """Bytes that a rank sends a step: DDP's fp32 gradients, all-reduced in a ring (2 (N - 1) / N of them);
    FSDP2's bf16 weights, all-gathered for forward and backward pass, and fp32 gradients, reduce-scattered."""
    share = (ranks - 1) / ranks
    return {"DDP": 2 * share * 4 * parameters, "FSDP2": share * (2 * 2 + 4) * parameters}


def muon_cost(size: str, replicas: int, shards: int) -> StepCost:
    """What --optim muon costs the first of replicas x shards ranks in a step, with --bf16."""
    with torch.device("meta"):
        model = Esm2ForMaskedLM(esm2_config(*SIZES[size]))
    held = []
    for name, blocks in model.hidden_matrices().items():
        rows, columns = model.get_parameter(name).shape
        chunk = -(-rows // shards)  # as fully_shard splits rows
        spans = [(min(rows, chunk * n), max(0, min(chunk, rows - chunk * n))) for n in range(shards)]
        held.append(HeldParameter(blocks, columns, spans))
    groups = assign(held, replicas, shards, 0)
    return step_cost(groups, Ranks(size=replicas), Ranks(size=shards), torch.bfloat16.itemsize)


def held(strategy: str, parameters: int, ranks: int, net: Network) -> float:
    """Bytes of weights, gradients and moments on a GPU."""
    shards = {"FSDP2, full": ranks, "FSDP2, hybrid in a node": min(ranks, net.node)}.get(strategy, 1)
    return STATE * parameters / shards


# ---- tables ----------------------------------------------------------------------------------------------------


@dataclass
class Arguments(Flags):
    sizes: str = flag("650M,3B,15B", f"Which: {', '.join(SIZES)}.")
    tokens: int = flag(16384, "Tokens in a pack.")
    ranks: int = flag(8, "GPUs of the DDP and FSDP2 columns.")
    checks: bool = flag(True, "Also the model beside what was measured.")
    output: str | None = flag(None, "Also write the tables there.")

    def check(self) -> None:
        self.require_at_least(1024, "tokens")
        for size in self.sizes.split(","):
            if size not in SIZES:
                raise UserError(f"--sizes {size}: choose {', '.join(SIZES)}")


def counts_table(args: Arguments) -> Iterator[str]:
    yield "| model | layers | GEMM, TFLOP | other kernels move, GB | of it a layer, GB | kernels "
    yield f"| waits before the loss | DDP sends, GB ({args.ranks} GPUs) | FSDP2 sends, GB |\n"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
    for size in args.sizes.split(","):
        for mode in MODES:
            step = step_of(size, args.tokens, mode)
            sent = bytes_sent(step.parameters, args.ranks)
            work, layer = step.all, step.layer[0] + step.layer[1]
            yield f"| {size} | {mode} | {work.matmul_flops / 1e12:.1f} | {work.moved / 1e9:.1f} "
            yield f"| {layer.moved / 1e9:.2f} | {work.kernels:,} | {_waits(work)} "
            yield f"| {sent['DDP'] / 1e9:.1f} | {sent['FSDP2'] / 1e9:.1f} |\n"


def _waits(work: Work) -> str:
    return ", ".join(f"{name} x {times}" for name, times in work.waits.items()) or "none"


def times_table(args: Arguments) -> Iterator[str]:
    yield "| GPU | model | layers | matmuls, ms | attention | other kernels | launching | a step | tokens/s | MFU |\n"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
    for device in DEVICES:
        for size in args.sizes.split(","):
            for mode in MODES:
                step = step_of(size, args.tokens, mode)
                seconds = step.seconds(device)
                parts = " | ".join(f"{1000 * part:.1f}" for part in step.parts(device).values())
                yield f"| {device.name} | {size} | {mode} | {parts} | {1000 * seconds:.1f} "
                yield f"| {step.tokens / seconds:,.0f} | {step.mfu(device):.1%} |\n"


def packs_table(args: Arguments) -> Iterator[str]:
    """Several packs a step, with weights rounded in each of them or ahead, faster attention, and --fused_gelu."""
    yield "| model, H100 | packs a step | weights rounded | attention | other kernels move, GB a pack | a pack, ms "
    yield "| tokens/s | MFU |\n|---|--:|---|---|--:|--:|--:|--:|\n"
    fa2 = DEVICES[0]
    fa4 = replace(fa2, of_attention=FA4 * fa2.of_attention)
    for size in args.sizes.split(","):
        rows = [(BF16, packs, ahead, "FA2", fa2) for packs in (1, 4) for ahead in (False, True)]
        rows += [(mode, n, True, f"FA4 at {FA4:g} x FA2, modelled", fa4) for mode in (BF16, GELU) for n in (1, 4)]
        for mode, packs, ahead, attention, device in rows:
            step = step_of(size, args.tokens, mode, packs, ahead)
            seconds, rounded = step.seconds(device), "once a step" if ahead else "in each pack"
            yield f"| {size}, {mode} | {packs} | {rounded} | {attention} | {step.all.moved / packs / 1e9:.1f} "
            yield f"| {1000 * seconds / packs:.1f} | {step.tokens / seconds:,.0f} | {step.mfu(device):.1%} |\n"


def communicated(args: Arguments) -> dict[str, Times]:
    """{size: what its communication is modelled by}: compiled layers, a pack a step, on an H100."""
    return {size: step_of(size, args.tokens, COMPILED).times(DEVICES[0]) for size in args.sizes.split(",")}


def muon_table(args: Arguments) -> Iterator[str]:
    """Steps of one pack a rank. The share is of the FLOPs of its pack; milliseconds at the matmuls' efficiency."""
    yield "| Muon, H100 | strategy | GPUs | tokens a step | Newton-Schulz, TFLOP a GPU | share | ms | sends, GB |\n"
    yield "|---|---|--:|--:|--:|--:|--:|--:|\n"
    device = DEVICES[0]
    for size in args.sizes.split(","):
        step = step_of(size, args.tokens, BF16)
        for strategy, replicas, shards in (("one GPU", 1, 1), ("DDP", args.ranks, 1), ("FSDP2", 1, args.ranks)):
            cost = muon_cost(size, replicas, shards)
            seconds = cost.flops / device.peak / device.of_matmuls
            yield f"| {size} | {strategy} | {replicas * shards} | {step.tokens * replicas * shards:,} "
            yield f"| {cost.flops / 1e12:.2f} | {cost.flops / step.flops:.1%} | {1000 * seconds:.1f} "
            yield f"| {cost.bytes_sent / 1e9:.2f} |\n"


def checks_table() -> Iterator[str]:
    yield "| GPU | model | layers by | tokens a step | tokens/s | by the model | |\n"
    yield "|---|---|---|--:|--:|--:|--:|\n"
    rows = [(DEVICES[0], f"torch, {mode}", size, tokens, mode, found) for size, tokens, mode, found in MEASURED]
    rows += [(device, "Megatron (published)", size, 16384, COMPILED, found) for device, size, found in PUBLISHED]
    for device, by, size, tokens, mode, found in rows:
        step = step_of(size, tokens, mode, rounded_ahead=False, added_up=True)  # as when they were measured
        modelled = step.tokens / step.seconds(device)
        yield f"| {device.name} | {size} | {by} | {tokens:,} | {found:,} "
        yield f"| {modelled:,.0f} | {modelled / found - 1:+.0%} |\n"


def assumptions_table(net: Network) -> Iterator[str]:
    yield "| assumed of the network and its collectives | |\n|---|---|\n"
    for what, value in (
        ("a ring inside a node (NVLink), a GPU", f"{net.inside / 1e9:.0f} GB/s"),
        (f"a node of {net.node} GPUs to others (EFA), all adapters", f"{net.between / 1e9:.0f} GB/s"),
        ("a hop in a node, between nodes", f"{net.hop_inside * 1e6:.0f} us, {net.hop_between * 1e6:.0f} us"),
        ("all-gather, reduce-scatter", "a ring of all ranks: (N - 1) / N of the bytes, N - 1 hops"),
        ("all-reduce", "twice that, or a tree over the nodes if faster"),
        ("DDP", "fp32 buckets of 25 MB, of 100 beyond 16 ranks, hidden by the backward pass but for the last"),
        ("FSDP2", "bf16 gathers one layer ahead, fp32 reduce-scatters, one at a time"),
        ("hybrid", "each GPU's part all-reduced over nodes meanwhile, at its share of the adapters"),
        ("CP", "p2p in a node, hidden by the attention to one block; the pack has 8 x the tokens"),
        ("state", f"{STATE} bytes a parameter, sharded or not; more than 80 GB does not fit"),
        ("not in it", "stragglers, contention with the kernels, the sharded optimiser's gain"),
    ):
        yield f"| {what} | {value} |\n"


def communication_table(sizes: dict[str, Times], net: Network) -> Iterator[str]:
    """Of a step: its time without communication over that with them, and the milliseconds that are not hidden."""
    yield f"| model, H100 | strategy | {' | '.join(f'{ranks} GPUs' for ranks in GPUS)} |\n"
    yield "|---|---|" + "--:|" * len(GPUS) + "\n"
    for size, times in sizes.items():
        parameters = times.layers * times.parameters[0] + times.parameters[1]
        for name, exposed in STRATEGIES.items():
            found = []
            for ranks in GPUS:
                if (bytes_held := held(name, parameters, ranks, net)) > 80e9:
                    found.append(f"{bytes_held / 1e9:.0f} GB")
                    continue
                more = exposed(times, ranks, net)
                found.append(f"{times.seconds / (times.seconds + more):.1%} (+{1000 * more:.1f} ms)")
            yield f"| {size} | {name} | {' | '.join(found)} |\n"


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    tables = [counts_table(args), graphs_table(), times_table(args), packs_table(args)]
    tables += [assumptions_table(NETWORK), communication_table(communicated(args), NETWORK), muon_table(args)]
    tables += [checks_table()] if args.checks else []
    parts = [*where_measured("benchmarks.step_model", "torch"), *("".join(table).rstrip() for table in tables)]
    publish("\n\n".join(parts) + "\n", args.output)


if __name__ == "__main__":
    run(main)
