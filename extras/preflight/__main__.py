"""Look before a job is started: GPUs, versions, memory, disks, data, network and clocks of every node, in seconds.

torchrun --nproc_per_node=8 --nnodes=4 ... -m extras.preflight --dataset_dir processed/arrow --output_dir out

A table (and --json) of what was found, then one line a problem. Exit status 2 if there is one of --fail_on or worse
(torchrun's own is 1 whenever a rank's is not 0). `python -m extras.preflight` looks at this machine alone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.cli import BAD_INPUT, UserError, one_line, run
from common.distributed.run import leave
from common.distributed.world import World
from common.files.json_files import write_json
from common.flags import Flags, flag, parse_arguments
from extras.preflight import network, node
from extras.preflight.exchange import Exchange, Meeting
from extras.preflight.report import ERROR, LEVELS, Finding, RankReport, differences, merge, problems, table
from extras.sources.dataset import is_local

logger = logging.getLogger(__name__)


@dataclass
class PreflightArguments(Flags):
    dataset_dir: str | None = flag(None, "The directory of the tokenised splits, as for training.")
    dataset: str | None = flag(None, "Instead of it, files or a Hub dataset as they are, as for training.")
    output_dir: str | None = flag(None, "Where checkpoints will go; it is not created.")
    config_name: str | None = flag(
        None, "The model, as for training: is there room for its checkpoints?", "model", "model_name_or_path"
    )
    save_total_limit: int = flag(3, "How many checkpoints the job keeps, as for training.")
    gpus_per_node: int | None = flag(None, "GPUs that each node must have. Default: a GPU for each rank, if any.")
    use_cpu: bool = flag(False, "The job will not use GPUs.")
    dataloader_num_workers: int = flag(1, "Loader workers of the job, which need shared memory.")
    min_free_gb: float = flag(20.0, "Warn of less room than this for checkpoints, in 1e9 bytes.")
    max_clock_skew: float = flag(1.0, "Warn of clocks that differ by more seconds than this.")
    timeout: float = flag(60.0, "Seconds to wait for a rank, a filesystem or a network that does not answer.")
    fail_on: str = flag("error", "error, or warn: what the exit status 2 is for.")
    json: str | None = flag(
        None, "Write the report there as JSON; -: on standard output (the table on standard error)."
    )

    overrides = {"dataset_dir": ("dataset",), "dataset": ("dataset_dir",)}

    def check(self) -> None:
        self.require_choice("fail_on", ("error", "warn"))
        if self.dataset and self.dataset_dir:
            raise UserError("--dataset (files as they are) excludes --dataset_dir (the output of step 1)")
        self.require_above(0, "timeout")
        self.require_at_least(0, "save_total_limit")


def main() -> None:
    started = time.monotonic()
    args = parse_arguments(__doc__, PreflightArguments)
    world = World.from_environment(args.use_cpu)
    if world.rank:
        logging.disable(logging.WARNING)
    report, whole_run = RankReport(*_place(world)), []
    attempts = Attempts(args.timeout)
    meeting = None
    local_checks(args, world, attempts)
    if world.size > 1:
        meeting = Meeting(world, args.timeout)
        present, missing = roll_call(meeting, report)
        num_nodes = sum(each["leads"] for each in present)
        whole_run += [absent(rank, present, world, args.timeout) for rank in missing]
        if report.leads:
            hosts = [each["host"] for each in present]
            master = os.environ.get("MASTER_ADDR")
            attempts.start("hostnames", network.check_hostnames, report.host, hosts, master)
    else:
        num_nodes, missing = 1, []
        attempts.start("hostnames", network.check_hostnames, report.host, [], None)
    if report.leads:
        attempts.start("interfaces", network.check_interfaces, os.environ, world.device.type == "cuda", num_nodes)
    attempts.finish(report)
    reports, pairs = [report], []
    if meeting is not None:
        if not missing:
            exchange = Exchange(meeting, present, args)
            exchange.run(report)
            whole_run += exchange.findings
        meeting.post("report", report.to_json())
        if world.is_main:
            ranks = [rank for rank in range(world.size) if rank not in missing]
            posted, silent = meeting.collect("report", ranks)
            reports = [RankReport.from_json(value) for value in posted.values()]
            pairs = exchange.pairs if not missing else []
            whole_run += [absent(rank, present, world, args.timeout, "has gone silent") for rank in silent]
    if world.is_main:
        whole_run += differences(reports)
        merged = merge(reports, whole_run, time.monotonic() - started) | {"pairs": pairs}
        status = publish(merged, args)
        if meeting is not None:
            meeting.tell("status", status)
            meeting.collect("left", [r.rank for r in reports if r.rank])  # before the store goes with this process
    else:
        status = meeting.hear("status", patience=4)
        meeting.post("left", True)
    raise SystemExit(status)


def local_checks(args: PreflightArguments, world: World, attempts: Attempts) -> None:
    """Start what a rank can look at by itself; the first of a node looks at what its ranks share."""
    use_gpu = world.device.type == "cuda"
    if use_gpu:
        attempts.start("gpus", node.check_own_gpu, world.local_rank)
    if world.local_rank:
        return
    asked = args.gpus_per_node
    if asked is None and use_gpu and world.size > 1:
        asked = world.local_size
    attempts.start("gpus", node.check_gpus, asked, args.use_cpu)
    attempts.start("versions", node.versions)
    attempts.start("shm", node.check_shm, args.dataloader_num_workers)
    if args.output_dir:
        room = (args.output_dir, args.min_free_gb, args.config_name, args.save_total_limit)
        attempts.start("output", node.check_output, *room)
    attempts.start("cache", node.check_cache, bool(args.dataset) and not is_local(args.dataset))
    if args.dataset_dir:
        attempts.start("dataset", node.check_dataset_dir, args.dataset_dir)
    if args.dataset and (is_local(args.dataset) or world.is_main):  # the Hub counts its requests
        attempts.start("dataset", node.check_dataset, args.dataset)
    attempts.start("efa", network.check_efa, os.environ, use_gpu)


class Attempts:
    """Checks that run at the same time, each in a thread: one that hangs is given up and named."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._pool = ThreadPoolExecutor(16)
        self._running: list[tuple[str, Future]] = []

    def start(self, check: str, function: Callable, *arguments) -> None:
        self._running.append((check, self._pool.submit(function, *arguments)))

    def finish(self, report: RankReport) -> None:
        """Put what they found into the report: findings, and facts that every node must share."""
        deadline = time.monotonic() + self.seconds
        for check, running in self._running:
            try:
                found = running.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                what = f"no answer within {self.seconds:g} s"
                found = Finding(check, ERROR, what, "see whether the filesystem or network behind it is alive")
            except UserError as error:
                found = Finding(check, ERROR, str(error))
            except (OSError, RuntimeError) as error:
                found = Finding(check, ERROR, one_line(error))
            for each in found if isinstance(found, list | tuple) else [found]:
                if isinstance(each, Finding):
                    report.findings.append(each)
                elif each:
                    report.facts |= each


def _place(world: World) -> tuple[int, str, str, bool]:
    host = socket.gethostname()
    return world.rank, host, os.environ.get("GROUP_RANK", host), world.local_rank == 0


def roll_call(meeting: Meeting, report: RankReport) -> tuple[list[dict], list[int]]:
    """(the ranks that lead a node, ranks that have not come). Every rank gets the same answer."""
    world = meeting.world
    mine = {"rank": report.rank, "host": report.host, "node": report.node, "leads": report.leads}
    meeting.post("present", mine)
    if world.is_main:
        present, missing = meeting.collect("present", list(range(world.size)))
        meeting.tell("roll", [[each for each in present.values() if each["leads"]], missing])
    return tuple(meeting.hear("roll"))


def absent(rank: int, leaders: list[dict], world: World, seconds: float, what: str = "has not come") -> Finding:
    """A rank that others wait for. torchrun numbers ranks node by node: its host is that of its leader."""
    hosts = [each["host"] for each in leaders if each["rank"] <= rank < each["rank"] + world.local_size]
    host = f" ({hosts[-1]})" if hosts else f" (node {rank // world.local_size}, of which nobody has come)"
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
        except OSError as error:  # the other ranks still wait to be told the status
            print(f"error: --json {args.json}: {error.strerror}", file=sys.stderr, flush=True)
            failed = True
    return BAD_INPUT if failed else 0


if __name__ == "__main__":
    try:
        run(main)
    except BaseException as end:
        leave(end)  # at once: a thread may still wait for a filesystem or a rank that never answers
