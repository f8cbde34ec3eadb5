"""Copies for a background save: each rank's share of them, their buffers, and the order of streams on CUDA."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common.checkpoint.pinned_stager import PinnedStager, share_of
from common.cli import UserError
from tests.training.checkpoint_fixtures import checkpointer_of_a_small_model, take_steps
from tests.training_fixtures import checkpoint_state, on_ranks

STATE = {
    "model": {str(n): torch.full((n,), n) for n in (7, 1, 300, 40, 41, 5)},
    "optimizer": {
        "state": {"7": {"step": torch.tensor(3.0), "exp_avg": torch.ones(7)}, "empty": {}},
        "param_groups": [{"lr": 0.1, "params": ["7"]}],
    },
}


def flat(tree: dict, *path) -> dict:
    out = {}
    for key, value in tree.items():
        out |= flat(value, *path, key) if isinstance(value, dict) and value else {(*path, key): value}
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_share_of_splits_state_evenly(size):
    shares = [flat(share_of(STATE, rank, size)) for rank in range(size)]
    whole = flat(STATE)
    dealt = {name for name, value in whole.items() if isinstance(value, torch.Tensor) and value.dim()}
    for name, value in whole.items():
        assert [share[name] is value for share in shares if name in share] == [True] * (1 if name in dealt else size)
    loads = [sum(value.nbytes for name, value in share.items() if name in dealt) for share in shares]
    assert max(loads) - min(loads) <= max(whole[name].nbytes for name in dealt)


def test_stager_copy_is_independent():
    state = {"a": torch.arange(5.0, requires_grad=True), "b": [{"lr": 0.1}, (torch.ones(3), 2)]}
    copies = PinnedStager(torch.device("cpu"), torch.optim.SGD([state["a"]]))
    first = copies.stage(state)
    with torch.no_grad():
        state["a"] += 1
    assert first["a"].tolist() == [0, 1, 2, 3, 4]
    assert first["b"][0] == {"lr": 0.1}
    assert isinstance(first["b"][1], tuple)


SIZES = {"1": 1, "2": 2, "hybrid": 4}


def _save(out: Path, hybrid: bool = False) -> None:
    """The same state in the background and at once; what this rank copied of it."""
    checkpointer = checkpointer_of_a_small_model(out)
    if hybrid:
        fully_shard(checkpointer.model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        checkpointer.optimizer = torch.optim.AdamW(checkpointer.model.parameters(), lr=0.1)
    take_steps(checkpointer)
    copies, copied = checkpointer.stager, {}
    copies.stage = lambda state: copied.update(staged := PinnedStager.stage(copies, state)) or staged
    checkpointer.save(1, {})
    checkpointer.wait()
    checkpointer.flags = replace(checkpointer.flags, async_save=False)
    checkpointer.save(2, {})
    tensors = [value for value in flat(copied).values() if isinstance(value, torch.Tensor)]
    print(sum(whole.to_local().nbytes if isinstance(whole, DTensor) else whole.nbytes for whole in tensors))
    checkpointer.load(out / "checkpoint-1")
    torch.distributed.destroy_process_group()


def test_stager_holds_one_copy_over_replicas(tmp_path):
    held = {}
    for name, size in SIZES.items():
        codes, said = on_ranks(size, _save, tmp_path / name, name == "hybrid")
        assert codes == [0] * size, said
        held[name] = [int(text) for text in said]
    (whole,) = held["1"]
    state = flat(checkpoint_state(tmp_path / "1/checkpoint-2", tmp_path))
    largest = max(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    scalars = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and not value.dim())
    for name, size in list(SIZES.items())[1:]:
        assert sum(held[name]) == whole + (size - 1) * scalars
        assert max(held[name]) <= whole / size + largest
        for step in (1, 2):
            read = flat(checkpoint_state(tmp_path / name / f"checkpoint-{step}", tmp_path))
            assert read.keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(read[key], value) if isinstance(value, torch.Tensor) else read[key] == value


@pytest.mark.parametrize("in_passes", [False, True])
def test_stager_optimizer_step_waits_for_cuda_copies(monkeypatch, in_passes):
    """Fake streams and events record the order of waits; nothing is copied on a GPU."""
    told, locked = [], {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            locked[address] = size
            return 0 if size < 1000 else 2

        cudaHostUnregister = locked.pop

    class Noted:
        def __init__(self, name: str):
            self.name = name

        def __getattr__(self, call: str):
            return lambda *what: told.append((self.name, call, *(each.name for each in what)))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Noted("side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Noted("done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Noted("current"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    copies = PinnedStager(torch.device("cuda"), optimizer, in_passes)
    first = copies.stage({"weight": weight})["weight"]
    assert first.tolist() == [1, 1, 1]
    copied = [("side", "wait_stream", "current"), ("done", "record")]
    assert told == copied + [("current", "wait_event", "done")] * in_passes
    told.clear()
    optimizer.step()
    copies.wait()
    assert told == [("current", "wait_event", "done"), ("done", "synchronize")]
    assert copies.stage({"weight": weight + 1})["weight"].data_ptr() == first.data_ptr(), "the memory is kept"
    assert first.tolist() == [2, 2, 2]
    assert locked == {first.data_ptr(): 64}
    larger = copies.stage({"weight": torch.ones(9), "step": torch.tensor(7.0), "none": torch.ones(0, 4)})
    assert [larger[name].tolist() for name in ("weight", "step", "none")] == [[1] * 9, 7, []]
    assert locked == {larger["weight"].data_ptr(): 128}
    with pytest.raises(UserError, match=r"--async_save: CUDA cannot page-lock .* error 2.* --async_save False"):
        copies.stage({"weight": torch.ones(999)})
