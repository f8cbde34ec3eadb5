#!/usr/bin/env python3
r"""Pretrain ESM-2 with DistributedDataParallel and context parallelism: --cp_size ranks share each pack of long ones.

torchrun --nproc_per_node=8 train_ddp_cp.py --cp_size 2 --config_name facebook/esm2_t33_650M_UR50D \
    --dataset_dir processed/arrow --output_dir out --bf16 --max_seq_length 8192
torchrun --nproc_per_node=2 train_ddp_cp.py      a short run on generated proteins: configs/sanity_cp.yaml
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from dataclasses import dataclass

from common.cli import run
from common.distributed.strategy import ReplicaFlags, Strategy, replicate
from common.distributed.world import World
from common.flags import flag
from common.models.layers.recompute import save_activations
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.loop import train
from common.training.task import BuiltModel


@dataclass(frozen=True)
class DdpCpFlags(ReplicaFlags):
    changed = {"cp_size": flag(2, "Neighbouring ranks that share each pack. Raise it for longer sequences.")}


def build(args: RunArguments, world: World, previous: dict[str, str]) -> tuple[Strategy, BuiltModel]:
    built = load_model(args, world, previous)
    save_activations(list(built.model.layers), args.strategy.recomputed)
    return replicate(built.model, world, args.strategy), built


if __name__ == "__main__":
    run(lambda: train(parse_run(__doc__, DdpCpFlags, without_flags="sanity_cp.yaml"), build))
