"""What a train script does with its flags: a run, or a dry run of it."""

from __future__ import annotations

from common.ranks.run import distributed_run
from common.training.arguments import TrainArguments
from common.training.dry_run import Build, dry_run
from common.training.trainer import train


def start(args: TrainArguments, build: Build) -> None:
    """build: a script's own, the model of a run and what its strategy makes of it."""
    if args.dry_run:
        dry_run(args, build)
        return
    with distributed_run(args) as world:
        strategy, built = build(args, world)
        train(strategy, built, args, world)
