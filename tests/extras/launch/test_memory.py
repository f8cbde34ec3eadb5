"""States in the launcher's memory: what a slot gives back, and runs of which ranks and nodes are killed.

The long form: pytest tests/extras/launch/test_memory.py -s --soak-rounds 50 [--soak-seed N]
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from common.cli import MEMORY, MachineFault, UserError
from common.distributed.world import World
from extras.launch.memory import DATA, LauncherMemory, Slot
from extras.launch.memory_checkpoints import MOST_COST, MemoryCheckpoints, steps_between
from tests.extras.launch.test_elastic import Agent
from tests.forked import ROOT, Script
from tests.live_runs import assert_same_run, kill_all, newest_step, ranks_of, wait_until
from tests.patience import run
from tests.training_fixtures import environment, flags_of, free_port, losses, rows, train
from tests.warm_python import python

ABOUT = {"step": 7, "rank": 0, "size": 1, "bytes": 5}


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setenv(MEMORY, "")  # to be taken back
    memory = LauncherMemory(2)
    yield memory
    for file in memory.files:
        os.close(file)


def filled(path: str, about: dict = ABOUT) -> Slot:
    slot = Slot(path)
    slot.allocate(about["bytes"])[:] = torch.arange(about["bytes"], dtype=torch.uint8)
    slot.commit(json.dumps(about).encode(), about["bytes"])
    return slot


# ---- slots --------------------------------------------------------------------------------------------------


def test_slot_gives_back_what_another_process_committed(memory):
    filled(memory.paths[1])
    content = Slot(memory.paths[1]).read()
    assert content.about == ABOUT
    assert content.data.tolist() == [0, 1, 2, 3, 4]
    assert memory.newest() == 7
    memory.clear()
    assert memory.newest() is None
    assert Slot(memory.paths[1]).read() is None


@pytest.mark.parametrize("place", ["data", "about", "begun"])
def test_slot_gives_nothing_of_what_is_not_whole(memory, place):
    slot = filled(memory.paths[0])
    if place == "begun":
        slot.begin()
    else:
        os.pwrite(slot.file, b"\xff", DATA + 2 if place == "data" else DATA + 7)
    assert Slot(memory.paths[0]).read() is None


def test_slot_does_not_keep_a_copy_that_was_damaged_on_the_way(memory):
    slot = Slot(memory.paths[2])
    slot.allocate(5)
    with pytest.raises(OSError, match="damaged"):
        slot.commit(b"{}", 5, expected=[1, 2])
    assert slot.read() is None


def test_slot_refuses_memory_that_others_may_write(memory, tmp_path):
    assert Path(memory.paths[0]).stat().st_mode & 0o777 == 0o600
    os.fchmod(memory.files[0], 0o622)
    with pytest.raises(UserError, match="alone"):
        Slot(memory.paths[0])


def test_memory_forgets_a_state_that_ended_in_a_fault_of_a_machine(memory):
    world = World(0, 0, 1, torch.device("cpu"))
    for path in memory.paths[:2]:
        filled(path)
    with MemoryCheckpoints(world), pytest.raises(RuntimeError), MemoryCheckpoints(world):
        raise RuntimeError
    assert memory.newest() == 7
    with pytest.raises(MachineFault), MemoryCheckpoints(world):
        raise MachineFault
    assert memory.newest() is None


def test_default_costs_at_most_its_share_of_the_time():
    for cost, seconds in ((0.001, 1.0), (0.02, 1.0), (0.021, 1.0), (3.0, 0.5)):
        every = steps_between(cost, seconds)
        assert cost <= MOST_COST * every * seconds * (1 + 1e-9)
        assert every == 1 or cost > MOST_COST * (every - 1) * seconds


# A rank that holds step 5 from its first start on, fails as long as there is one, and says what it found.
RANK = """
import os, sys
from extras.launch.memory import Slot
slot = Slot(os.environ["MEMORY_CHECKPOINTS"].split()[0])
head = slot.head()
with open(sys.argv[1], "a") as file:
    is_first = file.tell() == 0
    file.write(f"{head and head[0]['step']}\\n")
if is_first:
    slot.allocate(1)
    slot.commit(b'{"step": 5, "bytes": 1}', 1)
sys.exit(1 if head or is_first else 0)
"""


def test_launcher_clears_memory_from_which_a_start_came_no_further(tmp_path):
    """The checkpoint on the disk comes next: what is in memory may be what ends the run."""
    (tmp_path / "train_x.py").write_text(RANK)
    argv = ["--nproc_per_node=1", "--max_restarts=5", "--monitor_interval=0.02", str(tmp_path / "train_x.py")]
    script = Script("extras.launch", *argv, str(tmp_path / "said"), env=environment() | {"PYTHONPATH": str(ROOT)})
    assert script.wait() == 0, script.said()
    assert (tmp_path / "said").read_text().split() == ["None", "5", "5", "None"]


ADDRESS = """
import os
from multiprocessing import forkserver
forkserver.ensure_running()
address = forkserver._forkserver._forkserver_address
print(address, oct(os.stat(os.path.dirname(address)).st_mode)[-3:])
"""


def test_fork_server_answers_this_user_alone():
    done = run([sys.executable, "-c", ADDRESS], env=environment())
    address, mode = done.stdout.split()
    assert address.startswith("/"), "an abstract address has no owner"
    assert mode == "700"


# ---- runs ---------------------------------------------------------------------------------------------------

NO_CHECKPOINT = {"save_steps": 100_000, "logging_steps": 1, "memory_save_steps": 1, "save_final_model": False}
WITHOUT_GPU = """
import extras
import runpy
import sys
from tests import megatron_on_cpu
megatron_on_cpu.install()
sys.argv[0] = {0!r}
runpy.run_path({0!r}, run_name="__main__")
"""
STEPS_A_KILL = 100  # of some 20 ms
LAYOUTS = {
    "ddp": ("train_ddp.py", 2, {}),
    "fsdp2": ("train_fsdp2.py", 2, {}),
    "hybrid": ("train_fsdp2.py", 4, {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}),
    "muon": ("train_fsdp2.py", 2, {"optim": "muon"}),
    "mfsdp": ("train_mfsdp.py", 2, {}),
}


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_ranks_go_on_from_memory_with_the_same_bits(dataset, tmp_path, layout, rounds, generator):
    """There is no checkpoint on the disk until the end, and no step but the last before a kill is repeated."""
    script, nproc, flags = LAYOUTS[layout]
    started: Path | str = script
    if script == "train_mfsdp.py":
        pytest.importorskip("megatron_fsdp")
        started = tmp_path / script
        started.write_text(WITHOUT_GPU.format(str(ROOT / script)))
    kills = rounds or 2
    flags = NO_CHECKPOINT | flags | {"max_steps": STEPS_A_KILL * (kills + 1), "packs_per_step": nproc}
    train(dataset, tmp_path / "whole", nproc, script=script, **flags)
    out, log = tmp_path / "out", tmp_path / "log"
    launcher = ["-m", "extras.launch", f"--nproc_per_node={nproc}", f"--max_restarts={kills}", str(started)]
    with open(log, "w") as file:
        words = [python(), *launcher, *flags_of(dataset, out, **flags)]
        env = environment() | {"PYTHONPATH": str(ROOT)}
        job = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True)
    alive = lambda: job.poll() is None  # noqa: E731
    try:
        for number in range(kills):
            goal = STEPS_A_KILL * number + generator.randint(2, STEPS_A_KILL // 2)
            assert wait_until(lambda goal=goal: reached(log) >= goal, alive, 0.005, log.read_text)
            time.sleep(0.05 * generator.random())
            rank = generator.randrange(nproc)
            at, before = reached(log), resumed(log)
            os.kill(ranks_of(job.pid)[rank], signal.SIGKILL)
            assert wait_until(lambda before=before: len(resumed(log)) > len(before), alive, said=log.read_text)
            print(f"kill {number}: rank {rank} after step {at}; resumed at {resumed(log)[-1]}", flush=True)
            assert resumed(log)[-1] >= at - 1
        assert job.wait(timeout=300) == 0, log.read_text()
    finally:
        kill_all(job)
    assert_same_run(out, tmp_path / "whole", flags["max_steps"], tmp_path)


def reached(log: Path) -> int:
    """The last step that was logged."""
    return max(map(int, re.findall(r"- step: (\d+)/", log.read_text())), default=0)


def resumed(log: Path) -> list[int]:
    return [int(step) for step in re.findall(r"Resuming after step (\d+)", log.read_text())]


def test_state_of_a_lost_node_is_had_from_its_partner(dataset, tmp_path):
    """Two nodes of one rank; one is killed with its launcher, and another one comes.

    There is a checkpoint on the disk only where ranks were stopped for a node that came.
    """
    out = tmp_path / "out"
    flags = NO_CHECKPOINT | {"max_steps": 100_000, "packs_per_step": 2}
    argv = ["train_ddp.py", *flags_of(dataset, out, **flags)]
    endpoint, job = f"127.0.0.1:{free_port()}", uuid.uuid4().hex
    first = Agent(tmp_path / "0.log", endpoint, job, 1, argv)
    agents = [first]

    def logs() -> str:
        return "\n".join(agent.log.read_text() for agent in agents)

    def said(text: str, times: int) -> None:
        assert wait_until(lambda: logs().count(text) >= times, first.alive, 0.05, logs), logs()

    def step() -> int:
        return max(map(int, re.findall(r"- step: (\d+)/", logs())), default=0)

    try:
        said("- step: 2/", 1)
        for number, ranks in ((1, 2), (2, 1), (3, 2)):
            if ranks == 1:
                agents[-1].kill()
                assert newest_step(out) < step() - 3
            else:
                agents.append(Agent(tmp_path / f"{number}.log", endpoint, job, 1, argv))
            at, times = step(), logs().count("Resuming after step")
            said("Resuming after step", times + 1)
            assert max(map(int, re.findall(r"Resuming after step (\d+)", logs()))) >= at - 1, logs()
            goal = step() + 5
            assert wait_until(lambda goal=goal: step() >= goal, first.alive, 0.05, logs), logs()
    finally:
        for agent in agents:
            agent.kill()
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    train(dataset, tmp_path / "whole", **flags, stop_at_step=len(found))
    assert [row["loss"] for row in found] == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
