#!/usr/bin/env python3
"""Pretrain ESM-2 with DistributedDataParallel: every GPU (or process) holds the whole model.

torchrun --nproc_per_node=8 train_ddp.py --config_name facebook/esm2_t12_35M_UR50D --dataset_dir processed/arrow \
    --output_dir out --bf16 --do_eval
python train_ddp.py ...        the same on one GPU or on a CPU
python train_ddp.py            a short run on generated proteins: configs/sanity.yaml
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

from common.cli import flag, run
from common.ranks.run import distributed_run
from common.ranks.strategy import Strategy
from common.ranks.world import World
from common.training.arguments import TrainArguments, parse_run
from common.training.load_model import Built, load_model
from common.training.trainer import train


@dataclass
class DdpArguments(TrainArguments):
    ddp_bucket_cap_mb: int = flag(25, "Megabytes of gradients that are exchanged at a time.")

    def check(self) -> None:
        self.require_at_least(1, "ddp_bucket_cap_mb")


def replicate(built: Built, world: World, args: DdpArguments) -> Strategy:
    """The strategy: one replica a rank, gradients averaged in buckets while the backward pass still runs."""
    if world.size == 1:
        return Strategy(built.model)
    replica = DistributedDataParallel(
        built.model,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        # All ranks have made the same weights; sent, those in FP8 would be rounded again.
        init_sync=built.precision.masters is None,
        bucket_cap_mb=args.ddp_bucket_cap_mb,
        gradient_as_bucket_view=True,
    )
    return Strategy(replica)


def main() -> None:
    args = parse_run(__doc__, DdpArguments)
    with distributed_run(args) as world:
        built = load_model(args, world)
        train(replicate(built, world, args), built, args, world)


if __name__ == "__main__":
    run(main)
