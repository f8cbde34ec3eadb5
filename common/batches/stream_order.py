"""Files nobody prepared, dealt to S streams, of which each step takes one pack of each of G.

The units of a source (files, or row groups) are dealt anew each epoch, by a hash of (seed, epoch, unit); where there
are fewer units than streams, several streams share one, each taking every n-th of its rows. So every record belongs to
one stream, and streams never speak to each other. What a stream makes of its records is its own affair: proteins are
in `streams`, text in common.text.streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.batches.windows import Pack
from common.cli import UserError
from common.files.hashing import BLOCK_ORDER, derive_key, hash_counters
from common.ranks.world import Mesh
from common.sources.dataset import File
from common.sources.sequence_files import Unit
from common.sources.stream_reader import units_of

LANES = (8, 4, 2, 1)


class Share(NamedTuple):
    """The rows of a unit that are a stream's own: those whose number leaves `part` when divided by `parts`."""

    unit: int  # its place in Dealt.units
    part: int
    parts: int


@dataclass(frozen=True)
class Dealt(ABC):
    """Which stream reads what."""

    units: list[Unit]
    num_streams: int
    seed: int

    @abstractmethod
    def stream(self, index: int, saved: Sequence[int] = ()) -> Iterator[tuple[Pack, np.ndarray, Sequence[int]]]:
        """A stream from a saved position on, [] for the beginning: without end, packs, their tokens and the position
        after each, plain numbers."""

    def shares(self, stream: int, epoch: int) -> list[Share]:
        """What a stream reads in an epoch, in order. The streams' shares of an epoch are all rows, each once."""
        keys = hash_counters(derive_key(self.seed, epoch, BLOCK_ORDER), np.arange(len(self.units)))
        order = np.argsort(keys, kind="stable").tolist()
        if len(order) >= self.num_streams:
            return [Share(unit, 0, 1) for unit in order[stream :: self.num_streams]]
        part, place = divmod(stream, len(order))
        return [Share(order[place], part, len(range(place, self.num_streams, len(order))))]


def deal(files: tuple[File, ...], packs_per_step: int) -> tuple[list[Unit], int]:
    """The units of some files, and how many streams read them for a global batch of G packs: as many lanes as there
    are units for."""
    units = units_of(files, wanted=LANES[0] * packs_per_step)
    lanes = next(n for n in LANES if n * packs_per_step <= len(units) or n == 1)
    return units, lanes * packs_per_step


class StreamedOrder:
    """Step k of a run takes one pack of each of G streams, those of lane k % lanes (a lane is G streams).

    So which packs make a step depends on G alone; rank r takes every dp_size-th of them. A lane is read by one worker
    only: lanes are there so that several workers can each have their own. A position names streams, as texts, and
    where they stand; a rank's own names at least those it has read.
    """

    def __init__(self, plan: Dealt, packs_per_step: int):
        assert plan.num_streams % packs_per_step == 0
        self.plan, self.packs_per_step = plan, packs_per_step
        self.lanes = plan.num_streams // packs_per_step

    def check_position(self, position: dict[str, list[int]]) -> None:
        if position and max(map(int, position)) >= self.plan.num_streams:
            raise UserError(
                f"the checkpoint stands in {max(map(int, position)) + 1} streams of the data, and there are "
                f"{self.plan.num_streams} now: go on with the --packs_per_step and the files it was made with"
            )

    def most_workers(self, wanted: int) -> int:
        """A worker more would share a lane with another one."""
        return max((n for n in LANES if n <= min(wanted, self.lanes)), default=0)

    def own(self, position: dict, mesh: Mesh) -> dict:
        mine = range(mesh.dp_rank, self.packs_per_step, mesh.dp_size)
        return {stream: at for stream, at in position.items() if int(stream) % self.packs_per_step in mine}

    def steps(self, mesh: Mesh, position: dict, first: int, numbers: Iterable[int], mine: Callable[[int], bool]):
        """As `common.batches.loader.Order` has it."""
        streams: dict[int, Iterator] = {}
        for step in (first + number for number in numbers if mine(number)):
            lane = step % self.lanes * self.packs_per_step
            taken, moved = [], {}
            for number in range(lane + mesh.dp_rank, lane + self.packs_per_step, mesh.dp_size):
                if number not in streams:
                    streams[number] = self.plan.stream(number, position.get(str(number), ()))
                pack, ids, after = next(streams[number])
                taken.append((pack, ids))
                moved[str(number)] = list(after)
            yield step, taken, moved, None  # streams go round at a pace of their own: the run counts records
