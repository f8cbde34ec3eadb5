"""Count what a training step launches on a GPU, without one, and estimate its time by a roofline model.

    python -m benchmarks.step_model --output benchmarks/results/step_model.md

Model code runs on fake tensors, on the code path of CUDA (bf16 autocast, attention as one operator): the
encoder layer, scaled by the number of layers; embeddings, head and loss; clipping and AdamW. Counted are matmuls,
attention, bytes that all other kernels move, kernels and waits for the device; of compiled layers, kernels fused by
`benchmarks.step_fused`. Checked on measurements of `benchmarks.gpu_throughput`, and on published ones.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.gpu_models import SIZES, generated
from benchmarks.measuring import publish, where_measured
from benchmarks.step_communication import Network, Times, assumptions_table, communication_table
from benchmarks.step_counts import Work, counted
from benchmarks.step_fused import fused_work, go_back, graphs_of
from benchmarks.step_graphs import graphs_table
from common.cli import UserError, run
from common.compat import FakeTensorMode
from common.data.collators import Batch, to_device
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.config import Esm2Config, esm2_config
from common.models.esm2.family import FAMILY
from common.models.esm2.layers_torch import TransformerLayer, prepare
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.cpu import as_on_a_gpu
from common.models.layers.linear import RoundedWeights, use_copy
from common.models.layers.residual import begin, total
from common.shape_buckets import filled_up
from common.training.run_logger import PEAK_FLOPS
from extras.plan.dry_run.memory_tracker import MemoryTracker
from extras.speed.fused_gelu import fused_mlp
from extras.speed.muon import HeldParameter, Ranks, StepCost, assign, step_cost

EAGER, COMPILED = "eager", "compiled"
BF16 = "compiled, --bf16_residual"  # layers
MODES = (EAGER, COMPILED, BF16)
GELU = f"{BF16} --fused_gelu"


@dataclass(frozen=True)
class Device:
    """bandwidth: of the memory, bytes a second; link: between GPUs of a node, bytes a second in one direction. By the
    vendor's data sheets. Efficiencies: the share of each peak that kernels reach."""

    name: str
    bandwidth: float
    link: float
    # Reached on the H100 of results/gpu_profile.md at 650M and 16,384 tokens: the matmuls' 63.9 TFLOP in 90.7 ms; the
    # 0.50 GB of GELU's backward kernel in 0.181 ms; attention in 29.1 ms. Taken for the other devices too.
    of_matmuls: float = 0.71
    of_bandwidth: float = 0.83
    of_attention: float = 0.16

    @property
    def peak(self) -> float:
        return PEAK_FLOPS[self.name]


DEVICES = [Device("H100", 3.35e12, 450e9), Device("H200", 4.8e12, 450e9), Device("B200", 8.0e12, 900e9)]
A100 = Device("A100", 2.04e12, 300e9)
NETWORK = Network()
FA4 = 1.7  # times as fast as FA2: assumed
# Seconds a host takes to launch a kernel: so that the rows of 8M and 150M in results/gpu_throughput.md, which wait for
# their host, are met in their geometric mean, and check nothing. That host was a virtual machine; others differ.
LAUNCH = 53e-6
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


@dataclass(frozen=True)
class Step:
    """Work between one wait for the device and the next, in turn; `layer`: of one encoder layer, forward, backward."""

    phases: list[Work]
    layer: tuple[Work, Work]
    parameters: int
    tokens: int
    flops: float  # as MFU counts them
    pairs: int  # tokens that attend to each other
    hidden: int

    @property
    def all(self) -> Work:
        return sum(self.phases, Work())

    def parts(self, device: Device) -> dict[str, float]:
        """Seconds of matmuls, attention and all other kernels, and of a host that launches them."""
        work = self.all
        return {
            "matmuls": work.matmul_flops / device.peak / device.of_matmuls,
            "attention": 2 * self.pairs * self.hidden * work.attention / device.peak / device.of_attention,
            "other kernels": work.moved / device.bandwidth / device.of_bandwidth,
            "launching": work.kernels * LAUNCH,
        }

    def seconds(self, device: Device) -> float:
        """Between two waits whichever takes longer: the kernels, or the host that launches them."""
        phases = [replace(self, phases=[phase]).parts(device) for phase in self.phases]
        return sum(max(sum(parts.values()) - parts["launching"], parts["launching"]) for parts in phases)

    def mfu(self, device: Device) -> float:
        return self.flops / self.seconds(device) / device.peak


@cache
def step_of(
    size: str, tokens: int, mode: str, packs: int = 1, rounded_ahead: bool = True, added_up: bool = False
) -> Step:
    """packs: whose gradients are added up; rounded_ahead: weights to bf16 once a step, not in every pack; added_up:
    each layer makes its last sum itself."""
    config = esm2_config(*SIZES[size])
    batch = generated(tokens)
    layer = layer_work(size, tokens, mode, rounded_ahead, added_up)
    layers = config.num_hidden_layers
    forward, backward, optimiser, again, rounding, waits, parameters = ends_work(size, tokens)
    passes = [forward + layer[0] * layers, backward + layer[1] * layers]
    if not waits:  # the backward pass is launched while the forward pass runs
        passes = [passes[0] + passes[1]]
    more = again[0] + again[1] * layers
    end = optimiser[0] + optimiser[1] * layers + rounding * (layers * rounded_ahead)
    phases = passes + [*passes[:-1], passes[-1] + more] * (packs - 1) + [end]
    if not waits:
        phases = [sum(phases[:-1], Work()), end]
    flops = FAMILY.flops(config, *(batch[key] for key in ("num_tokens", "sum_squared_lengths", "num_targets")))
    count = parameters[0] + layers * parameters[1]
    counts = packs * batch["num_tokens"], packs * flops, batch["sum_squared_lengths"], config.hidden_size
    return Step(phases, layer, count, *counts)


@cache
def layer_work(
    size: str, tokens: int, mode: str, rounded_ahead: bool = True, added_up: bool = False
) -> tuple[Work, Work]:
    """Of one encoder layer: forward pass, backward pass."""
    config = esm2_config(*SIZES[size])
    with FakeTensorMode(), as_on_a_gpu():
        layer = TransformerLayer(config)
        if mode == GELU:
            layer.layernorm_mlp.fused = fused_mlp
        x, rotary, bounds, longest = _call(
            config, filled_up(tokens), torch.bfloat16 if mode in (BF16, GELU) else torch.float32
        )
        weights = dict(layer.named_parameters())
        kept = RoundedWeights([layer] if rounded_ahead else [])
        names = {id(weight): name for name, weight in weights.items()}
        copies = {names[id(weight)]: copy for weight, copy in zip(kept.weights, kept.copies, strict=True)}

        def function(weights, copies, x, cos, sin, bounds):
            for name, copy in copies.items():  # where a graph is traced, other tensors stand for them
                use_copy(weights[name], copy)
            with torch.autocast("cpu", torch.bfloat16):
                stream = torch.func.functional_call(layer, weights, (x, (cos, sin), bounds, longest))
            return total(stream) if added_up else stream

        with torch.autocast("cpu", torch.bfloat16):
            args = weights, copies, x if added_up else begin(x), *rotary, bounds
        if mode != EAGER:
            forward, backward = (fused_work(graph) for graph in graphs_of(function, *args))
            return forward, backward
        with counted() as forward:
            y = function(*args)
        with counted() as backward:
            go_back(y)
    return forward, backward


@cache
def ends_work(
    size: str, tokens: int
) -> tuple[Work, Work, tuple[Work, Work], tuple[Work, Work], Work, bool, tuple[int, int]]:
    """Of what is not a layer: forward, backward; AdamW and clipping of its weights and of a layer's; adding up the
    gradients of both; rounding a layer's weights; whether the host waits in the forward pass; and how many weights it
    has, and a layer."""
    config = esm2_config(*SIZES[size])
    batch = generated(tokens)
    with MemoryTracker(), as_on_a_gpu():
        model, layer = Esm2ForMaskedLM(replace(config, num_hidden_layers=0)), TransformerLayer(config)
        with counted() as forward, torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        with counted() as backward:
            loss.backward()
        optimisers, additions = zip(*(optimiser_work(module) for module in (model, layer)), strict=True)
        kept = RoundedWeights([layer])
        with counted() as rounding:
            kept.refresh()
        sizes = tuple(sum(p.numel() for p in module.parameters()) for module in (model, layer))
    return forward, backward, optimisers, additions, rounding, bool(forward.waits), sizes


def loss_of(model: Esm2ForMaskedLM, batch: Batch) -> torch.Tensor:
    return model(**to_device(batch, torch.device("cpu"))).loss_sum


def optimiser_work(module: torch.nn.Module) -> tuple[Work, Work]:
    """Clipping and AdamW of a module's weights; and adding a pack's gradients to those of the packs before."""
    weights = list(module.parameters())
    optimiser = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimiser.step()  # the first makes the moments
    with counted() as work:
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimiser.step()
    with counted() as addition:
        for weight in weights:
            weight.grad.add_(torch.empty_like(weight))
    return work, addition


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


def _call(config: Esm2Config, tokens: int, residual: torch.dtype = torch.float32) -> tuple:
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    rotary, longest = prepare(tokens, bounds, tokens, config.hidden_size // config.num_attention_heads)
    return torch.zeros(tokens, config.hidden_size, dtype=residual, requires_grad=True), rotary, bounds, longest


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
    device, found = DEVICES[0], {}
    for size in args.sizes.split(","):
        step, layers = step_of(size, args.tokens, COMPILED), SIZES[size][0]
        forward, backward = (replace(step, phases=[work]).seconds(device) for work in step.layer)
        attention = tuple(replace(step, phases=[work]).parts(device)["attention"] for work in step.layer)
        *_, (rest, layer) = ends_work(size, args.tokens)
        shape = (layer, rest), args.tokens, step.hidden
        found[size] = Times(step.seconds(device), layers, forward, backward, attention, *shape)
    return found


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


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    tables = [counts_table(args), graphs_table(), times_table(args), packs_table(args)]
    tables += [assumptions_table(NETWORK), communication_table(communicated(args), NETWORK), muon_table(args)]
    tables += [checks_table()] if args.checks else []
    parts = [*where_measured("benchmarks.step_model", "torch"), *("".join(table).rstrip() for table in tables)]
    publish("\n\n".join(parts) + "\n", args.output)


if __name__ == "__main__":
    run(main)
