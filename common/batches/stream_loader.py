"""Deliver streams to the ranks and their workers: as `loader` does for a batch plan, with positions of its own.

Step k of the run takes one pack of each of G streams, those of lane k % lanes (a lane is G streams); rank r takes
every dp_size-th of them. So which packs make a step depends on G alone. A lane is read by one worker only: lanes are
there so that several workers can each have their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from torch.utils.data import IterableDataset

from common.batches.loader import Collator, TrainStep, check_divisible
from common.batches.streams import Stream, StreamPlan, StreamPosition
from common.batches.workers import bundle, deliver, this_worker, unbundle
from common.cli import UserError
from common.files.sources import File
from common.files.stream_reader import units_of

LANES = (8, 4, 2, 1)


def plan_streams(files: tuple[File, ...], packs_per_step: int, **packing) -> StreamPlan:
    """The streams for a global batch of G packs: as many lanes as there are units for."""
    units = units_of(files, wanted=LANES[0] * packs_per_step)
    lanes = next(n for n in LANES if n * packs_per_step <= len(units) or n == 1)
    return StreamPlan(units, lanes * packs_per_step, **packing)


def merge_positions(parts: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """One position for all ranks: each knows how far its own streams are, and an older place of the others'."""
    streams = sorted({stream for part in parts for stream in part}, key=int)
    return {stream: max(part[stream] for part in parts if stream in part) for stream in streams}


class StreamLoader:
    """Iterate over the training steps of one data-parallel rank, without end or for `num_steps`.

    first_step: number of the first step; position: where the streams stand, as `TrainStep.position` of any earlier
    step gave it, all ranks' together ({} at the beginning); the rest as in TrainLoader. A step's position names this
    rank's streams only. Raises UserError when G is no multiple of dp_size or the position is of another G.
    """

    def __init__(
        self,
        plan: StreamPlan,
        collator: Collator,
        packs_per_step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        first_step: int = 0,
        position: dict[str, list[int]] | None = None,
        num_steps: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ):
        check_divisible(packs_per_step, dp_size)
        assert 0 <= dp_rank < dp_size
        assert plan.num_streams % packs_per_step == 0
        if position and max(map(int, position)) >= plan.num_streams:
            raise UserError(
                f"the checkpoint stands in {max(map(int, position)) + 1} streams of the data, and there are "
                f"{plan.num_streams} now: go on with the --packs_per_step and the files it was made with"
            )
        self.position = dict(position or {})
        lanes = plan.num_streams // packs_per_step
        # A worker more would share a lane with another one.
        workers = max((n for n in LANES if n <= min(num_workers, lanes)), default=0)
        self._steps = _StreamSteps(
            plan, collator, packs_per_step, dp_rank, dp_size, first_step, self.position, num_steps
        )
        self._workers = (workers, prefetch_factor, pin_memory)

    def __iter__(self) -> Iterator[TrainStep]:
        for made, (step, moved, epoch) in deliver(self._steps, *self._workers):
            self.position |= moved
            yield TrainStep(step, unbundle(made), dict(self.position), epoch)


class _StreamSteps(IterableDataset):
    """The steps of one rank; worker w of W builds those with (step - first step) % W == w."""

    def __init__(self, plan, collator, packs_per_step, dp_rank, dp_size, first_step, position, num_steps):
        self.plan, self.collator, self.packs_per_step = plan, collator, packs_per_step
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.first_step, self.num_steps = first_step, num_steps
        self.position = dict(position)

    def __iter__(self):
        worker, workers = this_worker()
        lanes = self.plan.num_streams // self.packs_per_step
        streams: dict[int, Stream] = {}
        for index in count() if self.num_steps is None else range(self.num_steps):
            if index % workers != worker:
                continue
            step = self.first_step + index
            first = step % lanes * self.packs_per_step
            batches, moved, epochs = [], {}, 0.0
            for number in range(first + self.dp_rank, first + self.packs_per_step, self.dp_size):
                if number not in streams:
                    position = StreamPosition(*self.position.get(str(number), ()))
                    streams[number] = Stream(self.plan, number, position)
                pack, ids, position = next(streams[number])
                batches.append(self.collator(pack, ids))
                moved[str(number)] = list(position)
                epochs += streams[number].epochs()
            yield bundle(batches), (step, moved, epochs / len(batches))
