"""train_fsdp2.py when things break: ranks that die, damaged shards, signals, and saves on a slow disk."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.checkpoint.checkpointer import Checkpointer, CheckpointFlags
from common.distributed.world import World
from common.models.esm2 import config as presets
from common.models.esm2 import model as esm2
from common.models.layers.config_base import override
from tests.live_runs import PREEMPTED, LiveRun, assert_same_run, newest_step
from tests.training.checkpoint_fixtures import DAMAGES
from tests.training_fixtures import TINY_OVERRIDES, on_ranks, rows, train

FLAGS = {"script": "train_fsdp2.py", "per_device_train_batch_size": 1, "save_final_model": False}


@pytest.mark.slow
def test_fsdp2_resume_skips_and_names_damaged_checkpoints(dataset, tmp_path):
    flags, out = FLAGS | {"max_steps": 14, "save_steps": 2}, tmp_path / "damaged"
    train(dataset, out, 2, **flags)
    shutil.copytree(out, tmp_path / "whole")
    damages = ("a shard cut short", "a flipped byte", "no metadata", "no manifest", "nothing")
    for step, damage in zip((6, 8, 10, 12, 14), damages, strict=True):
        DAMAGES[damage](out / f"checkpoint-{step}")
    said = train(dataset, out, 2, **flags)
    for step, reason in (
        (6, "__1_0.distcp is damaged (1000 bytes,"),
        (8, "__1_0.distcp is damaged"),
        (10, "metadata.json is missing"),
        (12, "not a checkpoint of this program, or torn: no readable manifest.json"),
        (14, "not a checkpoint of this program, or torn: no readable manifest.json"),
    ):
        assert f"WARNING - {out}/checkpoint-{step}: skipped: {reason}" in said
    assert "Resuming after step 4" in said
    assert_same_run(out, tmp_path / "whole", 14, tmp_path)

    other = flags | {"config_overrides": TINY_OVERRIDES.replace("64", "128")}
    said = train(dataset, out, 2, expect=2, **other)
    assert said.count("error: ") == 1
    assert "checkpoint-14: the checkpoint is of another model: intermediate_size 64 (now 128);" in said


@pytest.mark.slow
def test_fsdp2_signal_saves_and_run_resumes(dataset, tmp_path):
    """SIGUSR1 to one rank; SIGTERM to both, and to one, while the ranks evaluate (half a second or more)."""
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "validation"):
        (data / split).symlink_to(dataset / "train")
    flags = FLAGS | {"max_steps": 14, "do_eval": True, "eval_steps": 8, "per_device_eval_batch_size": 1}
    flags["max_eval_samples"] = 120
    train(data, tmp_path / "whole", 2, **flags)
    out = tmp_path / "out"
    with LiveRun(data, out, tmp_path / "logs", 2, **flags) as run:
        run.until_step(4)
        run.signal(signal.SIGUSR1, rank=1)
        last = rows(out)[-1]["step"]
        assert run.end() == [PREEMPTED] * 2
    # The step under way, and one more if its agreement was under way too.
    assert newest_step(out) == rows(out)[-1]["step"] <= last + 2

    with LiveRun(data, out, tmp_path / "logs", 2, **flags) as run:
        run.until_said("Running Evaluation")
        run.signal(signal.SIGTERM)  # as torchrun hands it on
        assert run.end() == [PREEMPTED] * 2
        said = run.said()
    assert "Stopped by a signal, checkpoint saved" in said
    assert newest_step(out) == 8

    with LiveRun(data, out, tmp_path / "logs", 2, **flags) as run:
        run.until_said("Running Evaluation")
        run.signal(signal.SIGTERM, rank=1)
        assert run.end() == [PREEMPTED] * 2
    assert newest_step(out) == 8
    assert json.loads((out / "checkpoint-8/trainer_state.json").read_text())["unfinished_row"]["step"] == 8
    train(data, out, 2, **flags)
    assert_same_run(out, tmp_path / "whole", 14, tmp_path)


# ---- saving in the background --------------------------------------------------------------------------------


def held_bytes() -> int:
    """Of all tensors of this process, each byte once: copies have storages of their own in one block of memory."""
    plain = (t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
    held, end = 0, 0
    for begin, size in sorted({(storage.data_ptr(), storage.nbytes()) for storage in plain}):
        held += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return held


def _saves_on_a_slow_disk(out: Path) -> None:
    """On a rank: saves in quick succession, where flushing a file takes half a second.

    Memory is looked at while the writer sleeps: a tuple that another thread is still filling must not be seen by
    gc.get_objects (CPython then raises SystemError there).
    """
    flush, flushing = os.fsync, threading.Event()
    os.fsync = lambda file: (flushing.set(), time.sleep(0.5), flush(file))
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"))
    model = esm2.build_model(override(presets.load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES), 1)
    whole = sum(p.numel() for p in model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    checkpointer = Checkpointer(CheckpointFlags(str(out)), model, optimizer, model.config, world, timeout_s=60)
    gc.collect()
    before, copy = held_bytes(), 3 * 4 * whole / world.size  # fp32 weights and two moments, this rank's share
    for step in (1, 2, 3):
        checkpointer.save(step, {"step": step})
        flushing.clear()  # set by the save before; this one begins to write only when the ranks have agreed
        gc.collect()
        assert not (out / f"checkpoint-{step}").exists(), "it was written before save returned"
        assert step == 1 or (out / f"checkpoint-{step - 1}").exists(), "two saves were under way"
        assert flushing.wait(60)
        # One, and not two; beside it what the writer has at hand.
        assert 0.9 * copy < held_bytes() - before < 1.5 * copy
    checkpointer.wait()
    gc.collect()
    assert (out / "checkpoint-3").exists()
    assert held_bytes() - before < 1.1 * copy, "the memory of one copy, kept for the next save"
    dist.destroy_process_group()


def test_fsdp2_save_waits_for_previous_and_holds_one_copy(tmp_path):
    codes, said = on_ranks(2, _saves_on_a_slow_disk, tmp_path)
    assert codes == [0, 0], "\n".join(said)
