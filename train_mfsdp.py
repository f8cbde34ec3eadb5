#!/usr/bin/env python3
r"""Pretrain ESM-2 with Megatron-FSDP: optimiser state, gradients and weights sharded over the GPUs (ZeRO-1, 2 or 3).

torchrun --nproc_per_node=8 train_mfsdp.py --config_name facebook/esm2_t33_650M_UR50D \
    --dataset_dir processed/arrow --output_dir out --bf16 --do_eval
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from common.cli import UserError, run
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.flags import Missing, flag
from common.models.layers.recompute import RecomputeFlags, save_activations
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.loop import train
from common.training.task import BuiltModel
from extras.speed.megatron import STRATEGIES, MegatronSharded


@dataclass(frozen=True)
class MegatronFlags(RecomputeFlags):
    needs_layers = True  # their hooks gather the weights
    advanced = ("hsdp_shard_size", "preserve_fp32_weights", "grad_reduce_in_fp32")
    unlisted = (
        *("sync_model_each_microbatch", "init_model_with_meta_device", "calculate_per_token_loss"),
        # Their only working value is the default.
        *("check_for_nan_in_grad", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective"),
    )

    zero_dp_strategy: str = flag(
        "optim_grads_params",
        "To trade memory for traffic. " + "; ".join(f"{name}: {what}" for name, what in STRATEGIES.items()) + ".",
        choices=STRATEGIES,
    )
    hsdp_shard_size: int | None = flag(
        None, "To share a copy among fewer ranks: how many. Default: all; for FSDP2 with hybrid, a node's."
    )
    preserve_fp32_weights: bool = flag(
        True, "With --bf16: fp32 master weights; False: to save memory, bf16 weights and moments, with --bf16."
    )
    grad_reduce_in_fp32: bool = flag(
        True,
        "With --bf16: reduce gradients in fp32; False: to halve the traffic, reduce gradients in bf16, with --bf16.",
    )
    init_model_with_meta_device: bool | None = flag(
        None, "Materialise the weights one bucket at a time. Default: where anything is sharded."
    )
    calculate_per_token_loss: bool = flag(
        False, "Sum gradients over ranks instead of averaging; the loss is one a masked residue either way."
    )
    sync_model_each_microbatch: bool = flag(False, "Reduce gradients after every micro-batch, and wait for it.")
    check_for_nan_in_grad: bool = flag(True, "Always: a step whose gradient norm is NaN or infinite is skipped.")
    overlap_grad_reduce: bool = flag(True, "Reduce gradients during the backward pass: always.")
    overlap_param_gather: bool = flag(True, "Prefetch weights: always.")
    average_in_collective: bool = flag(False, "NCCL averages instead of scaling and adding: refused.")

    def missing_in(self, run: RunArguments) -> Iterator[Missing]:
        for name in ("preserve_fp32_weights", "grad_reduce_in_fp32"):
            if not getattr(self, name) and not run.precision.bf16:
                yield Missing("--bf16", f"--{name} False is about bf16 weights and gradients")

    def check(self) -> None:
        """Refuses what megatron-fsdp 0.6.1 gets wrong, mostly silently."""
        hybrid = self.hsdp_shard_size is not None
        sums_twice = hybrid or self.zero_dp_strategy in ("no_shard", "optim")
        if not self.overlap_grad_reduce:
            raise UserError(
                "--overlap_grad_reduce False: gives wrong gradients with optim, and changes nothing with the others: "
                "drop the flag"
            )
        if not self.overlap_param_gather:
            raise UserError(
                "--overlap_param_gather False: computes with the previous step's weights, except with "
                "optim_grads_params: drop the flag"
            )
        if self.average_in_collective:
            raise UserError("--average_in_collective: crashes without expert parallelism: drop the flag")
        if not self.check_for_nan_in_grad:
            raise UserError("--check_for_nan_in_grad False: the norm is always checked; see --max_skipped_steps")
        if self.init_model_with_meta_device and not self.shards:
            raise UserError(
                "--init_model_with_meta_device: no_shard needs the whole model in memory anyway: drop the flag"
            )
        if hybrid and not self.shards:
            raise UserError("--hsdp_shard_size: no_shard shards nothing: drop the flag")
        if self.hsdp_shard_size == 1:
            raise UserError("--hsdp_shard_size 1: shards nothing: give --zero_dp_strategy no_shard instead")
        if self.sync_model_each_microbatch and sums_twice:
            raise UserError(
                "--sync_model_each_microbatch: sums gradients twice, except with optim_grads and optim_grads_params "
                "without --hsdp_shard_size: drop the flag"
            )

    @property
    def shards(self) -> bool:
        return self.zero_dp_strategy != "no_shard"

    @property
    def on_meta(self) -> bool:
        """Whether storage is allocated one bucket at a time."""
        return self.shards if self.init_model_with_meta_device is None else self.init_model_with_meta_device


def build(args: RunArguments, world: World, previous: dict[str, str]) -> tuple[Strategy, BuiltModel]:
    flags = args.strategy
    strategy = MegatronSharded(flags, args.precision.bf16, world)

    def shard(model: nn.Module) -> None:
        save_activations(list(model.layers), flags.activation_checkpointing)
        strategy.shard(model)

    return strategy, load_model(args, world, previous, shard, torch_only=flags.only_by_torch)


if __name__ == "__main__":
    run(lambda: train(parse_run(__doc__, MegatronFlags), build))
