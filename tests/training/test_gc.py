"""Garbage is collected by the step, not when some rank happens to have made enough of it."""

from __future__ import annotations

import gc
import weakref

import torch

from common.training.step import scheduled_gc
from tests.training_fixtures import _main, flags_of, on_ranks


class Cycle:
    def __init__(self):
        self.itself = self


def test_scheduled_gc_collects_every_n_steps():
    before = gc.get_freeze_count()
    with scheduled_gc(every=3) as collect:
        assert not gc.isenabled()
        garbage = weakref.ref(Cycle())
        for step in (1, 2):
            collect(step)
        assert garbage() is not None
        collect(3)
        assert garbage() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before


def _main_watched(argv: list[str]) -> None:
    """A run; says which generations were collected from the first forward pass of a layer to the last."""
    collected, seen = [], []
    gc.callbacks.append(lambda phase, told: collected.append(told["generation"]) if phase == "start" else None)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(len(collected)))
    _main(argv)
    print(f"generations {collected[seen[0] : seen[-1]]}")


def test_train_collects_no_garbage_between_steps(dataset, tmp_path):
    argv = flags_of(dataset, tmp_path, max_steps=3, do_eval=False, save_final_model=False, dataloader_num_workers=0)
    codes, said = on_ranks(1, _main_watched, argv)
    assert codes == [0], said[0]
    assert "generations []" in said[0]
