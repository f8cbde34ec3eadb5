"""What a train script does with its flags: a run, or a dry run of it."""

from __future__ import annotations

from common.ranks.run import distributed_run
from common.tasks.arguments import RunArguments
from common.training.dry_run import dry_run
from common.training.held_memory import Build
from common.training.trainer import train


def start(args: RunArguments, build: Build) -> None:
    """build: a script's own, the model of a run and what its strategy makes of it."""
    if args.dry_run:
        dry_run(args, build)
        return
    with distributed_run(args) as world:
        strategy, built = build(args, world)
        train(strategy, built, args, world)
