#!/usr/bin/env python3
r"""Pretrain ESM-2 with DistributedDataParallel: every GPU (or process) holds the whole model.

torchrun --nproc_per_node=8 train_ddp.py --config_name facebook/esm2_t12_35M_UR50D \
    --dataset_dir processed/arrow --output_dir out --bf16 --do_eval
python train_ddp.py ...        the same on one GPU or on a CPU
python train_ddp.py            a short run on generated proteins: configs/sanity.yaml
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from dataclasses import dataclass

from common.cli import UserError, run
from common.distributed.strategy import ReplicaFlags, Strategy, replicate
from common.distributed.world import World
from common.models.layers.recompute import save_activations
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.loop import train
from common.training.task import BuiltModel


@dataclass(frozen=True)
class DdpFlags(ReplicaFlags):
    unlisted = ("cp_size",)  # of train_ddp_cp.py

    def check_in(self, run: RunArguments) -> None:
        if run.process.cp_size > 1:
            raise UserError(f"--cp_size {run.process.cp_size}: no context parallelism here: use train_ddp_cp.py")


def build(args: RunArguments, world: World, previous: dict[str, str]) -> tuple[Strategy, BuiltModel]:
    built = load_model(args, world, previous)
    save_activations(list(built.model.layers), args.strategy.recomputed)
    # All ranks have made the same weights; sent, those in FP8 would be rounded again.
    return replicate(built.model, world, args.strategy, init_sync=built.precision.masters is None), built


if __name__ == "__main__":
    run(lambda: train(parse_run(__doc__, DdpFlags), build))
