"""torch.compile for a model's layers, and a place for what it makes that fits this CPU."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from common.cli import UserError
from common.compat import disable_dynamo as outside_graphs
from common.heartbeat import log_every
from common.models.layers import context_attention, cpu

# What stays out of the graphs that torch.compile makes.

__all__ = ["outside_graphs"]

logger = logging.getLogger(__name__)
OPERATORS = (context_attention, cpu)  # modules that define custom operators
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable


def compile_layers(model: nn.Module, device: str, backend: str = "inductor") -> None:
    """torch.compile each layer (in place): all layers share one compiled graph, and packs of any length too.

    model: with `layers`. UserError where a CPU has no compiler to compile with.
    """
    if backend == "inductor" and device == "cpu":
        if not any(shutil.which(c) for c in ("g++", "clang++", "c++")):
            raise UserError("--torch_compile needs a C++ compiler on a CPU (apt-get install g++), or drop the flag")
        cache_by_cpu()
    from common.compat import dynamo_config

    # Under DDP Dynamo cuts graphs where buckets of gradients end, so that a graph of a whole model does not hold back
    # their exchange. A layer's graph is small enough as it is. Read when the first call traces.
    dynamo_config.optimize_ddp = False
    for layer in model.layers:
        layer.compile(dynamic=True, backend=backend)


class FirstStep:
    """Says what a run waits for in its first step, where that compiles its layers."""

    def __init__(self, compiles: bool):
        self.compiles = compiles

    def waited_for(self) -> AbstractContextManager:
        """Around every step; of all but the first it says nothing."""
        if not self.compiles:
            return nullcontext()
        self.compiles = False
        logger.info("The first step compiles the layers, which takes a while; later starts find them made")
        return log_every("Compiling")


def cache_by_cpu() -> None:
    """Have torch look for compiled code in a directory that is this kind of CPU's own, and our operators'.

    torch (2.13) finds a graph by what it computes, not by the instructions it was compiled for: found by another CPU,
    on a directory that machines share, it crashes there or computes NaN. Our operators it knows by name alone: a graph
    of a version whose operators lay out their results otherwise fails.
    """
    from common.compat import inductor_cache_dir

    place = Path(inductor_cache_dir())
    own = f"cpu-{_this_cpu()}-{_our_operators()}"
    if place.name != own:
        os.environ[CACHE] = str(place / own)


def _this_cpu() -> str:
    """A name for the instructions that compiled code may use here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features"))} or {platform.processor()}
    return hashlib.sha256(f"{torch.backends.cpu.get_cpu_capability()} {sorted(flags)}".encode()).hexdigest()[:8]


def _our_operators() -> str:
    """A name for the operators that compiled code may call here."""
    sources = b"".join(Path(module.__file__).read_bytes() for module in OPERATORS)
    return hashlib.sha256(sources).hexdigest()[:8]
