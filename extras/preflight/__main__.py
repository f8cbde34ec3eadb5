"""Check every node before a job starts: GPUs, versions, memory, disks, data, network and clocks, in seconds.

torchrun --nproc_per_node=8 --nnodes=4 ... -m extras.preflight --gpus_per_node=8 train_fsdp2.py FLAGS...

Behind its own flags comes the job's command, which says the rest: model, data, results. Prints a table (and --json),
then one line per problem. Exit status 2 if there is a problem of --fail_on or worse (torchrun's own is 1 whenever a
rank's is not 0). `python -m extras.preflight` checks this machine alone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from common.cli import BAD_INPUT, UserError, run
from common.distributed.process_group import exit_now
from common.distributed.world import World
from common.files.safe_files import write_json
from common.flags import Flags, flag, parse_arguments
from common.training.arguments import RunArguments
from common.training.optim import OPTIMIZERS
from extras.preflight import network, node
from extras.preflight.command import flags_of, model_of, split_command
from extras.preflight.group import GroupChecks, Mailbox
from extras.preflight.report import (
    ERROR,
    LEVELS,
    Finding,
    LocalChecks,
    RankReport,
    differences,
    merge,
    problems,
    table,
)
from extras.prepare.sources.find_files import is_local


@dataclass
class PreflightArguments(Flags):
    dataset_dir: str | None = flag(None, "The directory of the tokenised splits, as for training.")
    dataset: str | None = flag(None, "Instead of it, files or a Hub dataset as they are, as for training.")
    output_dir: str | None = flag(None, "Where checkpoints will go; it is not created.")
    config_name: str | None = flag(
        None, "The model, as for training: do its checkpoints fit on the disk?", "model", "model_name_or_path"
    )
    save_total_limit: int = flag(3, "How many checkpoints the job keeps, as for training.")
    optim: str = flag("adamw_torch_fused", "The optimiser, as for training.", choices=("adamw_torch", *OPTIMIZERS))
    gpus_per_node: int | None = flag(None, "GPUs that each node must have. Default: a GPU for each rank, if any.")
    use_cpu: bool = flag(False, "The job will not use GPUs.")
    dataloader_num_workers: int = flag(1, "Loader workers of the job, which need shared memory.")
    min_free_gb: float = flag(20.0, "Warn of less free disk space than this for checkpoints, in 1e9 bytes.")
    max_clock_skew: float = flag(1.0, "Warn of clocks that differ by more seconds than this.")
    timeout: float = flag(60.0, "Seconds to wait for a rank, a filesystem or a network that does not answer.")
    fail_on: str = flag("error", "The least severe finding that ends in exit status 2.", choices=("error", "warn"))
    json: str | None = flag(
        None, "Write the report there as JSON; -: on standard output (the table on standard error)."
    )

    overrides = {"dataset_dir": ("dataset",), "dataset": ("dataset_dir",)}

    def check(self) -> None:
        if self.dataset and self.dataset_dir:
            raise UserError("--dataset (files as they are) excludes --dataset_dir (the output of step 1)")
        self.require_above(0, "timeout")
        self.require_at_least(0, "save_total_limit")


def main() -> None:
    started = time.monotonic()
    argv, job = split_command(sys.argv[1:])
    defaults = PreflightArguments(**flags_of(job)) if job else PreflightArguments()
    args = parse_arguments(__doc__, defaults, argv, program="python -m extras.preflight")
    world = World.from_environment(args.use_cpu)
    if world.rank:
        logging.disable(logging.WARNING)
    host = socket.gethostname()
    report = RankReport(world.rank, host, os.environ.get("GROUP_RANK", host), leads=world.local_rank == 0)
    checks = LocalChecks(args.timeout)
    start_local_checks(args, job, world, checks)
    mailbox = Mailbox(world, args.timeout)
    leaders, missing = roll_call(mailbox, report)
    if report.leads:
        hosts, master = [leader["host"] for leader in leaders], os.environ.get("MASTER_ADDR")
        checks.start("hostnames", network.check_hostnames, host, hosts, master if world.size > 1 else None)
        use_gpu = world.device.type == "cuda"
        checks.start("interfaces", network.check_interfaces, os.environ, use_gpu, len(leaders))
    checks.finish(report)
    group = GroupChecks(mailbox, leaders, args, report)
    if world.size > 1 and not missing:
        group.run()
    mailbox.post("report", asdict(report))
    if world.is_main:
        posted, silent = mailbox.collect("report", [rank for rank in range(world.size) if rank not in missing])
        reports = [RankReport.from_json(value) for value in posted.values()]
        findings = [absent(rank, leaders, world, args.timeout, "has not started") for rank in missing]
        findings += group.findings
        findings += [absent(rank, leaders, world, args.timeout, "stopped answering") for rank in silent]
        findings += differences(reports)
        status = publish(merge(reports, findings, time.monotonic() - started) | {"pairs": group.pairs}, args)
        mailbox.broadcast("status", status)
        mailbox.collect("left", [r.rank for r in reports if r.rank])  # before the store ends with this process
    else:
        status = mailbox.receive("status", patience=4)
        mailbox.post("left", True)
    raise SystemExit(status)


def start_local_checks(args: PreflightArguments, job: RunArguments | None, world: World, checks: LocalChecks) -> None:
    """Start the checks that need no other rank; the first rank of a node checks what its ranks share."""
    use_gpu = world.device.type == "cuda"
    if use_gpu:
        checks.start("gpus", node.check_own_gpu, world.local_rank)
    if world.local_rank:
        return
    required = args.gpus_per_node
    if required is None and use_gpu and world.size > 1:
        required = world.local_size
    checks.start("gpus", node.check_gpus, required, args.use_cpu)
    checks.start("versions", node.versions)
    checks.start("shm", node.check_shm, args.dataloader_num_workers)
    if args.output_dir:
        name = args.config_name or ""
        own = job is not None and name == job.model_named
        make = partial(model_of, job) if own else partial(node.named_model, name)
        output = (args.output_dir, args.min_free_gb, name, make, args.save_total_limit, args.optim)
        checks.start("output", node.check_output, *output)
    checks.start("cache", node.check_cache, bool(args.dataset) and not is_local(args.dataset))
    if args.dataset_dir:
        checks.start("dataset", node.check_dataset_dir, args.dataset_dir)
    if args.dataset and (is_local(args.dataset) or world.is_main):  # the Hub limits the rate of requests
        checks.start("dataset", node.check_dataset, args.dataset)
    checks.start("efa", network.check_efa, os.environ, use_gpu)


def roll_call(mailbox: Mailbox, report: RankReport) -> tuple[list[dict], list[int]]:
    """(the first rank of each node, missing ranks); every rank gets the same answer."""
    world = mailbox.world
    mailbox.post("present", {"rank": report.rank, "host": report.host, "leads": report.leads})
    if world.is_main:
        present, missing = mailbox.collect("present", range(world.size))
        mailbox.broadcast("roll", [[rank for rank in present.values() if rank["leads"]], missing])
    leaders, missing = mailbox.receive("roll")
    return leaders, missing


def absent(rank: int, leaders: list[dict], world: World, seconds: float, what: str) -> Finding:
    """A missing rank. torchrun numbers ranks node by node: its host is that of its node's first rank."""
    hosts = [leader["host"] for leader in leaders if 0 <= rank - leader["rank"] < world.local_size]
    host = f" ({hosts[-1]})" if hosts else f" (node {rank // world.local_size}, no rank of which has started)"
    todo = "see that node's log: is its process alive, can it import torch, does its filesystem answer?"
    return Finding("ranks", ERROR, f"rank {rank}{host} {what} within {seconds:g} s", todo)


def publish(report: dict, args: PreflightArguments) -> int:
    """Print and write the report; the exit status."""
    text_to = sys.stderr if args.json == "-" else sys.stdout
    failed = LEVELS.index(report["level"]) >= LEVELS.index(args.fail_on)
    print(table(report), file=text_to, flush=True)
    for line in problems(report):
        print(line, file=sys.stderr, flush=True)
    if args.json == "-":
        print(json.dumps(report, indent=4), flush=True)
    elif args.json:
        try:
            write_json(Path(args.json), report)
        except OSError as error:  # the other ranks still wait for the status
            print(f"error: --json {args.json}: {error.strerror}", file=sys.stderr, flush=True)
            failed = True
    return BAD_INPUT if failed else 0


if __name__ == "__main__":
    try:
        run(main)
    except BaseException as end:
        exit_now(end)  # without joining threads: one may wait for a filesystem or a rank that never answers
