#!/usr/bin/env python3
r"""Pretrain ESM-2 with Megatron-FSDP: optimiser state, gradients and weights sharded over the GPUs (ZeRO-1, 2 or 3).

torchrun --nproc_per_node=8 train_mfsdp.py --config_name facebook/esm2_t33_650M_UR50D \
    --dataset_dir processed/arrow --output_dir out --bf16 --do_eval
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from common.cli import Missing, UserError, flag, run
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.models.layers.recompute import RecomputeFlags, save_activations
from common.training.load_model import load_model
from common.training.loop import train
from common.training.registry import parse_run
from common.training.resume import ResumePlan
from common.training.task import BuiltModel
from extras.megatron import STRATEGIES, Layout, MegatronSharded


@dataclass
class MegatronFlags(RecomputeFlags):
    group = "memory and exchange"
    rarely = (
        "init_model_with_meta_device",
        "calculate_per_token_loss",
        "check_for_nan_in_grad",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "average_in_collective",
    )

    zero_dp_strategy: str = flag(
        "optim_grads_params", "; ".join(f"{name}: {what}" for name, what in STRATEGIES.items()) + "."
    )
    hsdp_shard_size: int | None = flag(
        None, "Ranks that share one copy. Default: all; for FSDP2 with hybrid, a node's."
    )
    preserve_fp32_weights: bool = flag(True, "With --bf16: fp32 master weights; else weights and moments are bf16.")
    grad_reduce_in_fp32: bool = flag(True, "With --bf16: gradients travel in fp32; else in bf16, half the traffic.")
    init_model_with_meta_device: bool | None = flag(
        None, "Make the weights one bucket at a time. Default: where anything is dealt out."
    )
    calculate_per_token_loss: bool = flag(
        False, "Sum gradients over ranks instead of averaging; the loss is one a masked residue either way."
    )
    sync_model_each_microbatch: bool = flag(False, "Wait for the exchange of every micro-batch.")
    check_for_nan_in_grad: bool = flag(True, "Always: a step whose gradient norm is no number is skipped.")
    overlap_grad_reduce: bool = flag(True, "Exchange gradients during the backward pass: always.")
    overlap_param_gather: bool = flag(True, "Gather weights ahead of their turn: always.")
    average_in_collective: bool = flag(False, "NCCL averages instead of scaling and adding: refused.")

    def missing(self) -> Iterator[Missing]:
        for name in ("preserve_fp32_weights", "grad_reduce_in_fp32"):
            if not getattr(self, name) and not self.bf16:
                yield Missing("--bf16", f"--{name} False is about its bf16 numbers")

    def check(self) -> None:
        self.require_choice("zero_dp_strategy", STRATEGIES)
        for flag_given, reason in self.refused():
            raise UserError(f"{flag_given}: {reason}")

    def refused(self) -> Iterator[tuple[str, str]]:
        """(flag as given, why not): what megatron-fsdp 0.6.1 does wrongly, most of it without a word."""
        strategy, hybrid = self.zero_dp_strategy, self.hsdp_shard_size is not None
        if not self.overlap_grad_reduce:
            yield (
                "--overlap_grad_reduce False",
                "gives wrong gradients with optim, and changes nothing with the others: drop the flag",
            )
        if not self.overlap_param_gather:
            yield (
                "--overlap_param_gather False",
                "computes with the weights of the step before, except with optim_grads_params: drop the flag",
            )
        if self.average_in_collective:
            yield "--average_in_collective", "crashes without expert parallelism: drop the flag"
        if not self.check_for_nan_in_grad:
            yield "--check_for_nan_in_grad False", "the norm is always looked at; see --max_skipped_steps"
        if self.init_model_with_meta_device and strategy == "no_shard":
            yield "--init_model_with_meta_device", "no_shard needs the whole model in memory anyway: drop the flag"
        if hybrid and strategy == "no_shard":
            yield "--hsdp_shard_size", "no_shard deals nothing out: drop the flag"
        if self.hsdp_shard_size == 1:
            yield "--hsdp_shard_size 1", "deals nothing out: give --zero_dp_strategy no_shard instead"
        if self.sync_model_each_microbatch and (hybrid or strategy in ("no_shard", "optim")):
            yield (
                "--sync_model_each_microbatch",
                "adds up what is added up already, but for optim_grads and optim_grads_params without "
                "--hsdp_shard_size: drop the flag",
            )

    def layout(self) -> Layout:
        on_meta = self.init_model_with_meta_device
        return Layout(
            self.zero_dp_strategy,
            self.hsdp_shard_size,
            bf16=self.bf16,
            masters=self.preserve_fp32_weights,
            reduce_dtype=torch.float32 if self.grad_reduce_in_fp32 else torch.bfloat16,
            meta_device=self.zero_dp_strategy != "no_shard" if on_meta is None else on_meta,
            sums_gradients=self.calculate_per_token_loss,
            sync_each_batch=self.sync_model_each_microbatch,
        )


def build(args: MegatronFlags, world: World, resume: ResumePlan | None = None) -> tuple[Strategy, BuiltModel]:
    strategy = MegatronSharded(args.layout(), world)

    def shard(model: nn.Module) -> None:
        save_activations(list(model.layers), args.activation_checkpointing, offload=False)
        strategy.shard(model)

    return strategy, load_model(args, world, resume, shard, torch_only=args.only_by_torch)


if __name__ == "__main__":
    run(lambda: train(parse_run(__doc__, MegatronFlags), build))
