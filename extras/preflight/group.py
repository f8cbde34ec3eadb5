"""Checks between ranks: shared output directory, clocks, all-reduce over pairs of nodes and over all ranks.

A collective that one rank does not reach hangs and names no rank. So ranks first report through torchrun's key-value
store: each posts a message, rank 0 waits with a timeout and knows which ranks are missing.

Pairs are neighbours in a ring of the nodes, measured in two rounds (three if their number is odd) of disjoint pairs:
hundreds of nodes take as long as four, and each node is in two pairs.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.cli import UserError, one_line
from common.distributed.process_group import join_store, serve_store, store_host, use_loopback_interface
from common.distributed.world import World
from extras.preflight.network import check_nccl_log
from extras.preflight.node import existing
from extras.preflight.report import ERROR, OK, WARN, Finding, RankReport

BAD_CLOCK_S = 300.0  # munge refuses credentials that are older, S3 soon after
SEEN_WITHIN_S = 5.0  # a file of another node; NFS remembers for a while that there was none
ROUTE = "check that the nodes can reach each other (security group, firewall), NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
PINGS = 5
SMALL = 8  # bytes, whose all-reduce is all latency
LARGE = {"cuda": 64 << 20, "cpu": 4 << 20}  # bytes
SLOW = 3.0  # times worse than the median pair: an outlier
GRACE_S = 5  # the other ranks wait longer than rank 0, which has to send the result


class Mailbox:
    """JSON messages between the ranks of one attempt, through the store; `seconds` limits every wait."""

    def __init__(self, world: World, seconds: float):
        self.world, self.seconds = world, seconds
        self._store = self.connect("mailbox")

    def connect(self, purpose: str) -> dist.Store:
        """A new connection to the store: a wait blocks all users of a connection. UserError if it does not answer."""
        if self.world.size == 1:
            return dist.HashStore()
        served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"] if served_by_torchrun else store_host(), int(os.environ["MASTER_PORT"])
        serves = self.world.is_main and not served_by_torchrun and purpose == "mailbox"
        timeout = timedelta(seconds=self.seconds)
        try:
            store = (serve_store if serves else join_store)(host, port, timeout=timeout)
        except RuntimeError as error:
            where = "torchrun on the first node" if served_by_torchrun else "rank 0"
            raise UserError(
                f"rank {self.world.rank}: {where} does not answer at {host}:{port} within {self.seconds:g} s: check "
                "that it runs, and that the nodes can reach that port"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"extras.preflight/{purpose}/{attempt}", store)

    def post(self, name: str, value) -> None:
        """This rank's message under a name."""
        self._store.set(f"{name}/{self.world.rank}", json.dumps(value))

    def collect(self, name: str, ranks: Iterable[int]) -> tuple[dict[int, Any], list[int]]:
        """On rank 0: (the ranks' messages under the name, ranks that posted none in time)."""
        deadline = time.monotonic() + self.seconds
        messages, missing = {}, []
        for rank in ranks:
            value = self._get(f"{name}/{rank}", deadline - time.monotonic())
            if value is None:
                missing.append(rank)
            else:
                messages[rank] = json.loads(value)
        return messages, missing

    def broadcast(self, name: str, value) -> None:
        """Post rank 0's message to all ranks."""
        self._store.set(name, json.dumps(value))

    def receive(self, name: str, patience: float = 1):
        """Rank 0's message, waited for `patience` times as long as a collect; UserError if it does not come."""
        seconds = patience * self.seconds + GRACE_S
        value = self._get(name, seconds)
        if value is None:
            raise UserError(f"rank {self.world.rank}: no message from rank 0 for {seconds:g} s: see its log")
        return json.loads(value)

    def agree(self, name: str, fine: bool, value=None) -> tuple[bool, list]:
        """(whether `fine` is true on all ranks, on rank 0: their values that are not None)."""
        self.post(name, [fine, value])
        values = []
        if self.world.is_main:
            answers, missing = self.collect(name, range(self.world.size))
            values = [value for _, value in answers.values() if value is not None]
            self.broadcast(f"{name}/all", not missing and all(fine for fine, _ in answers.values()))
        return self.receive(f"{name}/all", patience=2), values

    def _get(self, key: str, seconds: float) -> bytes | None:
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            return self._store.get(key)
        except RuntimeError:  # not there in time, or the store is gone
            return None


class GroupChecks:
    """Checks by all ranks together; each begins when all ranks have finished the previous one.

    leaders: {"rank", "host"} of the first rank of each node. A rank's findings go into its `report`; `findings`, of
    the whole run, and `pairs` are rank 0's.
    """

    def __init__(self, mailbox: Mailbox, leaders: list[dict], args, report: RankReport):
        self.mailbox, self.world, self.args, self.report = mailbox, mailbox.world, args, report
        self.hosts = {leader["rank"]: leader["host"] for leader in leaders}
        self.leaders = list(self.hosts)
        self.findings: list[Finding] = []
        self.pairs: list[dict] = []
        self._threads = ThreadPoolExecutor(16)

    def run(self) -> None:
        world, seconds = self.world, self.mailbox.seconds
        several = len(self.leaders) > 1
        if several and self.args.output_dir:
            self._attempt("looking at --output_dir from every node", self._check_shared_output)
        log = self._enable_nccl_log() if several else None
        store = self.mailbox.connect("group")
        started = self._attempt("starting the process group", start_group, world, store, seconds)
        if not self.mailbox.agree("group", bool(started))[0]:
            return
        if several and not (self._check_clocks() and self._check_pairs()):
            return
        what = f"an all-reduce over all {world.size} ranks"
        timing = self._attempt(what, time_all_reduce, world, list(range(world.size)))
        if timing and world.is_main:
            self.findings.append(Finding("all-reduce", OK, f"all {world.size} ranks: {timing}"))
        if log and self.report.leads:
            self.report.findings.append(check_nccl_log(log.read_text(errors="replace") if log.exists() else ""))

    def _check_shared_output(self) -> None:
        """Check that every node sees a file that rank 0 creates beside the checkpoints."""
        where = existing(Path(self.args.output_dir).expanduser().absolute())
        if self.world.is_main:
            try:
                with tempfile.NamedTemporaryFile(prefix=".preflight-", dir=where) as marker:
                    self.mailbox.broadcast("marker", marker.name)
                    self.mailbox.collect("seen", [rank for rank in self.leaders if rank])
            except OSError:  # reported by the check of --output_dir
                self.mailbox.broadcast("marker", "")
            return
        marker = self.mailbox.receive("marker")
        if not marker or not self.report.leads:
            return
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not (seen := os.path.exists(marker)) and time.monotonic() < deadline:
            os.listdir(where)  # makes network filesystems look again
            time.sleep(0.2)
        self.mailbox.post("seen", seen)
        if not seen:
            what = f"{where} is not the directory that rank 0 sees there"
            todo = "mount the same shared volume on every node: checkpoints are written by all and read by all"
            self.report.findings.append(Finding("output", ERROR, what, todo))

    def _check_clocks(self) -> bool:
        """Whether the step has succeeded on all ranks, whatever the clocks show."""
        offsets: dict[int, tuple[float, float]] | None = {}
        if self.report.leads:
            offsets = self._attempt("comparing clocks", measure_clocks, self.world, self.leaders)
        if self.world.is_main and offsets:
            limit = self.args.max_clock_skew
            skewed = [check_clock(self._name(rank), *measured, limit) for rank, measured in offsets.items()]
            worst = max(abs(offset) for offset, _ in offsets.values())
            within = Finding("clocks", OK, f"within {worst * 1e3:.1f} ms of rank 0's")
            self.findings += list(filter(None, skewed)) or [within]
        return self.mailbox.agree("clocks", offsets is not None)[0]

    def _check_pairs(self) -> bool:
        """Whether the step has succeeded on all ranks."""
        timings: list[Timing] = []
        all_fine = True
        for number, pairs in enumerate(ring_rounds(len(self.leaders))):
            pairs = [sorted((self.leaders[a], self.leaders[b])) for a, b in pairs]
            pair = next((pair for pair in pairs if self.world.rank in pair), None)
            timing = group = message = None
            if pair:
                what = f"an all-reduce between {self._name(pair[0])} and {self._name(pair[1])}"
                timing, group = self._attempt(what, time_pair, self.world, pair, self.mailbox.seconds) or (None, None)
                message = asdict(timing) if timing and self.world.rank == pair[0] else None
            # Start the next round when this one is over everywhere, so that a late rank does not slow the next pair.
            all_fine, messages = self.mailbox.agree(f"pairs/{number}", not pair or timing is not None, message)
            timings += [Timing(**message) for message in messages]
            if not all_fine:
                break
            if group is not None:
                dist.destroy_process_group(group)
        if timings:
            self._report_pairs(timings)
        return all_fine

    def _report_pairs(self, timings: list[Timing]) -> None:
        self.pairs = [asdict(timing) for timing in timings]
        slowest = min(timings, key=lambda timing: timing.bandwidth)
        what = f"{len(timings)} pairs of nodes; slowest {self._names(slowest)}: {slowest}"
        self.findings.append(Finding("pairs", OK, what))
        for timing in outliers(timings):
            what = f"{self._names(timing)}: {timing}, {SLOW:g} times worse than the median pair"
            todo = "if a node is in two such pairs, drain it and look at its network"
            self.findings.append(Finding("pairs", WARN, what, todo))

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"

    def _names(self, timing: Timing) -> str:
        return " - ".join(self.hosts[rank] for rank in timing.ranks)

    def _enable_nccl_log(self) -> Path | None:
        """With FI_PROVIDER=efa: a log file to which NCCL, when it starts, will write its choice of network."""
        if self.world.device.type != "cuda" or os.environ.get("FI_PROVIDER") != "efa":
            return None
        file = Path(tempfile.mkdtemp(prefix="preflight-")) / "nccl.log"
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}
        return file

    def _attempt(self, what: str, function: Callable, *arguments) -> Any:
        """The function's result. If it fails or hangs: None and a finding."""
        running = self._threads.submit(function, *arguments)
        try:
            return running.result(self.mailbox.seconds + GRACE_S)
        except TimeoutError:
            message = f"{what}: no answer within {self.mailbox.seconds:g} s"
        except (RuntimeError, OSError, UserError) as error:
            message = f"{what} failed: {one_line(error)[:160]}"
        self.report.findings.append(Finding("network", ERROR, message, ROUTE))
        return None


def check_clock(who: str, offset: float, uncertainty: float, limit: float) -> Finding | None:
    """A finding if a clock, `offset` seconds ahead of rank 0's, differs by more than `limit`."""
    if abs(offset) - uncertainty <= limit:
        return None
    direction = "ahead of" if offset > 0 else "behind"
    what = f"{who} is {abs(offset):.3f} s {direction} rank 0 (known to {uncertainty * 1e3:.1f} ms)"
    level = ERROR if abs(offset) > BAD_CLOCK_S else WARN
    return Finding("clocks", level, what, "start chrony (or another NTP client) on that node")


# ---- measurements -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """An all-reduce among some ranks: seconds of SMALL, bytes per second of LARGE (size / time)."""

    ranks: list[int]
    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:.0f} us, {self.bandwidth / 1e9:.2f} GB/s"


def start_group(world: World, store: dist.Store, seconds: float) -> bool:
    """Make the process group of all ranks; a lost rank raises an exception, instead of hanging or ending this one."""
    use_loopback_interface()
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else NCCL's watchdog ends a rank before it can report
    backend, timeout = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo", timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return True


def clock_offset(samples: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(offset, uncertainty) in seconds of another clock, from samples (sent, its time, received).

    The shortest round trip is the most precise: the other clock was read within it.
    """
    sent, theirs, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return theirs - (sent + received) / 2, (received - sent) / 2


def measure_clocks(world: World, leaders: list[int]) -> dict[int, tuple[float, float]]:
    """On rank 0: the clock offsets of the other nodes' first ranks, which call it too; other ranks do not."""
    time_of = torch.zeros(1, dtype=torch.float64)
    if not world.is_main:
        for _ in range(PINGS):
            dist.recv(time_of, src=0)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
        return {}
    offsets = {}
    for rank in [rank for rank in leaders if rank]:
        samples = []
        for _ in range(PINGS):
            sent = time.time()
            dist.send(time_of, dst=rank)
            dist.recv(time_of, src=rank)
            samples.append((sent, time_of.item(), time.time()))
        offsets[rank] = clock_offset(samples)
    return offsets


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring of `count` nodes, in rounds of disjoint pairs."""
    if count < 3:
        return [[(0, 1)]] if count == 2 else []
    pairs = [(node, (node + 1) % count) for node in range(count)]
    rounds = [pairs[0 : count - count % 2 : 2], pairs[1::2], pairs[count - 1 :] if count % 2 else []]
    return [pairs for pairs in rounds if pairs]


def time_pair(world: World, pair: list[int], seconds: float) -> tuple[Timing, Any]:
    """Only the ranks of the pair call this. Destroy the group before either rank's next pair.

    torch 2.13 names such a group by its ranks and the number of groups a rank has: unless the number is the same on
    both, they wait under different names.
    """
    group: Any = dist.new_group(pair, timeout=timedelta(seconds=seconds), use_local_synchronization=True)
    return time_all_reduce(world, pair, group), group


def time_all_reduce(world: World, ranks: list[int], group: dist.ProcessGroup | None = None) -> Timing:
    """A collective of the group; each rank gets its own timing."""

    def median_seconds(size: int, repeats: int) -> float:
        values = torch.ones(size // 4, device=world.device)
        taken = []
        for _ in range(1 + repeats):  # the first one connects
            started = time.perf_counter()
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
            values[0].item()  # waits for the device
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])

    large = LARGE[world.device.type]
    return Timing(ranks, latency=median_seconds(SMALL, 5), bandwidth=large / median_seconds(large, 3))


def outliers(timings: list[Timing]) -> list[Timing]:
    """Pairs that are SLOW times slower than the median pair in latency or bandwidth; [] of fewer than three."""
    if len(timings) < 3:
        return []
    latency = statistics.median(timing.latency for timing in timings)
    bandwidth = statistics.median(timing.bandwidth for timing in timings)
    return [t for t in timings if t.latency > SLOW * latency or t.bandwidth * SLOW < bandwidth]
