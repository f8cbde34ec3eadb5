"""Days, energy and price of a run that --dry_run estimates: by the step model (extras/plan/step_model).

It covers ESM-2 with torch's compiled layers in bf16, under train_ddp.py and train_fsdp2.py. `step_plan` gives a line
that says why for all else: no figure is made up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from common.data.training_data import packs_per_step
from common.distributed.fsdp import FullySharded
from common.distributed.strategy import Replicated, Strategy
from common.flags import flat
from common.models.esm2.config import Esm2Config
from common.training.arguments import DryRunFlags, RunArguments
from extras.plan.dry_run.memory_estimate import NODE, FakeRun
from extras.plan.step_model.communication import Network, ddp, fsdp, hsdp
from extras.plan.step_model.model import A100, BF16, COMPILED, DEVICES, GELU, Device, Shape, step_of
from extras.speed.muon import StepCost

GPUS = {device.name: device for device in (A100, *DEVICES)}
MEASURED_ON = "H100"
# {hidden size: (name, tokens/s of the model over those measured: for today's code, for the code that was measured)},
# one pack a step, compiled layers: benchmarks/results/step_model.md.
MEASURED = {320: ("8M", 1.41, 1.05), 640: ("150M", 1.43, 1.02), 1280: ("650M", 1.10, 1.04), 5120: ("15B", 3.42, 3.29)}
REACHED = 0.8  # of a link's bandwidth, by a ring: assumed (extras.plan.step_model.communication.Network)
# {flag: values that the step model covers}
COVERED = {
    "use_cpu": (False,),
    "bf16": (True,),
    "backend": ("auto", "torch"),
    "torch_compile": (None, True),
    "attention": ("auto", "flash2"),
    "objective": ("mlm",),
    "set_tokens": (None,),
    "fp8": (False,),
    "fp4": (False,),
    "cp_size": (1,),
    "packs_per_step_schedule": (None,),
    "activation_checkpointing": ("none", "full"),
    "offload_activations": (False,),
    "cpu_offload": (False,),
    "param_dtype": ("fp32",),
    "sharding_strategy": (None, "full", "hybrid"),
    "sync_each_batch": (False,),
    "ddp_bucket_dtype": ("fp32",),
    "cuda_graphs": (False,),
    "triton_adamw": (False,),
}


@dataclass(frozen=True)
class StepPlan:
    """What the time of a step depends on.

    tokens: of a pack; packs: that a rank accumulates; longest: tokens of a sequence, at most; shards: ranks that share
    a copy of the weights; bucket: bytes of an all-reduce, None: the default; muon: what it costs beside AdamW's part.
    """

    shape: Shape
    tokens: int
    packs: int
    longest: int
    mode: str = BF16
    ranks: int = 1
    shards: int = 1
    recomputed: bool = False
    bucket: float | None = None
    muon: StepCost | None = None

    @property
    def step_tokens(self) -> int:
        return self.ranks * self.packs * self.tokens

    def seconds(self, device: Device) -> float:
        """Of an optimiser step, with the communication that the work of the layers does not hide."""
        options = {"rounded_ahead": self.shards == 1, "recomputed": self.recomputed, "longest": self.longest}
        times = step_of(self.shape, self.tokens, self.mode, 1, **options).times(device)
        net = Network(inside=REACHED * device.link)
        if self.shards == 1:
            hidden = ddp(times, self.ranks, net, self.bucket)
        else:
            sharded = fsdp if self.shards == self.ranks else hsdp
            hidden = sharded(times, self.ranks, net) + (self.packs - 1) * sharded(times, self.ranks, net, last=False)
        if self.muon:
            hidden += self.muon.flops / device.peak / device.of_matmuls
            hidden += self.muon.bytes_sent / (net.inside if self.ranks <= net.node else net.between / net.node)
        return hidden + step_of(self.shape, self.tokens, self.mode, self.packs, **options).seconds(device)


def step_plan(args: RunArguments, run: FakeRun) -> StepPlan | str:
    """The plan of a run; or why the step model has no time for it."""
    flags, built, strategy = flat(args), run.built, run.strategy
    if type(built.config) is not Esm2Config:
        return f"the step model is of ESM-2, and not of {args.model_named}"
    for name, values in COVERED.items():
        if name in flags and flags[name] not in values:
            return f"the step model does not cover {name}: {flags[name]}"
    if not args.data.packing or not all(p.requires_grad for p in built.model.parameters()):
        return "the step model is of packs without padding, and of all weights trained"
    ranks, shards = run.world.size, 1
    if type(strategy) is FullySharded:
        shards = dist.get_world_size(strategy.shard_group)
        if shards not in (ranks, min(ranks, NODE)):
            return f"the step model does not cover hsdp_shard_size: {shards}"
    elif type(strategy) not in (Strategy, Replicated):
        return "the step model is of train_ddp.py and train_fsdp2.py"
    mode = BF16 if flags["bf16_residual"] is not False else COMPILED
    bucket = flags.get("ddp_bucket_cap_mb")
    return StepPlan(
        Shape.of(built.config),
        args.pack_tokens,
        -(-packs_per_step(args.data, run.world.mesh, args.pack_tokens).most // ranks),
        args.data.max_seq_length,
        GELU if flags["fused_gelu"] else mode,
        ranks,
        shards,
        bool(flags.get("gradient_checkpointing")) or flags.get("activation_checkpointing") == "full",
        1e6 * bucket if bucket else None,
        run.muon,
    )


def time_lines(flags: DryRunFlags, steps: int, plan: StepPlan | str) -> list[str]:
    """What is printed. steps: of the run, below 1 where they are not known."""
    name = flags.gpu or MEASURED_ON
    if isinstance(plan, str):
        return [f"No time, energy or price: {plan}."]
    device, ranks = GPUS[name], plan.ranks
    seconds = plan.seconds(device)
    lines = [
        f"Time on {ranks} {name} with --backend torch, by the step model:",
        f"{plan.step_tokens / seconds:14,.0f}  tokens/s ({plan.step_tokens:,} in a step of {seconds:.4g} s)",
    ]
    if steps < 1:
        return [*lines, f"{'':14}  for days, energy and price of the run: --max_steps", *_accuracy(plan, name)]
    gpu_hours = ranks * steps * seconds / 3600
    price = f"{'':14}  price: --price_per_gpu_hour"
    if flags.price_per_gpu_hour is not None:
        total = flags.price_per_gpu_hour * gpu_hours
        price = f"{total:14,.2f}  price, at {flags.price_per_gpu_hour:g} a GPU-hour"
    lines += [
        f"{steps * seconds / 86400:14,.4g}  days for {steps:,} steps",
        f"{gpu_hours:14,.1f}  GPU-hours",
        f"{gpu_hours * device.watts / 1000:14,.1f}  kWh at most: {device.watts} W a GPU, without hosts and cooling",
        price,
    ]
    return lines + _accuracy(plan, name)


def _accuracy(plan: StepPlan, gpu: str) -> list[str]:
    """What the figures rest on, and how far they were from what was measured at the nearest widths."""
    hidden = plan.shape.hidden
    below = max((width for width in MEASURED if width <= hidden), default=min(MEASURED))
    above = min((width for width in MEASURED if width >= hidden), default=max(MEASURED))
    nearest = [MEASURED[width] for width in sorted({below, above})]
    ratios = ", ".join(
        f"{now:.2f} x with {name}'s layers ({then:.2f} x for its own code)" for name, now, then in nearest
    )
    line = f"Modelled, not measured. Beside an earlier version's tokens/s on one {MEASURED_ON}: {ratios}."
    if gpu != MEASURED_ON:
        line += f" No {gpu} was measured."
    if plan.ranks > 1:
        line += " Several GPUs were never measured."
    return [line, "Waiting for data, evaluations, checkpoints and restarts are not in it (docs/dry_run.md)."]
