"""The batch ramp: packs of a step as a function of the step, the same on any ranks, workers and restarts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import islice

import numpy as np
import pytest

from common.cli import UserError
from common.data.collators import MaskingCollator
from common.data.flags import BatchFlags, DataFlags
from common.data.loader import PlannedOrder, TrainLoader, merge_positions, read_tokens
from common.data.packing import BatchPlan, Position
from common.data.packs_per_step import PacksPerStep, uneven
from common.data.training_data import PlannedData
from common.distributed.world import Mesh
from common.flags import parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.sources.streamed_data import MemoryStore
from extras.prepare.sources.streams import StreamedOrder
from tests.data.stream_fixtures import plan_of, proteins, write

# Four workers on a machine with fewer cores are the point here, not a mistake.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

RAMP = PacksPerStep.of("0:4,3:8,5:12,7:4")  # every stage divides among 1, 2 and 4 ranks
SIZES = [4, 4, 4, 8, 8, 12, 12, 4, 4, 4, 4]
COLLATOR = MaskingCollator(ESM2_TOKENS, 0)
LAYOUTS = [(1, 1), (2, 0), (2, 3), (4, 1)]  # ranks, workers


def test_packs_of_a_step_follow_from_its_stage():
    assert [RAMP.at(step) for step in range(11)] == SIZES
    assert (RAMP.plain, RAMP.most, RAMP.at(10**9)) == ("0:4,3:8,5:12,7:4", 12, 4)
    assert str(RAMP) == "4; from step 3: 8; from step 5: 12; from step 7: 4"
    assert PacksPerStep.of(RAMP.plain) == RAMP == PacksPerStep.of(RAMP)
    assert RAMP.map(lambda packs: packs // 2).plain == "0:2,3:4,5:6,7:2"
    constant = PacksPerStep.of(1200)
    assert (constant.plain, constant.most, constant.at(7), str(constant)) == (1200, 1200, 1200, "1,200")
    assert PacksPerStep.of("0:1200") == constant


@pytest.mark.parametrize("schedule", [RAMP, PacksPerStep.of(5)])
@pytest.mark.parametrize("first", [0, 2, 3, 6, 20])
def test_steps_for_counts_steps_of_all_stages(schedule, first):
    for packs in range(80):
        step, left = first, packs
        while left > 0:
            left -= schedule.at(step)
            step += 1
        assert schedule.steps_for(packs, first) == step - first


@pytest.mark.parametrize(
    "schedule",
    ["", "8", "0:8,", "1:8", "0:8,0:16", "0:8,9:16,9:32", "0:8,9:16,5:32", "0:0", "0:8,5:0", "0:-8", "0:8 5:16"]
    + ["0:8,0.5:16", "0:8,x:16", "0:٨", "0:99999999999999999", ",".join(f"{n}:1" for n in range(101))],
)
def test_packs_per_step_schedule_that_is_none_is_refused(schedule):
    with pytest.raises(UserError, match=r"^--packs_per_step_schedule '.*: expected at most 100 step:packs pairs, the"):
        BatchFlags(max_steps=1, packs_per_step_schedule=schedule).check()


@pytest.mark.parametrize(
    "other", [{"packs_per_step": 1}, {"tokens_per_step": 4096}, {"gradient_accumulation_steps": 2}]
)
def test_packs_per_step_schedule_excludes_other_sizes_of_a_step(tmp_path, other):
    """In one file of flags. On a command line they replace it."""
    ((name, value),) = other.items()
    flags = {"dataset_dir": "x", "packs_per_step_schedule": "0:8,4:16"}
    file = tmp_path / "flags.json"
    file.write_text(json.dumps(flags | other))
    with pytest.raises(UserError, match="exclude each other") as refused:
        parse_arguments("", DataFlags, [str(file)])
    assert f"--{name}" in str(refused.value)
    assert "--packs_per_step_schedule" in str(refused.value)
    replaced = parse_arguments("", DataFlags, [str(file), f"--{name}={value}"])
    assert (replaced.packs_per_step_schedule, getattr(replaced, name)) == (None, value)


@pytest.fixture(scope="module")
def store():
    """500 records, all different."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(4.5, 0.7, 500), 8, 400).astype(int)
    ids = generator.integers(4, 24, lengths.sum()).astype(np.uint8)
    return MemoryStore(ids, np.append(0, np.cumsum(lengths)))


def packed(store):
    return BatchPlan(store.lengths, len(store), 1, 256, tokens_per_pack=1024)


def contents(batch) -> tuple:
    return batch["input_ids"].tolist(), batch["labels"].tolist()


def global_steps(order, ranks: int, workers: int = 0, first: int = 0, position=None, number=None) -> list[tuple]:
    """[(the packs of a step, in order; the position after it)], put together from all ranks."""
    loaders = [
        TrainLoader(order, COLLATOR, Mesh(rank, ranks), first, position, number, num_workers=workers)
        for rank in range(ranks)
    ]
    steps = []
    for number, of_ranks in enumerate(zip(*loaders, strict=True), first):
        assert {step.step for step in of_ranks} == {number}
        rounds = zip(*(step.micro_batches for step in of_ranks), strict=True)
        packs = [contents(batch) for of_all in rounds for batch in of_all if batch["num_tokens"]]
        steps.append((packs, merge_positions([step.position for step in of_ranks])))
    return steps


def plan_cut_by_schedule(store, plan, sizes: list[int]) -> list[list]:
    packs = (contents(COLLATOR(pack, read_tokens(store, pack))) for _, pack in plan.packs())
    return [list(islice(packs, size)) for size in sizes]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), *LAYOUTS])
def test_ramp_cuts_the_plan_on_any_ranks_and_workers(store, ranks, workers):
    plan = packed(store)
    steps = global_steps(PlannedOrder(store, plan, RAMP), ranks, workers, number=len(SIZES))
    assert [packs for packs, _ in steps] == plan_cut_by_schedule(store, plan, SIZES)
    assert steps[-1][1]["epoch"] == 1, "the steps cross the end of an epoch"
    assert steps[-1][1] == asdict(plan.position_after(Position(), sum(SIZES)))


def test_ramp_gives_context_parallel_ranks_the_same_packs(store):
    order = PlannedOrder(store, packed(store), RAMP)
    whole = global_steps(order, 1, number=6)
    for rank in range(4):
        steps = TrainLoader(order, COLLATOR, Mesh(rank, 4, cp_size=2), num_steps=6)
        assert [[contents(b) for b in s.micro_batches] for s in steps] == [packs[rank // 2 :: 2] for packs, _ in whole]


class Planned(PlannedData):
    """1.25 epochs of a store."""

    def __init__(self, store):
        self.plan, self.max_steps, self.num_examples = packed(store), -1, len(store)
        self.end = self.plan.position_at(1.25)


@pytest.mark.parametrize("schedule", ["0:4,3:8,5:12", "0:4,3:8", "0:4,2:1000", "0:12,100:4", "0:4"])
def test_ramp_ends_with_the_epochs_and_resumes_at_every_step(store, schedule):
    """The number of steps is that of an independent count, from wherever the run resumes, and data are read once."""
    data, ramp = Planned(store), PacksPerStep.of(schedule)
    order = PlannedOrder(store, data.plan, ramp, data.end)
    whole = global_steps(order, 1)
    packs = data.plan.count(Position(), data.end)
    assert sum(len(of_step) for of_step, _ in whole) == packs
    sizes = [ramp.at(step) for step in range(len(whole))]
    assert sum(sizes[:-1]) < packs <= sum(sizes)
    assert [of_step for of_step, _ in whole[:-1]] == plan_cut_by_schedule(store, data.plan, sizes[:-1])
    assert data.total_steps(ramp, 0, {}) == len(whole)
    assert data.finished(len(whole), whole[-1][1])
    for done, (_, position) in enumerate(whole, 1):
        saved = json.loads(json.dumps(position))
        assert data.total_steps(ramp, done, saved) == len(whole)
        assert global_steps(order, 2 if done % 2 else 4, 0, done, saved) == whole[done:]


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Two groups of 12 streams: 24 row groups."""
    path = write(tmp_path_factory.mktemp("streams") / "a.parquet", proteins(720), row_group=30)
    plan = plan_of(path, RAMP.most)
    assert plan.num_streams == 2 * RAMP.most
    return plan


@pytest.mark.parametrize(("ranks", "workers"), LAYOUTS)
def test_ramp_of_streams_is_independent_of_ranks_and_workers(streams, ranks, workers):
    order = StreamedOrder(streams, RAMP)
    expected = global_steps(order, 1, number=len(SIZES))
    assert [len(packs) for packs, _ in expected] == SIZES
    assert global_steps(order, ranks, workers, number=len(SIZES)) == expected


def test_ramp_of_streams_takes_each_stream_in_order_and_resumes(streams):
    order = StreamedOrder(streams, RAMP)
    whole = global_steps(order, 1, number=len(SIZES))
    used = {int(stream): 0 for stream in whole[-1][1]}
    expected = []
    for number in used:  # the packs of a stream as far as its position says
        for pack, ids, after in streams.stream(number):
            used[number] += 1
            expected.append(contents(COLLATOR(pack, ids)))
            if list(after) == whole[-1][1][str(number)]:
                break
    assert sorted(expected) == sorted(pack for packs, _ in whole for pack in packs)
    spread = max(used.values()) - min(used.values())
    assert spread <= len(RAMP.stages), "streams are read evenly, but for a pack a stage"
    for done, (_, position) in enumerate(whole[:-1], 1):
        ranks, workers = [(1, 0), (2, 0), (4, 0), (2, 2)][done % 4]
        saved = json.loads(json.dumps(position))
        resumed = global_steps(order, ranks, workers, done, saved, len(SIZES) - done)
        assert [packs for packs, _ in resumed] == [packs for packs, _ in whole[done:]]


def test_streams_of_equal_stages_are_those_of_a_number(streams):
    steps = [
        global_steps(StreamedOrder(streams, packs), 1, number=5) for packs in (12, PacksPerStep.of("0:12,1:12,4:12"))
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("ranks", "workers"), [(3, 0), (5, 2), (8, 0)])
def test_ramp_cuts_the_plan_on_ranks_that_cannot_share_it(store, ranks, workers):
    plan = packed(store)
    steps = global_steps(PlannedOrder(store, plan, RAMP), ranks, workers, number=len(SIZES))
    assert [packs for packs, _ in steps] == plan_cut_by_schedule(store, plan, SIZES)


def test_stage_of_streams_that_does_not_divide_among_ranks_is_refused(streams):
    order = StreamedOrder(streams, PacksPerStep.of("0:4,3:6,5:12"))
    message = r"global batch of 6 packs does not divide among 4 .* use 1, 2, 3, 6 .*, from step 3 of --packs_per"
    with pytest.raises(UserError, match=message):
        TrainLoader(order, COLLATOR, Mesh(0, 4))


@pytest.mark.parametrize(
    ("packs", "ranks", "said"),
    [
        (8, 3, r"of 8 packs .* among 3 .* \(idle: 1 of 9 turns a step\): use 1, 2, 4, 8 ranks, or 6 or 9 packs"),
        (22, 16, r"of 22 packs .* \(idle: 10 of 32 turns a step\): use 1, 2, 11, 22 ranks, or 16 or 32 packs"),
    ],
)
def test_uneven_names_idle_turns_and_numbers_that_work(packs, ranks, said):
    assert re.search(said, uneven(PacksPerStep.of(packs), ranks))
