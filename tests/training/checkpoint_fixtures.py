"""What the tests of checkpoints share: a short run, a checkpointer without a run, ways to damage a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from common.checkpoint.checkpointer import Checkpointer, CheckpointFlags
from common.distributed.world import World
from common.models.esm2 import config as presets
from common.models.esm2 import model as esm2
from common.models.layers.config_base import override
from tests.forked import run_script

FLAGS = {"max_steps": 6, "save_steps": 2, "save_final_model": False}

DAMAGES = {
    "a shard cut short": lambda c: os.truncate(shard(c), 1000),
    "a flipped byte": lambda c: _flip(shard(c)),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "half a manifest": lambda c: os.truncate(c / "manifest.json", 100),
    "another manifest": lambda c: (c / "manifest.json").write_text("[1]"),
    "no metadata": lambda c: (c / "metadata.json").unlink(),
    "no state": lambda c: (c / "trainer_state.json").unlink(),
    "nothing": lambda c: [path.unlink() for path in c.iterdir()],
}


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*checkpoint-*"))


def checkpointer_of_a_small_model(out: Path, world: World | None = None, **args) -> Checkpointer:
    """`world`: that of a process group which is there already."""
    config = override(
        presets.load_config("facebook/esm2_t6_8M_UR50D"),
        "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64",
    )
    if world is None:
        world = World(int(os.environ.get("RANK", 0)), 0, int(os.environ.get("WORLD_SIZE", 1)), torch.device("cpu"))
        here = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("gloo", **here)
    model = esm2.build_model(config, 1, world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Checkpointer(
        CheckpointFlags(str(out), **{"save_total_limit": 0} | args), model, optimizer, config, world, timeout_s=60
    )


def take_steps(checkpointer: Checkpointer) -> None:
    for p in checkpointer.model.parameters():
        p.grad = torch.ones_like(p)
    checkpointer.optimizer.step()


def exported(checkpoint: Path, directory: Path) -> Path:
    """`directory`, as extras.export writes it."""
    done = run_script("extras.export", checkpoint, directory)
    assert done.returncode == 0, done.stderr
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """{name: content}."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def shard(checkpoint: Path) -> Path:
    """The last rank's."""
    return max(checkpoint.glob("*.distcp"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
