"""World: its mesh, its collectives of JSON values, and how a run starts."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from common.distributed import process_group
from common.distributed import world as messages
from common.distributed.process_group import ProcessFlags, distributed_run
from common.distributed.world import Mesh, World
from tests.training_fixtures import free_port, on_ranks


@pytest.mark.parametrize(
    ("size", "cp_size", "data_ranks"),
    [(4, 1, [0, 1, 2, 3]), (4, 2, [0, 0, 1, 1]), (4, 4, [0, 0, 0, 0]), (6, 2, [0, 0, 1, 1, 2, 2])],
)
def test_mesh_ranks_of_a_cp_group_share_a_data_rank(size, cp_size, data_ranks):
    meshes = [Mesh(rank, size, cp_size) for rank in range(size)]
    assert [mesh.dp_rank for mesh in meshes] == data_ranks
    assert {mesh.dp_size for mesh in meshes} == {len(set(data_ranks))}


def test_world_mesh_has_its_rank_and_cp_size():
    assert World(3, 1, 8, torch.device("cpu"), cp_size=2).mesh == Mesh(3, 8, 2)
    assert World(3, 1, 8, torch.device("cpu")).mesh.dp_size == 8


def _gather() -> None:
    world = World(int(os.environ["RANK"]), 0, 3, torch.device("cpu"))
    torch.distributed.init_process_group("gloo")
    everyone = world.gather_to_main({"rank": world.rank, "more": "x" * 1000 * world.rank})
    assert [of["rank"] for of in everyone] == ([0, 1, 2] if world.is_main else [])
    assert [len(of["more"]) for of in everyone] == ([0, 1000, 2000] if world.is_main else [])
    torch.distributed.destroy_process_group()


def test_world_gather_to_main_sends_values_to_rank_0_only():
    codes, said = on_ranks(3, _gather)
    assert codes == [0, 0, 0], said
    assert World(0, 0, 1, torch.device("cpu")).gather_to_main("mine") == ["mine"]


def _deterministic() -> None:
    with distributed_run(ProcessFlags(use_cpu=True, deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_distributed_run_deterministic_sets_torch_and_cublas():
    """The effect shows on a GPU only: tests/gpu/test_runs.py."""
    codes, said = on_ranks(1, _deterministic)
    assert codes == [0], said


class Evil:
    """Unpickling it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


VALUES = ["ä\ud800", None, 2**64 - 1, 1e-300, [], {"a": [1, {"b": "x" * 70_000}]}, True]


def _send_pickles(directory: Path) -> None:
    world = World(int(os.environ["RANK"]), 0, 2, torch.device("cpu"))
    torch.distributed.init_process_group("gloo")
    for value in VALUES:
        assert world.broadcast_object(value if world.is_main else "another") == value
        assert world.gather([world.rank, value]) == [[0, value], [1, value]]
    pickled = torch.frombuffer(bytearray(pickle.dumps(Evil(directory / f"by-{world.rank}"))), dtype=torch.uint8)
    messages._to_tensor = lambda _: pickled
    for collective in (world.broadcast_object, world.gather, world.gather_to_main):
        with suppress(ValueError):
            collective("mine")
    torch.distributed.destroy_process_group()


def test_world_collectives_never_unpickle(tmp_path):
    codes, said = on_ranks(2, _send_pickles, tmp_path)
    assert codes == [0, 0], said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [{1: 2}, [{("a",): 2}], Path("x"), b"x", {1}, torch.ones(1)])
def test_world_collectives_refuse_values_that_are_not_json(value):
    alone = World(0, 0, 1, torch.device("cpu"))
    for collective in (alone.broadcast_object, alone.gather, alone.gather_to_main):
        with pytest.raises(TypeError):
            collective(value)
    assert alone.broadcast_object((1, 2)) == [1, 2]


def test_store_of_this_attempt_fails_soon_without_launcher(monkeypatch):
    """Within AGENT_S, not --ddp_timeout: the launcher and its store were killed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "AGENT_S", 1)
    with pytest.raises(RuntimeError, match="connect"):
        process_group._store_of_this_attempt(World(0, 0, 2, torch.device("cpu")), timeout_s=1800)


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [({}, 0, 1), ({"RANK": "3", "WORLD_SIZE": "8"}, 3, 8), ({"WORLD_SIZE": "8"}, 0, 1)],
    ids=["alone", "rank", "exported WORLD_SIZE"],
)
def test_world_size_is_that_of_a_launcher(monkeypatch, variables, rank, size):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # to be put back as it was
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = World.from_environment(use_cpu=True)
    assert (world.rank, world.size, world.local_size) == (rank, size, size)
