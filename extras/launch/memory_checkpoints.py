"""In-memory checkpoints: the state of a run's last steps, in memory of the launcher, which outlives the ranks.

After every n-th step a rank copies its share of the state (as for a checkpoint on the disk: PinnedStager) into one of
two slots in turn, so that a kill at any moment leaves a whole one. A thread then adds checksums and, if there are
several nodes, exchanges copies with the ranks of the same place on the nodes before and after (a ring). A restart
takes the newest step of which the ranks hold every share, and reads it as any checkpoint, on any number of ranks.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import statistics
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.metadata import StoredChunk, decode
from common.checkpoint.pinned_stager import PinnedStager, addresses, bytes_of_tensors, share_of
from common.checkpoint.reader import Reader
from common.checkpoint.writer import shard_name
from common.cli import MEMORY, MachineFault, UserError, one_line
from common.data.loader import merge_positions
from common.distributed.world import PeerFailed, World
from common.training.trainer_state import TrainerState
from extras.launch.memory import SLOTS, Slot, available_memory

logger = logging.getLogger(__name__)

MOST_COST = 0.02  # of a step's time, by default
MOST_MEMORY = 0.5  # of what is free on a node before the first save, by default
MEASURED = 3  # saves before the default is decided, after the first two, which allocate the memory


class MemoryCheckpoints:
    """A rank's in-memory checkpoints. A context manager: a state that ended in a fault of a machine is forgotten."""

    def __init__(self, world: World):
        self.world, self.paths = world, os.environ[MEMORY].split()
        self.slots = [Slot(path) for path in self.paths[SLOTS * world.local_rank :][:SLOTS]]
        self.saver: Saver | None = None

    def __enter__(self) -> MemoryCheckpoints:
        return self

    def __exit__(self, kind, error: BaseException | None, stack) -> None:
        if kind is None and self.saver:
            self.saver.wait()
        if isinstance(error, MachineFault | PeerFailed):
            for slot in self.slots:
                slot.begin()

    def begin(self, checkpointer: Checkpointer, every: int | None, step: int) -> None:
        """Before training from `step`, all ranks together. every: steps between saves; None: see Saver."""
        self.saver = Saver(self, checkpointer, every, step)

    def after_step(self, state: TrainerState, seconds: float) -> None:
        """All ranks together. seconds: that the step took."""
        assert self.saver, "begin comes first"
        self.saver.after_step(state, seconds)

    def newest(self) -> MemoryCheckpoint | None:
        """The newest step of which the ranks hold every share; None if there is none. All ranks together."""
        world = self.world
        contents = [slot.read() for slot in self.slots]
        held = [each and [each.about["step"], each.about["size"], each.about["rank"]] for each in contents]
        shares: dict[tuple[int, int], dict[int, list[Place]]] = {}  # {(step, ranks): {rank: where}}
        for rank, (node, slots) in enumerate(world.gather((world.rank - world.local_rank, held))):
            for number, (step, size, of) in ((n, each) for n, each in enumerate(slots) if each):
                shares.setdefault((step, size), {}).setdefault(of, []).append(Place(rank, node, number))
        whole = [key for key, of_ranks in shares.items() if len(of_ranks) == key[1]]
        if not whole:
            return None
        places = shares[max(whole)]
        mine = {}
        for of, (place, *_) in places.items():
            if place.rank == world.rank and (content := contents[place.slot]):
                mine[str(of)] = content.about
        abouts = {int(of): about for part in world.gather(mine) for of, about in part.items()}
        try:
            return MemoryCheckpoint(self, [abouts[of] for of in range(len(abouts))], places)
        except (UserError, ValueError, KeyError, TypeError) as error:
            logger.warning("The state in memory is not used: %s", one_line(error))
            return None


@dataclass(frozen=True)
class Place:
    """Where a share is: in a slot of a rank; node: the first rank there."""

    rank: int
    node: int
    slot: int


class MemoryCheckpoint:
    """A whole state in the ranks' memory; to a run what a checkpoint's directory is.

    abouts, places: by rank of the run that wrote it.
    """

    def __init__(self, memory: MemoryCheckpoints, abouts: list[dict], places: dict[int, list[Place]]):
        first = abouts[0]
        self.memory, self.places, self.step, self.model = memory, places, first["step"], first["model"]
        position = merge_positions([about["state"]["position"] for about in abouts])
        self.state = TrainerState.read(first["state"] | {"position": position}, str(self))
        self.tensors: dict[str, dict] = {}
        seen = set()
        for number, about in enumerate(abouts):
            for name, stored in about["tensors"].items():
                chunks = self.tensors.setdefault(name, stored | {"chunks": []})["chunks"]
                for offsets, sizes, begin, length in stored["chunks"]:
                    if (key := (name, *offsets)) not in seen:  # each rank has the scalars
                        seen.add(key)
                        chunks.append([offsets, sizes, number, begin, length])
        self.sizes = {shard_name(number): about["bytes"] for number, about in enumerate(abouts)}
        self.metadata = decode({"files": list(self.sizes), "tensors": self.tensors}, self.sizes)

    def __str__(self) -> str:
        return f"the state in memory, of step {self.step}"

    def reader(self, group: dist.ProcessGroup) -> MemoryReader:
        return MemoryReader(self, group)


class MemoryReader(Reader):
    """Reads a MemoryCheckpoint; `read_data` is collective. Shares that are on other nodes come one at a time."""

    def __init__(self, checkpoint: MemoryCheckpoint, group: dist.ProcessGroup):
        super(Reader, self).__init__("memory")
        self.checkpoint, self.group, self.metadata = checkpoint, group, checkpoint.metadata
        self.world, self.fetched = checkpoint.memory.world, {}
        self.ranks = {name: rank for rank, name in enumerate(checkpoint.sizes)}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[int, list] = {}
        for item in plan.items:
            items.setdefault(self.ranks[self.storage_data[item.storage_index].file], []).append(item)
        far = [of for of in sorted(items) if self._near(of) is None]
        for of in items.keys() - far:
            super().read_data(LoadPlan(items[of]), planner)
        asked = self.world.gather(far, self.group)
        for turn in range(max(map(len, asked))):
            of = far[turn] if turn < len(far) else None
            self._exchange([(rank, wanted[turn]) for rank, wanted in enumerate(asked) if turn < len(wanted)])
            if of is not None:
                super().read_data(LoadPlan(items[of]), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _exchange(self, wanted: list[tuple[int, int]]) -> None:
        """Send and receive shares. wanted: (the rank that gets it, whose share)."""
        self.fetched, works = {}, []
        for rank, of in wanted:
            holder = self.checkpoint.places[of][0]
            if holder.rank == self.world.rank:
                content = self.checkpoint.memory.slots[holder.slot].read()
                assert content is not None, "it was whole before"
                works.append(dist.isend(content.data, rank, self.group))
            elif rank == self.world.rank:
                self.fetched[of] = torch.empty(self.checkpoint.sizes[shard_name(of)], dtype=torch.uint8)
                works.append(dist.irecv(self.fetched[of], holder.rank, self.group))
        for work in works:
            work.wait()

    def _near(self, of: int) -> Place | None:
        node = self.world.rank - self.world.local_rank
        return next((place for place in self.checkpoint.places[of] if place.node == node), None)

    def open_shard(self, name: str) -> Any:
        of = self.ranks[name]
        place = self._near(of)
        if place is None:
            return nullcontext(self.fetched[of])
        path = self.checkpoint.memory.paths[SLOTS * (place.rank - place.node) + place.slot]
        content = Slot(path).read()
        assert content is not None, "it was whole before, and ranks write only after the first step"
        return nullcontext(content.data)

    def read_chunk(self, file: Any, name: str, stored: StoredChunk) -> Tensor:
        return file[stored.begin : stored.begin + stored.length].view(stored.dtype).view(stored.sizes)


@dataclass(frozen=True)
class Layout:
    """How a slot's data are laid out: bytes, tensors as in metadata.json.

    sources: the optimiser's tensors: while they are these, the copies can be repeated; None: they cannot, since some
    tensors of the state are made when it is asked for.
    """

    sources: list[Tensor] | None
    tensors: dict[str, dict]
    size: int


class Saver:
    """Writes a run's in-memory checkpoints.

    every: steps between them; None: as often as costs less than MOST_COST of a step's time, which the first ones tell,
    and none if they would take more than MOST_MEMORY of what is free.
    """

    def __init__(self, memory: MemoryCheckpoints, checkpointer: Checkpointer, every: int | None, step: int):
        world = memory.world
        self.world, self.checkpointer, self.every, self.first = world, checkpointer, every, step + 2
        self.own, self.partners = memory.slots[: SLOTS // 2], memory.slots[SLOTS // 2 :]
        optimizer, in_passes = checkpointer.optimizer, bool(checkpointer.scales)
        how = {"in_passes": in_passes, "repeats": True}
        self.stagers = [PinnedStager(world.device, optimizer, allocate=slot.allocate, **how) for slot in self.own]
        self.layouts: list[Layout | None] = [None] * len(self.own)
        self.turn, self.costs, self.seconds = 0, [], []  # costs: of each save; seconds: of each step before one
        self.thread: threading.Thread | None = None
        self.failure: OSError | RuntimeError | None = None
        self.warned = False
        self.partner_group: dist.ProcessGroup | None = None
        if set(world.gather(world.local_size)) == {world.local_size} != {world.size}:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
            assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
            self.partner_group = group

    def after_step(self, state: TrainerState, seconds: float) -> None:
        every, step = self.every, state.step
        if every == 0 or state.skipped_lately or (step % every if every else step < self.first):  # see SaveSchedule
            return
        if every is None and not self.seconds and not self._fits():
            self.every = 0
            return
        self.save(state)
        if every is None:
            self.seconds.append(seconds)
            if len(self.seconds) == len(self.own) + MEASURED:
                self._decide()

    def save(self, state: TrainerState) -> None:
        """Return once the state is copied, on a GPU once its copy is launched."""
        started = time.perf_counter()
        self.wait()
        if self.failure and not self.warned:  # and yet the run goes on
            self.warned = True
            logger.warning("Not all state is kept in memory, restarts may lose more: %s", one_line(self.failure))
        self.turn = turn = (self.turn + 1) % len(self.own)
        about, size = b"", 0
        try:
            self.own[turn].begin()
            layout = self._copy(turn)
            about, size = self._about(state, layout), layout.size
        except OSError as error:
            self.failure = error
        self.costs.append(time.perf_counter() - started)
        self.thread = threading.Thread(target=self._finish, args=(turn, about, size), name="memory checkpoint")
        self.thread.start()

    def wait(self) -> None:
        """Wait for the last save."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def _copy(self, turn: int) -> Layout:
        """Copy this rank's share into its slot."""
        layout, stager, optimizer = self.layouts[turn], self.stagers[turn], self.checkpointer.optimizer
        sources = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
        before = layout.sources if layout else None
        if layout and before and len(sources) == len(before) and all(map(operator.is_, sources, before)):
            stager.repeat()
            return layout
        share = self._share()
        copies = stager.stage(share)
        planner = DefaultSavePlanner()
        planner.set_up_planner(self.checkpointer.dcp_state(copies, True), is_coordinator=self.world.is_main)
        begin, tensors, size = stager.memory.data_ptr(), {}, 0
        for item in planner.create_local_plan().items:
            assert item.tensor_data is not None, f"{item.index.fqn}: only tensors are saved"
            copy: Any = planner.resolve_data(item)
            chunk, properties = item.tensor_data.chunk, item.tensor_data.properties
            at = copy.data_ptr() - begin if copy.numel() else 0
            tensors[item.index.fqn] = {
                "dtype": str(properties.dtype).removeprefix("torch."),
                "shape": list(item.tensor_data.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes), at, copy.nbytes]],
            }
            size = max(size, at + copy.nbytes)
        is_live = addresses(share) == addresses(self._share())
        self.layouts[turn] = layout = Layout(sources if is_live else None, tensors, size)
        return layout

    def _share(self) -> dict:
        return share_of(self.checkpointer.state(), self.world.rank, self.world.size)

    def _fits(self) -> bool:
        """Whether every node has the memory; all ranks together."""
        slots = len(self.own) + (len(self.partners) if self.partner_group else 0)
        needed, free = slots * self.world.local_size * bytes_of_tensors(self._share()), available_memory()
        fits = not self.world.any(needed > MOST_MEMORY * free)
        if not fits:
            logger.info(
                "State is not kept in memory: it would take %.3g GB a node, of %.3g GB that are free on this one; "
                "restarts go on from a checkpoint (--memory_save_steps 1 keeps it all the same)",
                needed / 1e9,
                free / 1e9,
            )
        return fits

    def _about(self, state: TrainerState, layout: Layout) -> bytes:
        place = {"step": state.step, "rank": self.world.rank, "size": self.world.size, "bytes": layout.size}
        model = {"model": self.checkpointer.fingerprint, "tensors": layout.tensors, "state": asdict(state)}
        return json.dumps(place | model).encode()

    def _finish(self, turn: int, about: bytes, size: int) -> None:
        started, checksums = time.thread_time(), [0, 0]
        try:
            if about:
                self.stagers[turn].wait()
                checksums = self.own[turn].commit(about, size)
            if self.world.device.type == "cpu":  # it takes from the step's own
                self.costs[-1] += time.thread_time() - started
            if self.partner_group:
                self._exchange(turn, about, size, checksums)
        except (OSError, RuntimeError) as error:
            self.failure = error

    def _exchange(self, turn: int, about: bytes, size: int, checksums: list[int]) -> None:
        """Send this rank's share to the next node, and keep that of the node before. Empty ones, too: ranks wait."""
        rank, ranks, node, group = self.world.rank, self.world.size, self.world.local_size, self.partner_group
        to, of = (rank + node) % ranks, (rank - node) % ranks

        def exchange(sent: Tensor, received: Tensor) -> None:
            for work in (dist.isend(sent, to, group), dist.irecv(received, of, group)):
                work.wait()

        numbers, theirs = torch.tensor([size, len(about), *checksums]), torch.zeros(4, dtype=torch.int64)
        exchange(numbers, theirs)
        their_size, length, *expected = theirs.tolist()
        slot, their_about = self.partners[turn], torch.empty(length, dtype=torch.uint8)
        slot.begin()
        exchange(self.stagers[turn].memory[:size], slot.allocate(their_size)[:their_size])
        exchange(torch.frombuffer(bytearray(about), dtype=torch.uint8), their_about)
        slot.commit(their_about.numpy().tobytes(), their_size, expected)

    def _decide(self) -> None:
        """Choose `every`; all ranks together."""
        self.wait()
        cost, seconds = statistics.median(self.costs[len(self.own) :]), statistics.median(self.seconds)
        self.every = int(self.world.max(torch.tensor(steps_between(cost, seconds))))
        size = sum(layout.size for layout in self.layouts if layout)
        logger.info(
            "State kept in memory after every %s: %.2g %% of a step each, %.3g MB a rank",
            "step" if self.every == 1 else f"{self.every} steps",
            100 * cost / seconds,
            size / 1e6,
        )


def steps_between(cost: float, step_seconds: float) -> int:
    """The fewest steps between saves of `cost` seconds that take at most MOST_COST of the time."""
    return max(1, math.ceil(cost / (MOST_COST * step_seconds)))
