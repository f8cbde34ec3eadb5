"""What the processes that tests fork find imported: their server imports this module, once.

Imports are most of what a run of seconds takes, and its picture much of the rest: matplotlib is not asked for that one
(tests/training/test_metrics.py looks at what is in it, and runs in processes of their own draw theirs).
"""

from __future__ import annotations

# ruff: noqa: E402
import gc  # isort: skip

gc.disable()  # while importing, where all that there is stays

import ctypes
import sys
import warnings
from contextlib import suppress
from pathlib import Path

# wandb.init imports it, and its pydantic models look for their sources in all modules that there are: half a second
# here, and another one after the others.
with suppress(ImportError):
    import wandb.sdk.launch  # noqa: F401

import numpy
import numpy.ctypeslib
import pandas  # noqa: F401
import torch._inductor.compile_fx  # 0.7 s: what torch.compile imports, with any backend, and TE's statistics
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.run
import torch.utils.serialization
from matplotlib.figure import Figure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers import EsmForMaskedLM, EsmTokenizer, HfArgumentParser, get_scheduler  # noqa: F401

import tests.live_runs  # noqa: F401
from common.compat import FakeStore
from common.models.esm2.config import load_config
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.config_base import override
from tests.training_fixtures import TINY_OVERRIDES

with suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron_fsdp  # noqa: F401

with suppress(ImportError):  # torch 2.11 has none
    import torch.profiler._cupti_monitor

with suppress(ImportError):  # what --report_to opens, where it is installed
    import torch.utils.tensorboard

savefig, subplots = Figure.savefig, Figure.subplots
CURVES = (2, 2)  # of training_curves.png, and of no other picture


class Blank:
    """Axes that nothing is drawn on."""

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def __call__(self, *values, **how):
        return self


def blank_or_subplots(figure: Figure, nrows: int = 1, ncols: int = 1, **how):
    if (nrows, ncols) != CURVES:
        return subplots(figure, nrows, ncols, **how)
    return numpy.full((nrows, ncols), Blank(), dtype=object)


def touch_or_savefig(figure: Figure, path, **how) -> None:
    if Path(path).name.startswith("training_curves"):
        Path(path).touch()
    else:
        savefig(figure, path, **how)


Figure().subplots()  # the first one looks for fonts
Figure.savefig, Figure.subplots = touch_or_savefig, blank_or_subplots

# torchrun's agents note with every heartbeat which of their methods it is, and look for it in the sources of all that
# is imported: here that takes a third of a second, longer than others leave the state of the rendezvous as it is.
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name

torch.empty(1, device="meta")  # the first one imports what it needs


def train_once() -> None:
    """A step of a tiny ESM-2, alone and sharded: the first ones of a process import, look up and compile.

    Of one rank: what torch remembers of a mesh of several is rank 0's, and would be wrong on the others.
    """
    config = override(load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES)
    ids, bounds = torch.randint(4, 24, (512,)), torch.tensor([0, 200, 512], dtype=torch.int32)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for shard in (False, True):
        for bf16 in (False, True):
            model = Esm2ForMaskedLM(config)
            for layer in (*model.layers, model) if shard else ():
                torch.distributed.fsdp.fully_shard(layer)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(ids, cu_seqlens=bounds, max_seqlen=312, labels=ids).loss_sum.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.optim.AdamW(model.parameters()).step()
    torch.distributed.destroy_process_group()


def use_huge_pages() -> None:
    """A fork copies the page table: 400 MB are 200 huge pages or 100,000 others, which takes 20 ms more.

    Nothing changes where the kernel has none of it (before Linux 6.1, or switched off).
    """
    size, collapse = 1 << 21, 25  # MADV_COLLAPSE
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode = line.split()[:5]
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // size) * size, end // size * size
        if access == "rw-p" and inode == "0" and start < end:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)


with torch.random.fork_rng(devices=[]):
    train_once()
gc.collect()
gc.freeze()  # a fork neither looks through all this for garbage nor copies it by doing so
gc.enable()
use_huge_pages()
