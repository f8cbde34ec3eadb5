"""--tokens_per_pack auto: the largest pack that fits a GPU by the dry run's estimate, and divides the recipe's batch.

Each rank estimates by itself, before the process group is there, and all must find the same. A run that resumes keeps
its packs, whatever the GPUs are then.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch

from common.checkpoint.files import TRAINER_STATE, read_listed
from common.cli import UserError, is_first_on_node
from common.files.runs import list_checkpoints
from common.flags import with_flags
from common.training.arguments import RunArguments
from common.training.resume import requested_checkpoint
from common.training.task import Build
from extras.plan.dry_run.dry_run import GIB, largest_pack
from extras.plan.dry_run.memory_estimate import fake_run

logger = logging.getLogger(__name__)
Arguments = TypeVar("Arguments", bound=RunArguments)


def largest_that_fits(args: Arguments, build: Build) -> Arguments:
    """The flags with a number in place of `auto`.

    A rank's share of --tokens_per_step, in as few packs as fit, rounded down to a multiple of --max_seq_length.
    UserError on a CPU, and where not even one sequence fits.
    """
    if saved := saved_pack(args):
        return with_flags(args, tokens_per_pack=saved)
    ranks, memory = args.dry_run.world_size or 1, args.dry_run.device_memory
    if not args.dry_run.dry_run:
        ranks, memory = int(os.environ.get("WORLD_SIZE", 1)), memory_here(args)
    if memory is None:
        raise UserError(
            "--tokens_per_pack auto: with --dry_run it needs the GPU's memory: add, say, --device_memory 80"
        )
    longest, limit = args.data.max_seq_length, int((memory - args.dry_run.device_reserve) * GIB)
    estimated = with_flags(args, tokens_per_pack=longest, world_size=ranks, device_memory=memory)
    with fake_run(estimated, build) as run:
        largest = largest_pack(run.step, run.step(longest), limit, longest)
    if largest is None:
        raise UserError(
            f"--tokens_per_pack auto: not one sequence of --max_seq_length {longest} fits {memory:.0f} GiB by the dry "
            "run's estimate: --dry_run shows what takes them"
        )
    share = args.data.tokens_per_step * args.process.cp_size // ranks
    packs = max(1, -(-share // largest.tokens))
    tokens = max(longest, share // packs // longest * longest)
    say = logger.info if is_first_on_node() else logger.debug
    say(
        "Packs of %s tokens, %d a rank and step (--tokens_per_pack auto): by the dry run's estimate %s fit %.0f GiB",
        *(f"{tokens:,}", packs, f"{largest.tokens:,}", memory),
    )
    return with_flags(args, tokens_per_pack=tokens)


def memory_here(args: RunArguments) -> float:
    """GiB of this rank's GPU. UserError without one, and for layers that a dry run does not count."""
    reason = None
    if args.process.use_cpu or not torch.cuda.is_available():
        reason = "it fills the memory of a GPU, and this run is on a CPU: give a number"
    elif args.model.backend != "torch" and find_spec("transformer_engine"):
        reason = "the dry run counts the torch backend's layers: add --backend torch, or give a number"
    if reason:
        raise UserError(f"--tokens_per_pack auto: {reason}")
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0))).total_memory / GIB


def saved_pack(args: RunArguments) -> int | None:
    """The size of a pack in the newest readable checkpoint that the run would resume from."""
    if args.dry_run.dry_run:
        return None
    directory = Path(args.checkpoint.output_dir)
    chosen = requested_checkpoint(args.checkpoint.resume_from_checkpoint, directory, restarted=False)
    if args.checkpoint.overwrite_output_dir or chosen is False:
        return None
    paths = [path for _, path in list_checkpoints(directory)] if chosen is True else [chosen]
    for path in paths:
        try:
            return read_listed(path, TRAINER_STATE)["arguments"]["tokens_per_pack"]
        except (UserError, KeyError, TypeError):
            continue  # `plan_resume` says what is wrong with it
    return None
