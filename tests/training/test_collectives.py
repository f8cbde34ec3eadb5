"""The collectives of a step: gradients (and sharded weights), the gradient norm of shards, and one all-reduce more.

That one has the loss, the next step's token counts and whether a rank is to stop. Any further collective would make
the host wait once more for the slowest rank, with no computation to hide it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training_fixtures import _main, flags_of, on_ranks, rows

STEPS = 4  # the estimate of the run's time, after the fifth, takes an exchange of its own
ROW = "row"
CASES = {
    # Gradients are in one bucket, reduced after the last of a step's two micro-batches.
    "DDP": ({"script": "train_ddp.py", "gradient_accumulation_steps": 2}, ["allreduce_", "allreduce_"]),
    # Two layers and the rest: gathered for the forward pass, layers once more for the backward pass. And the norm.
    "FSDP2": (
        {"script": "train_fsdp2.py"},
        ["_allgather_base_"] * 5 + ["_reduce_scatter_base_"] * 3 + ["allreduce_"] * 2,
    ),
}


class CollectivesLog(TorchDispatchMode):
    """Names of torch.distributed's operators, in turn, and where a row of the log came between them."""

    def __init__(self, file: Path):
        super().__init__()
        self.file = file

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again by its local parts
        if func.namespace in ("c10d", "_c10d_functional") and not func._opname.startswith(("wait", "_wrap")):
            self.write(func._opname)
        return func(*args, **(kwargs or {}))

    def write(self, name: str) -> None:
        with self.file.open("a") as file:
            file.write(name + "\n")


def _main_recorded(argv: list[str], script: str, file: Path) -> None:
    """Those of rank 0, which logs the rows."""
    log = CollectivesLog(file if os.environ["RANK"] == "0" else Path(os.devnull))
    marker = logging.Handler()
    marker.emit = lambda record: log.write(ROW)
    logging.getLogger("common.training.run_logger").addHandler(marker)
    with log:
        _main(argv, script)


@pytest.mark.parametrize("case", CASES)
def test_step_collectives_are_gradients_and_one_scalar_all_reduce(dataset, tmp_path, case):
    flags, expected = CASES[case]
    file, out, script = tmp_path / "collectives", tmp_path / "out", flags["script"]
    more = {name: value for name, value in flags.items() if name != "script"}
    argv = flags_of(dataset, out, max_steps=STEPS, save_final_model=False, **more)
    codes, said = on_ranks(2, _main_recorded, argv, script, file)
    assert codes == [0, 0], said
    assert len(rows(out)) == STEPS
    *_, one, two, _ = file.read_text().split(ROW + "\n")  # in the second step DDP still rebuilds its buckets
    assert sorted(one.split()) == sorted(two.split()) == sorted(expected)
