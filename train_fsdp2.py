#!/usr/bin/env python3
r"""Pretrain ESM-2 with FSDP2: weights, gradients and optimiser state sharded over the ranks, layer by layer.

torchrun --nproc_per_node=8 train_fsdp2.py --config_name facebook/esm2_t33_650M_UR50D \
    --dataset_dir processed/arrow --output_dir out --bf16 --do_eval
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from common.cli import UserError, run
from common.distributed.fsdp import FullySharded, default_sharding, hsdp_shape, init_mesh
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.flags import Missing, flag
from common.hooks import extra
from common.models.layers.initialise import count_parameters
from common.models.layers.recompute import RecomputeFlags, save_activations
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.loop import train
from common.training.task import BuiltModel

STRATEGIES = {
    "full": "weights are sharded too, and gathered again for the backward pass (ZeRO-3)",
    "grad_op": "weights stay unsharded from forward to backward: more memory, less traffic (ZeRO-2)",
    "hybrid": "full within groups of --hsdp_shard_size ranks, replicated across groups (HSDP)",
}


@dataclass(frozen=True)
class FsdpFlags(RecomputeFlags):
    advanced = ("cpu_offload", "hsdp_shard_size")
    unlisted = ("param_dtype", "forward_prefetch", "sync_each_batch")

    sharding_strategy: str | None = flag(
        None,
        "To trade memory for traffic. "
        + "; ".join(f"{name}: {what}" for name, what in STRATEGIES.items())
        + ". Default: full; "
        "hybrid across nodes of GPUs where it fits.",
        choices=STRATEGIES,
    )
    hsdp_shard_size: int | None = flag(
        None, "With hybrid, to share a copy among fewer or more ranks than a node has. Default: those of a node."
    )
    param_dtype: str = flag(
        "fp32",
        "Dtype of the master weights; bf16: weights, gradients and moments in half the memory.",
        choices=("fp32", "bf16"),
    )
    offload_activations: bool = flag(
        False, "If memory runs out: keep activations in host memory between forward and backward."
    )
    cpu_offload: bool = flag(
        False, "If weights are too large for the GPUs: keep weights, gradients and optimiser in host memory."
    )
    sync_each_batch: bool = flag(False, "Reduce-scatter gradients after every micro-batch: less memory, more traffic.")
    forward_prefetch: int = flag(1, "Layers whose weights are gathered ahead of use.")

    @property
    def state_on_host(self) -> bool:
        return self.cpu_offload

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        """Offloading is compared for `full` and for the mode that the flags ask for."""
        modes = super().recompute_modes()
        offloaded = ("full", self.activation_checkpointing) if self.offload_activations else ("full",)
        return {mode: way | {"offload_activations": False} for mode, way in modes.items()} | {
            f"{mode}, offloaded": modes[mode] | {"offload_activations": True} for mode in modes if mode in offloaded
        }

    def missing_in(self, run: RunArguments) -> Iterator[Missing]:
        if self.hsdp_shard_size is not None and self.sharding_strategy != "hybrid":
            yield Missing("--sharding_strategy", "--hsdp_shard_size goes with hybrid", "hybrid")
        if self.param_dtype == "bf16" and not run.precision.bf16:
            yield Missing("--bf16", "--param_dtype bf16 stores what it computes with")

    def check(self) -> None:
        if self.forward_prefetch < 0:
            raise UserError(f"--forward_prefetch {self.forward_prefetch}: must not be negative")


def make_mesh(flags: FsdpFlags, world: World) -> DeviceMesh:
    """(shard,), or for hybrid (replicate, shard): consecutive ranks, so those of a node, shard a copy."""
    if flags.sharding_strategy != "hybrid":
        return init_mesh(world, (world.size,), ("shard",))
    shape = hsdp_shape(world, flags.hsdp_shard_size or world.local_size)
    return init_mesh(world, shape, ("replicate", "shard"))


def shard(model: nn.Module, world: World, flags: FsdpFlags, bf16: bool) -> None:
    """Shard by layer: each is gathered just before its turn; the rest (embeddings, head) belongs to the root.

    A model that does not call its layers (--backend hf) is one group: its root gathers all weights at once.
    """
    if flags.param_dtype == "bf16":
        model.to(torch.bfloat16)
    layers = list(model.layers) if getattr(model, "calls_layers", True) else []
    # Compute in bf16 from fp32 master weights; gradients are summed in fp32 either way. transformers' model gets fp32
    # weights, as from train_ddp.py: autocast rounds those of matmuls, and its residual stream stays fp32.
    compute = torch.bfloat16 if bf16 and layers else None
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if flags.cpu_offload else OffloadPolicy()
    options = {
        "mesh": make_mesh(flags, world),
        "mp_policy": MixedPrecisionPolicy(compute, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": offload,
    }
    save_activations(layers, flags.activation_checkpointing)
    if flags.offload_activations:
        extra().offload_activations(layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=flags.sharding_strategy != "grad_op", **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + flags.forward_prefetch])


def choose_sharding(flags: FsdpFlags, model: nn.Module, world: World, device_memory: int | None) -> FsdpFlags:
    """The flags with a strategy; all ranks together. device_memory: bytes of this rank's GPU, if it has one."""
    if flags.sharding_strategy is not None:
        return flags
    each = 16 if flags.param_dtype == "fp32" else 8  # bytes of a weight, its gradient and two moments
    state = each * count_parameters(model)
    return replace(
        flags, sharding_strategy=default_sharding(world, state, None if flags.cpu_offload else device_memory)
    )


def build(args: RunArguments, world: World, previous: dict[str, str]) -> tuple[Strategy, BuiltModel]:
    flags: FsdpFlags = args.strategy
    memory = args.dry_run.device_bytes
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory

    def shard_model(model: nn.Module) -> None:
        nonlocal flags
        flags = choose_sharding(flags, model, world, memory)
        shard(model, world, flags, args.precision.bf16)

    built = load_model(
        args,
        world,
        previous,
        shard=shard_model,
        device=torch.device("cpu") if flags.cpu_offload else None,
        torch_only=flags.only_by_torch,
    )
    if flags.sharding_strategy == "hybrid" and args.strategy.sharding_strategy is None:
        remark = f"Each node of {world.local_size} GPUs has all weights (--sharding_strategy hybrid): they fit"
        built = replace(built, remarks=(*built.remarks, remark))
    return FullySharded(built.model, flags.sync_each_batch), built


if __name__ == "__main__":
    run(lambda: train(parse_run(__doc__, FsdpFlags), build))
