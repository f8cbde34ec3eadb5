"""What a train script does with its flags: a run, or a dry run of it."""

from __future__ import annotations

from common.distributed.run import distributed_run
from common.training.arguments import RunArguments
from common.training.loop import train
from extras.dry_run.dry_run import dry_run
from extras.dry_run.memory_estimate import Build


def start(args: RunArguments, build: Build) -> None:
    """build: a script's own, the model of a run and what its strategy makes of it."""
    if args.dry_run.dry_run:
        dry_run(args, build)
        return
    with distributed_run(args.process) as world:
        strategy, built = build(args, world)
        train(strategy, built, args, world)
