"""torch.compile for a model's layers, with a cache directory for each kind of CPU."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from common.cli import UserError, log_every
from common.distributed.world import World
from common.models.layers import cpu
from common.models.layers.residual import Model

logger = logging.getLogger(__name__)
OPERATORS: list[ModuleType] = [cpu]  # modules that define custom operators; an extra appends its own
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable


def compile_layers(
    model: Model, device: str, backend: str = "inductor", *, static_shape: bool = False, cuda_graphs: bool = False
) -> None:
    """torch.compile each layer (in place): all layers share one compiled graph, and packs of any length too.

    static_shape: all batches have one shape, which is compiled in; cuda_graphs: record and replay layers
    (`check_cuda_graphs`), whose gradients are overwritten by the next replay (`Strategy.keep_gradients`). UserError on
    a CPU without a C++ compiler.
    """
    if backend == "inductor" and device == "cpu":
        if not any(shutil.which(c) for c in ("g++", "clang++", "c++")):
            raise UserError("--torch_compile needs a C++ compiler on a CPU (apt-get install g++), or drop the flag")
        cache_by_cpu()
    from common.compat import dynamo_config

    # Under DDP Dynamo splits graphs at the gradient buckets, so that a whole model's graph does not delay their
    # all-reduce. A layer's graph is small enough. Read when the first call traces.
    dynamo_config.optimize_ddp = False
    options = {"triton.cudagraphs": True} if cuda_graphs else None
    for layer in model.layers:
        layer.compile(dynamic=not static_shape, backend=backend, options=options)
    if cuda_graphs:
        # What a pass leaves in the graphs' memory is free when the next begins. By itself torch takes every call of a
        # compiled layer for a new pass.
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())


def check_cuda_graphs(
    world: World, backend: str, compiled: bool, static_shape: bool, quantised: bool, bf16: bool = True
) -> None:
    """UserError for --cuda_graphs where layers cannot be recorded, or nothing holds a replay to what they compute."""
    uncompiled = "layers that are not compiled have none: drop --torch_compile False, or the flag"
    reasons = {
        "a CPU has none: drop the flag": world.device.type != "cuda",
        f"--backend {backend} has none: choose --backend torch or te": backend not in ("torch", "te"),
        uncompiled: backend == "torch" and not compiled,
        "--backend te records layers in bf16: add --bf16, or drop the flag": backend == "te" and not bf16,
        "packs have no single shape: drop --pad_to_max_length; a model with experts has none": not static_shape,
        "with --cp_size a layer's communication depends on the pack: drop one of the two": world.cp_size > 1,
        "number formats keep scales, which a pass changes: drop --fp8, --fp4, or the flag": quantised,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UserError(f"--cuda_graphs: {reason}")


def keep_addresses(tensors: list[Tensor]) -> None:
    """Have CUDA graphs read these, which are no parameters, where they are, and not copy them first."""
    from common.compat import mark_static_address

    for tensor in tensors:
        mark_static_address(tensor)


class FirstStep:
    """Logs that the first step compiles the layers."""

    def __init__(self, compiles: bool):
        self.compiles = compiles

    def waited_for(self) -> AbstractContextManager:
        """Around every step; silent for all but the first."""
        if not self.compiles:
            return nullcontext()
        self.compiles = False
        logger.info("The first step compiles the layers, which takes a while; later starts load them from the cache")
        return log_every("Compiling")


def cache_by_cpu() -> None:
    """Give torch a cache directory for this kind of CPU and this version of our operators.

    torch (2.13) keys compiled graphs by what they compute, not by the instructions used: loaded by another CPU from
    a shared directory, one crashes or computes NaN. It keys our operators by name alone: a graph made for a version
    whose results have other strides fails.
    """
    from common.compat import inductor_cache_dir

    place = Path(inductor_cache_dir())
    own = f"cpu-{_this_cpu()}-{_our_operators()}"
    if place.name != own:
        os.environ[CACHE] = str(place / own)


def _this_cpu() -> str:
    """A hash of the instructions that compiled code may use here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features"))} or {platform.processor()}
    return hashlib.sha256(f"{torch.backends.cpu.get_cpu_capability()} {sorted(flags)}".encode()).hexdigest()[:8]


def _our_operators() -> str:
    """A hash of our operators' source."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in OPERATORS)
    return hashlib.sha256(sources).hexdigest()[:8]
