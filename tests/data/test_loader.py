"""The loader: one order of batches whatever the ranks, accumulation, workers and restarts; evaluation; signals."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value

from common.cli import UserError
from common.data.collators import MaskingCollator, MaskRates
from common.data.flags import BatchFlags
from common.data.loader import PlannedOrder, TrainLoader, evaluation_batches
from common.data.packing import BatchPlan, Position
from common.data.token_store import TokenStore
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS, encode
from extras.prepare.sources.fasta import read_fasta
from tests.conftest import ROOT
from tests.patience import run

# Four workers on a machine with fewer cores are the point here, not a mistake.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LONGEST = 256
FEATURES = Features({"id": Value("string"), "input_ids": List(Value("uint8"))})


@pytest.mark.parametrize(
    ("ranks", "flags", "packs"),
    [
        (1, {"tokens_per_step": 2_097_152}, 128),
        (8, {"tokens_per_step": 2_097_152}, 128),
        (24, {"tokens_per_step": 2_097_152}, 120),  # the nearest that divides among them
        (256, {"tokens_per_step": 2_097_152}, 256),  # one each
        (8, {"gradient_accumulation_steps": 3}, 24),
        (8, {"packs_per_step": 16, "gradient_accumulation_steps": 3}, 16),
    ],
)
def test_packs_per_step_follows_from_flags_and_ranks(ranks, flags, packs):
    assert packs_per_step(BatchFlags(**flags), Mesh(size=ranks), 16_384).plain == packs
    assert packs_per_step(BatchFlags(**flags), Mesh(size=2 * ranks, cp_size=2), 16_384).plain == packs


def test_tokens_per_step_excludes_packs_per_step():
    with pytest.raises(UserError, match="--packs_per_step and --tokens_per_step exclude each other"):
        BatchFlags(max_steps=1, tokens_per_step=100, packs_per_step=2).check()


def save(path, records):
    rows = {"id": [f"P{i}" for i in range(len(records))], "input_ids": [record.tolist() for record in records]}
    Dataset.from_dict(rows, features=FEATURES).save_to_disk(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """700 records, all different: every batch tells which records are in it."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("store") / "train"
    residues = [rng.integers(4, 24, n) for n in np.clip(rng.lognormal(4.5, 0.7, 700), 8, 900).astype(int)]
    save(path, [np.concatenate(([CLS], of, [EOS])).astype(np.uint8) for of in residues])
    return TokenStore(path, ESM2_TOKENS)


def packed(store, shuffle=True, seed=1):
    plan = BatchPlan(store.lengths, len(store), seed, LONGEST, tokens_per_pack=2048, shuffle=shuffle)
    return plan, MaskingCollator(ESM2_TOKENS, seed)


def padded(store, shuffle=True, seed=1):
    plan = BatchPlan(store.lengths, len(store), seed, LONGEST, sequences_per_pack=9, shuffle=shuffle)
    return plan, MaskingCollator(ESM2_TOKENS, seed)


def loader_of(store, plan, collator, packs_per_step, dp_rank=0, dp_size=1, **arguments):
    return TrainLoader(PlannedOrder(store, plan, packs_per_step), collator, Mesh(dp_rank, dp_size), **arguments)


def tensors(batch):
    """Something to compare batches by: every value of every key."""
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def global_batches(store, mode, dp_size, steps, packs_per_step=8, **arguments):
    """[step][pack] of the global batch, put together from all ranks; and the steps of rank 0."""
    ranks = []
    for rank in range(dp_size):
        loader = loader_of(store, *mode(store), packs_per_step, rank, dp_size, num_steps=steps, **arguments)
        ranks.append(list(loader))
        assert len(ranks[-1]) == steps
    for of_step in zip(*ranks, strict=True):
        assert len({(step.step, str(step.position), step.epoch) for step in of_step}) == 1
        assert {len(step.micro_batches) for step in of_step} == {-(-packs_per_step // dp_size)}
    batches = [
        [tensors(of_step[i % dp_size].micro_batches[i // dp_size]) for i in range(packs_per_step)]
        for of_step in zip(*ranks, strict=True)
    ]
    return batches, ranks[0]


@pytest.mark.parametrize("mode", [packed, padded])
def test_loader_is_independent_of_ranks(store, mode):
    steps = 20
    expected, one_rank = global_batches(store, mode, 1, steps)
    assert one_rank[-1].epoch > 1.5  # the steps cross the end of an epoch
    for dp_size in (2, 3, 4, 5, 8, 11):
        found, ranks = global_batches(store, mode, dp_size, steps)
        assert found == expected
        assert [step.position for step in ranks] == [step.position for step in one_rank]


@pytest.mark.parametrize("mode", [packed, padded])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_loader_is_independent_of_workers(store, mode, num_workers):
    expected, steps = global_batches(store, mode, 2, 11)
    found, steps_of_workers = global_batches(store, mode, 2, 11, num_workers=num_workers)
    assert found == expected
    assert [step[2:] for step in steps_of_workers] == [step[2:] for step in steps]
    assert [step.step for step in steps_of_workers] == list(range(11))


@pytest.mark.parametrize("mode", [packed, padded])
def test_loader_resumes_on_other_ranks(store, mode):
    expected, steps = global_batches(store, mode, 1, 20)
    for done, dp_size, num_workers in ((1, 2, 0), (7, 4, 0), (12, 8, 0), (19, 2, 0), (9, 2, 2), (3, 3, 0), (8, 5, 2)):
        start = {"first_step": done, "position": json.loads(json.dumps(steps[done - 1].position))}  # a checkpoint's
        found, after = global_batches(store, mode, dp_size, 20 - done, **start, num_workers=num_workers)
        assert found == expected[done:]
        assert after[-1][2:] == steps[-1][2:]
        assert after[0].step == done


def test_loader_gives_collator_the_step(store):
    """A falling masking probability: the same masks on any ranks and workers, and after a resume."""

    collator = MaskingCollator(ESM2_TOKENS, 1, MaskRates(0.6, end=0.1, total_steps=6))

    def scheduled(store):
        return packed(store)[0], collator

    expected, steps = global_batches(store, scheduled, 1, 6)
    for step, batches in enumerate(expected):
        targets, tokens = (sum(batch[key] for batch in batches) for key in ("num_targets", "num_tokens"))
        assert targets / tokens == pytest.approx(0.6 - 0.1 * step, rel=0.1)
    found, _ = global_batches(store, scheduled, 2, 3, first_step=3, position=steps[2].position, num_workers=2)
    assert found == expected[3:]
    plan, _ = packed(store, shuffle=False)
    held_out = list(evaluation_batches(store, plan, collator))
    targets, tokens = (sum(batch[key] for batch in held_out) for key in ("num_targets", "num_tokens"))
    assert targets / tokens == pytest.approx(0.6, rel=0.1)


@pytest.mark.parametrize(("mode", "packs_per_step"), [(padded, 6), (packed, 12), (packed, 3000)])
def test_loader_last_step_takes_remaining_packs(store, mode, packs_per_step):
    """78 padded and 41 or so packed batches an epoch; 700 records. Two epochs, from the beginning or a later step."""
    plan, collator = mode(store)
    end = plan.position_at(2)
    packs = plan.count(Position(), end)
    steps = -(-packs // packs_per_step)
    left = packs - (steps - 1) * packs_per_step
    for dp_size, workers in ((1, 0), (2, 2), (3, 0), (3, 1)):
        order = PlannedOrder(store, plan, packs_per_step, end)
        ranks = [list(TrainLoader(order, collator, Mesh(r, dp_size), num_workers=workers)) for r in range(dp_size)]
        for first in (steps - 1, steps):  # as after a restart
            start = ranks[0][first - 1].position if first else {}
            rest = [list(TrainLoader(order, collator, Mesh(r, dp_size), first, start)) for r in range(dp_size)]
            assert [[[tensors(b) for b in s.micro_batches] for s in of] for of in rest] == [
                [[tensors(b) for b in s.micro_batches] for s in of[first:]] for of in ranks
            ]
        assert {len(of_rank) for of_rank in ranks} == {steps}
        assert {len(of_rank[-1].micro_batches) for of_rank in ranks} == {-(-left // dp_size)}
        batches = [b for of_rank in ranks for step in of_rank for b in step.micro_batches]
        assert sum(batch["num_sequences"] for batch in batches) == 2 * len(store)
        assert sum(batch["num_sequences"] == 0 for batch in batches) == -left % dp_size
        assert {of_rank[-1].epoch for of_rank in ranks} == {2.0}


def test_loader_gives_context_parallel_ranks_the_same_packs(store):
    plan, collator = packed(store)
    expected, _ = global_batches(store, packed, 2, 3)
    for rank in range(4):
        steps = TrainLoader(PlannedOrder(store, plan, 8), collator, Mesh(rank, 4, cp_size=2), num_steps=3)
        assert [list(map(tensors, s.micro_batches)) for s in steps] == [step[rank // 2 :: 2] for step in expected]
    plan, _ = packed(store, shuffle=False)
    of_ranks = [list(evaluation_batches(store, plan, collator, Mesh(rank, 4, cp_size=2))) for rank in range(4)]
    assert [[tensors(b) for b in of_rank] for of_rank in of_ranks[::2]] == [
        [tensors(b) for b in of_rank] for of_rank in of_ranks[1::2]
    ]
    assert sum(b["num_sequences"] for of_rank in of_ranks[::2] for b in of_rank) == len(store)


def test_loader_resumes_with_other_global_batch(store):
    packs = list(itertools.chain.from_iterable(global_batches(store, packed, 1, 12)[0]))
    _, steps = global_batches(store, packed, 2, 3)
    larger, _ = global_batches(store, packed, 4, 4, first_step=3, position=steps[-1].position, packs_per_step=16)
    assert list(itertools.chain.from_iterable(larger)) == packs[24 : 24 + 64]


@pytest.mark.parametrize("mode", [packed, padded])
def test_loader_reads_every_token_once_an_epoch(store, mode):
    plan, collator = mode(store)
    steps = list(loader_of(store, plan, collator, 1, num_steps=plan.packs_per_epoch()))
    assert steps[-1].epoch == 1
    assert steps[-1].position == asdict(Position(1, 0, 0))
    batches = [step.micro_batches[0] for step in steps]
    assert sum(batch["num_sequences"] for batch in batches) == len(store)
    lengths = store.lengths(np.arange(len(store)))
    assert sum(batch["num_tokens"] for batch in batches) == np.minimum(lengths, LONGEST).sum()


def test_loader_batches_equal_the_plans_crops(store):
    plan, collator = packed(store)
    loader = loader_of(store, plan, collator, 1, num_steps=30)
    for step, (_, pack) in zip(loader, plan.packs(), strict=False):
        batch = step.micro_batches[0]
        ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"]).numpy()
        bounds = batch["cu_seqlens"].tolist()
        for i, record in enumerate(pack.records):
            whole, _ = store.gather(np.array([record]), np.array([0]), store.lengths(np.array([record])))
            crop = whole[pack.starts[i] : pack.starts[i] + pack.lengths[i]]
            assert np.array_equal(ids[bounds[i] : bounds[i + 1]], crop)


def test_loader_masks_and_order_depend_on_epoch_and_seed(store):
    firsts = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        plan, collator = packed(store, seed=seed)
        step = next(iter(loader_of(store, plan, collator, 1, position=asdict(Position(epoch)))))
        firsts.append(step.micro_batches[0]["input_ids"].tolist())
    assert len({tuple(ids) for ids in firsts}) == 3


def test_loader_bundles_tensors_of_a_step(store):
    """Each shared tensor is an open file: a step of many micro-batches must not open hundreds."""
    plan, collator = packed(store)
    step = next(iter(loader_of(store, plan, collator, 32, num_workers=1)))
    batches = step.micro_batches
    storages = {v.untyped_storage().data_ptr() for b in batches for v in b.values() if isinstance(v, torch.Tensor)}
    assert len(batches) == 32
    assert len(storages) == 1


def test_loader_pickles(store):
    plan, collator = packed(store)
    loader = loader_of(store, plan, collator, 4, num_steps=3)
    again = pickle.loads(pickle.dumps(loader))
    for one, other in zip(loader, again, strict=True):
        assert list(map(tensors, one.micro_batches)) == list(map(tensors, other.micro_batches))


def test_loader_gives_ranks_without_a_pack_an_empty_one(store):
    """8 packs on 3 ranks: each builds 3, and the last of rank 2 is empty; 1 pack on 2 ranks."""
    for packs, ranks, empty in ((8, 3, [0, 0, 1]), (1, 2, [0, 1]), (22, 16, 6 * [0] + 10 * [1])):
        of_ranks = [list(loader_of(store, *packed(store), packs, rank, ranks, num_steps=2)) for rank in range(ranks)]
        found = [[sum(b["num_sequences"] == 0 for b in step.micro_batches) for step in of] for of in of_ranks]
        assert found == [[n, n] for n in empty]


def test_loader_rejects_position_of_other_data(store):
    with pytest.raises(UserError, match="other data"):
        loader_of(store, *packed(store), packs_per_step=1, first_step=5, position=asdict(Position(0, 3, 0)))


@pytest.mark.parametrize("mode", [packed, padded])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 64])
def test_evaluation_reads_every_record_once_with_the_same_masks(store, mode, dp_size):
    plan, collator = mode(store, shuffle=False)
    expected = [tensors(batch) for batch in evaluation_batches(store, plan, collator)]
    assert sum(batch["num_sequences"] for batch in expected) == len(store)
    ranks = [
        [tensors(batch) for batch in evaluation_batches(store, plan, collator, Mesh(rank, dp_size))]
        for rank in range(dp_size)
    ]
    if dp_size == 3:
        two = [evaluation_batches(store, plan, collator, Mesh(rank, 3), num_workers=2) for rank in range(3)]
        assert [list(map(tensors, of_rank)) for of_rank in two] == ranks, "in order, whoever makes them"
    rounds = -(-len(expected) // dp_size)
    assert [len(of_rank) for of_rank in ranks] == [rounds] * dp_size
    dealt = [ranks[i % dp_size][i // dp_size] for i in range(rounds * dp_size)]
    assert dealt[: len(expected)] == expected
    for empty in dealt[len(expected) :]:
        assert empty["num_sequences"] == empty["num_tokens"] == empty["num_targets"] == 0


def test_evaluation_of_fewer_records_than_ranks(tmp_path):
    save(tmp_path / "s", [encode("MKV")])
    store = TokenStore(tmp_path / "s", ESM2_TOKENS)
    plan, collator = packed(store, shuffle=False)
    ranks = [evaluation_batches(store, plan, collator, Mesh(rank, 4)) for rank in range(4)]
    sizes = [[batch["num_tokens"] for batch in of_rank] for of_rank in ranks]
    assert sizes == [[5], [0], [0], [0]]


def test_workers_ignore_scheduler_signals(store):
    """SIGTERM, SIGUSR1 and SIGINT go to the whole process group; the batches are those of a run without signals."""
    plan, collator = packed(store)
    expected = [tensors(step.micro_batches[0]) for step in loader_of(store, plan, collator, 1, num_steps=40)]
    others = set(multiprocessing.active_children())
    steps = iter(loader_of(store, plan, collator, 1, num_steps=40, num_workers=2))
    found = [tensors(next(steps).micro_batches[0]) for _ in range(5)]
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for worker in workers:
            os.kill(worker.pid, number)
        time.sleep(0.05)
        found.append(tensors(next(steps).micro_batches[0]))
        assert all(worker.is_alive() for worker in workers)
    found += [tensors(step.micro_batches[0]) for step in steps]
    assert found == expected
    assert not set(multiprocessing.active_children()) - others


def test_loader_close_ends_workers(store):
    others = set(multiprocessing.active_children())
    steps = iter(loader_of(store, *packed(store), packs_per_step=1, num_workers=2))
    next(steps)
    assert len(set(multiprocessing.active_children()) - others) == 2
    steps.close()
    assert not set(multiprocessing.active_children()) - others


def test_process_exits_at_once_with_busy_workers(store):
    """Workers that ignore SIGTERM must not outlive or hold up the process that started them, however it ends."""
    endings = {"pass": 0, "raise SystemExit(3)": 3, "1 / 0": 1}
    script = f"""
import multiprocessing
import os
from common.data.collators import MaskingCollator
from common.data.loader import PlannedOrder, TrainLoader
from common.data.packing import BatchPlan
from common.data.packs_per_step import PacksPerStep
from common.data.token_store import TokenStore
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS
for ending in {list(endings)!r}:
    if process := os.fork():
        print("ended", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
        continue
    store = TokenStore({str(store.path)!r}, ESM2_TOKENS)
    plan = BatchPlan(store.lengths, len(store), 0, {LONGEST}, tokens_per_pack=2048)
    steps = iter(TrainLoader(PlannedOrder(store, plan, 1), MaskingCollator(ESM2_TOKENS, 0), num_workers=2))
    next(steps)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    exec(ending)
    break
"""
    done = run([sys.executable, "-c", script], 60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1::2] == [f"ended {status}" for status in endings.values()]
    pids = [int(pid) for line in lines[::2] for pid in line.split()]
    assert len(pids) == 2 * len(endings)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_loader_of_real_proteins(tmp_path, real_fasta):
    """One epoch of the sample on 2 ranks with workers: all of its tokens, 15 % masked, packs full."""
    records = [encode(sequence) for _, sequence in read_fasta(real_fasta)]
    save(tmp_path / "s", records)
    store = TokenStore(tmp_path / "s", ESM2_TOKENS)
    plan = BatchPlan(store.lengths, len(store), 0, 1024, tokens_per_pack=8192)
    steps = plan.packs_per_epoch() // 4
    loaders = [
        loader_of(store, plan, MaskingCollator(ESM2_TOKENS, 0), 4, rank, 2, num_steps=steps, num_workers=rank)
        for rank in range(2)
    ]
    batches = [batch for loader in loaders for step in loader for batch in step.micro_batches]
    assert steps * 4 == plan.packs_per_epoch() == len(batches)
    tokens = sum(batch["num_tokens"] for batch in batches)
    assert tokens == sum(min(len(record), 1024) for record in records)
    assert tokens / (len(batches) * 8192) > 0.97
    assert sum(batch["num_targets"] for batch in batches) / tokens == pytest.approx(0.15, abs=0.002)
