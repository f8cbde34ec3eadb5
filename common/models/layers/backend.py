"""The backend of the layers: Transformer Engine (`te`), plain PyTorch (`torch`), or for ESM-2 transformers' (`hf`).

Weights fit all backends.
"""

from __future__ import annotations

import importlib
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from common.cli import UserError, one_line
from common.distributed.world import World
from common.flags import Flags, flag
from common.hooks import extra
from common.models.layers.attention import use_kernels

HF_BACKENDS = {"hf": "sdpa", "hf_flash": "flash_attention_2"}  # {backend: attention of transformers' layers}
BACKENDS = ("auto", "te", "torch", *HF_BACKENDS)
CP_COMM_TYPES = ("p2p", "all_gather", "a2a")
KEPT_ON_RESUME = ("backend", "gelu", "bf16_residual")  # of `BuiltModel.implementation`, by a run that resumes
ATTENTION = ("auto", "flash2", "flash3", "flash4", "cudnn", "sdpa")
BF16_SINCE = (8, 0)  # compute capability
# What a run on a GPU without Transformer Engine lacks, for the log.
LOST = "its fused kernels, and FP8, MXFP8 and NVFP4 on the GPU's own units"
COMPILED = "--torch_compile (Transformer Engine keeps its modules out of graphs)"
HEAD_MULTIPLE = 8  # of the flash kernels behind torch's varlen attention


class Heads(NamedTuple):
    """The attention of a model: heads of queries, of keys and values, their size, and whether it is causal."""

    queries: int
    keys: int
    dim: int
    causal: bool = False


@dataclass(frozen=True)
class BackendFlags(Flags):
    """Flags of a model of any family: its weights, and what computes its layers."""

    group = "model"
    adapters = ("lora", "lora_r", "lora_alpha", "lora_targets")
    unlisted = ("attention", *adapters)
    file_only = ("cp_comm_type",)

    backend: str = flag(
        "auto",
        "What computes the layers: te (Transformer Engine), torch, hf or hf_flash (transformers', ESM-2 alone), "
        "auto: te if possible. Change it to compare them, or if one of them fails.",
        choices=BACKENDS,
    )
    torch_compile: bool | None = flag(
        None,
        "Compile the layers (needs a C++ compiler on a CPU); False for short runs. Default: on a GPU, with the "
        "torch backend.",
    )
    attention: str = flag(
        "auto",
        "What computes the torch backend's attention: flash2, flash3, flash4 or cudnn, in bf16 on a GPU; sdpa, which "
        "takes one sequence at a time; auto: the fastest flash kernels that work here, on a CPU its own.",
        choices=ATTENTION,
    )
    cp_comm_type: str = flag(
        "p2p",
        "How the ranks of --cp_size send keys: p2p is a ring; a2a needs Transformer Engine.",
        choices=CP_COMM_TYPES,
    )
    model_name_or_path: str | None = flag(
        None,
        "To train given weights further: a run's output directory, its final_model/ or a checkpoint, or a Hub name.",
    )
    lora: bool = flag(False, "Train adapters of the layers, merged on export, and no weights (docs/adapting.md).")
    lora_r: int = flag(8, "Rank of LoRA's matrices.")
    lora_alpha: float = flag(16.0, "LoRA's scale times its rank.")
    lora_targets: str = flag("qkv,proj,fc1,fc2", "With --lora: the matrices of a layer that get adapters.")

    def torch_only(self) -> list[str]:
        """Flags that are given and only the torch backend can honour."""
        return [COMPILED] * bool(self.torch_compile) + ["--lora"] * self.lora

    def choose_attention(self, heads: Heads, bf16: bool, world: World, by: str = "torch") -> tuple[str, str]:
        """Activate the kernels of torch's attention: (their name for results, a line for the log), or ("", "") where
        there is no choice. by: the backend that attends. UserError if the flag asks for what cannot be had."""
        attends = by == "torch" and bf16 and world.device.type == "cuda" and not world.is_dry_run
        if self.attention == "auto" and not attends:
            use_kernels("auto")  # of a model before, in this process
            return "", ""
        return extra().attention_kernels().choose(self.attention, heads, bf16, world, by, bool(self.torch_compile))

    def compiles(self, device: torch.device, backend: str) -> tuple[bool, str | None]:
        """Whether the layers are compiled, and a remark where no flag says it: on a GPU eager ones move more than
        twice the bytes (benchmarks/results/step_model.md)."""
        if self.torch_compile is not None or device.type != "cuda" or backend != "torch":
            return bool(self.torch_compile), None
        if self.attention == "sdpa":
            return False, "Layers are not compiled: --attention sdpa attends sequence by sequence"
        if lacking := _to_compile_with():
            return False, f"Layers are not compiled, which costs speed: {lacking}"
        return True, "Layers are compiled in the first step (--torch_compile False: not)"


def _to_compile_with() -> str | None:
    """What torch.compile lacks on a GPU (Triton, or a C compiler for its launchers), or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler (apt-get install gcc)"
    return None


def te_missing(device: torch.device) -> str | None:
    """What Transformer Engine lacks here, or None."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this run is on a CPU"
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (./install.sh --gpu, or the container image)"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # mismatched libraries fail in many ways
        reason = one_line(error)[:160]
        return f"Transformer Engine is installed but does not load ({type(error).__name__}: {reason})"
    return None


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16: every CPU does, and GPUs with the instructions."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= BF16_SINCE


def check_device(device: torch.device, bf16: bool, head_dim: int, backend: str) -> None:
    """UserError for what a GPU cannot do, before a kernel fails with its own message."""
    if device.type != "cuda" or not bf16:
        return
    if not has_bf16(device):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"--bf16: {name} has no bf16 instructions (Ampere, sm80, and later have): drop the flag")
    if backend == "torch" and head_dim % HEAD_MULTIPLE:
        raise UserError(
            f"--bf16: heads of {head_dim} (hidden_size / num_attention_heads): attention on a GPU needs multiples of "
            f"{HEAD_MULTIPLE}: choose another number of heads, or drop the flag"
        )


def choose_backend(
    flags: BackendFlags,
    device: torch.device,
    bf16: bool,
    torch_only: tuple[str, ...] = (),
    previous: str | None = None,
) -> tuple[str, str]:
    """(`te`, `torch` or one of HF_BACKENDS, why). UserError if --backend te cannot be had.

    torch_only: other flags that only the torch backend can honour: `auto` takes torch then, --backend te is an error.
    previous: the backend of the run that is resumed, which `auto` keeps.
    """
    if flags.backend in ("torch", *HF_BACKENDS):
        return flags.backend, f"--backend {flags.backend}"
    missing = te_missing(device)
    conflicts = [*torch_only, *flags.torch_only()]
    if flags.backend == "te":
        if missing:
            raise UserError(f"--backend te: {missing}: use --backend torch, or auto")
        if conflicts:
            raise UserError(f"--backend te: {conflicts[0]} is the torch backend's: drop one of the two")
        return "te", "--backend te"
    if previous and previous in ("torch", *HF_BACKENDS):
        return previous, "as this run so far"
    if previous == "te" and (missing or conflicts):
        raise UserError(
            f"this run has used Transformer Engine so far, and now cannot: {missing or conflicts[0]}: fix that, or "
            "resume with --backend torch"
        )
    if missing and device.type == "cuda":
        missing += f"; this run goes without {LOST}"
    reason = missing or (f"{conflicts[0]} is the torch backend's" if conflicts else None)
    if reason is None and not bf16:
        reason = "without --bf16 its matmuls would be TF32 and its attention unfused"
    return ("torch", f"not te: {reason}") if reason else ("te", "Transformer Engine is here")
