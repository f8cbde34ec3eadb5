"""Who computes the layers, Transformer Engine (`te`) or plain PyTorch (`torch`), and with which GELU.

Weights fit both. GELU is ESM-2's own (exact, by erf) or the tanh approximation, the only one that Transformer Engine's
fused kernels have. A run records its choice as `hidden_act` in config.json (transformers' names), which stock
`EsmForMaskedLM` does not read: its GELU is always the exact one. What that changes is measured in
benchmarks/results/gelu.md. The LM head's GELU is exact everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from common.cli import Flags, Missing, UserError, flag, one_line
from common.model.config import Esm2Config
from common.model.context_attention import WAYS

BACKENDS = ("auto", "te", "torch")
CP_COMM_TYPES = (*WAYS, "a2a")
HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
BF16_SINCE = (8, 0)  # compute capability
# What a GPU does without, where Transformer Engine is not: said at the start of a run.
LOST = "its fused kernels, and FP8, MXFP8 and NVFP4 on the GPU's own units"
NO_KERNEL = "Transformer Engine has no attention kernel for packs here (neither flash-attn nor cuDNN's)"
HEAD_MULTIPLE = 8  # of the flash kernels behind torch's varlen attention
ONLY_GELU = {"te": "tanh"}  # a backend with one kind


@dataclass
class BackendFlags(Flags):
    backend: str = flag(
        "auto",
        "Layers by te (Transformer Engine; NVIDIA GPUs) or torch (any device). auto: te if it is there.",
    )
    torch_compile: bool = flag(False, "Compile the layers (needs a C++ compiler on a CPU).")

    def check(self) -> None:
        self.require_choice("backend", BACKENDS)

    def torch_only(self) -> list[str]:
        """Those that are given and only the torch backend can honour."""
        return ["--torch_compile"] * self.torch_compile


@dataclass
class ModelFlags(BackendFlags):
    config_name: str | None = flag(
        None, "Train from random weights: facebook/esm2_* (built in), a directory with config.json, a Hub name."
    )
    model_name_or_path: str | None = flag(
        None, "Start from these weights: a directory (say final_model/) or a Hub name."
    )
    config_overrides: str | None = flag(
        None, "Change the configuration of --config_name: num_hidden_layers=2,hidden_size=64,..."
    )
    tokenizer_name: str | None = flag(
        None, "Accepted for the guides' sake: the vocabulary is ESM-2's, and a directory with another one is refused."
    )
    gelu: str | None = flag(
        None, "exact (ESM-2's own) or tanh (an approximation, Transformer Engine's only one). Default: the backend's."
    )
    cp_comm_type: str = flag(
        "p2p", "How keys come to queries with --cp_size: p2p (a ring), all_gather, or a2a (Transformer Engine only)."
    )

    instead_of = {"config_name": ("model_name_or_path",), "model_name_or_path": ("config_name", "config_overrides")}

    def missing(self) -> Iterator[Missing]:
        if not self.config_name and not self.model_name_or_path:
            yield Missing("--config_name", "the model to train", "facebook/esm2_t6_8M_UR50D")

    def check(self) -> None:
        if self.config_name and self.model_name_or_path:
            raise UserError("--config_name (random weights) excludes --model_name_or_path (given weights)")
        if self.config_overrides and not self.config_name:
            raise UserError("--config_overrides changes --config_name; it cannot change --model_name_or_path")
        self.require_choice("cp_comm_type", CP_COMM_TYPES)
        self.require_choice("gelu", (None, *HIDDEN_ACT))

    def torch_only(self) -> list[str]:
        return [*super().torch_only(), *["--gelu exact"] * (self.gelu == "exact")]


def check_context(flags: ModelFlags, layout: str, cp_size: int, backend: str, config: Esm2Config) -> None:
    """UserError where a backend cannot share packs among so many ranks as the flags say."""
    way, heads = f"--cp_comm_type {flags.cp_comm_type}", config.num_attention_heads
    if cp_size == 1:
        return
    if backend == "torch" and flags.cp_comm_type == "a2a":
        raise UserError(f"{way}: only Transformer Engine exchanges heads (--backend te): choose p2p or all_gather")
    if flags.cp_comm_type == "a2a" and heads % cp_size:
        raise UserError(f"{way}: {heads} attention heads do not divide among --cp_size {cp_size}: choose p2p")
    if backend == "te" and layout != "dual_chunk":
        raise UserError(f"--cp_layout {layout}: Transformer Engine takes dual_chunk: choose that, or --backend torch")
    if backend == "te" and not te_attends(config):
        raise UserError(f"--cp_size: {NO_KERNEL}: use --backend torch, or install flash-attn (./install.sh --gpu)")


def te_attends(config: Esm2Config) -> bool:
    """Whether Transformer Engine, which is here, attends to packs by a kernel of its own."""
    from common.model.layers_te import has_kernel

    return has_kernel(config.num_attention_heads, config.hidden_size // config.num_attention_heads)


def te_missing(device: torch.device) -> str | None:
    """What Transformer Engine lacks here, or None."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this run is on a CPU"
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (./install.sh --gpu, or the container image)"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # libraries that do not fit each other fail in many ways
        reason = one_line(error)[:160]
        return f"Transformer Engine is installed but does not load ({type(error).__name__}: {reason})"
    return None


def has_bf16(device: torch.device) -> bool:
    """Whether it computes in bf16: every CPU (common.model.cpu), and GPUs that have the instructions."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= BF16_SINCE


def check_device(device: torch.device, bf16: bool, head_dim: int, backend: str) -> None:
    """UserError for what a GPU cannot do, before the first kernel says so in its own words."""
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
    so_far: str | None = None,
) -> tuple[str, str]:
    """(`te` or `torch`, why). UserError if --backend te asks for what is not there.

    torch_only: what else only the torch backend can honour: `auto` gives way; a user who asked for te is told. so_far:
    what the run that goes on has computed with, which `auto` keeps.
    """
    if flags.backend == "torch":
        return "torch", "--backend torch"
    missing = te_missing(device)
    conflicts = [*torch_only, *flags.torch_only()]
    if flags.backend == "te":
        if missing:
            raise UserError(f"--backend te: {missing}: use --backend torch, or auto")
        if conflicts:
            raise UserError(f"--backend te: {conflicts[0]} is the torch backend's: drop one of the two")
        return "te", "--backend te"
    if so_far == "torch":
        return "torch", "as this run so far"
    if so_far == "te" and (missing or conflicts):
        raise UserError(
            f"this run computes with Transformer Engine so far, and now not: {missing or conflicts[0]}: mend that, or "
            "give --backend torch to go on without it"
        )
    if missing and device.type == "cuda":
        missing += f"; this run goes without {LOST}"
    reason = missing or (f"{conflicts[0]} is the torch backend's" if conflicts else None)
    if reason is None and not bf16:
        reason = "without --bf16 its products would be TF32 and its attention unfused"
    return ("torch", f"not te: {reason}") if reason else ("te", "Transformer Engine is here")


def gelu_of(config: Esm2Config) -> str:
    """`exact` or `tanh`, as config.json says. Any other `hidden_act` counts for nothing, as in transformers."""
    return "tanh" if getattr(config, "hidden_act", None) == HIDDEN_ACT["tanh"] else "exact"


def choose_gelu(asked: str | None, backend: str, config: Esm2Config) -> tuple[str, str | None]:
    """Settle on --gelu, write it into the configuration, and return it with what is to be said about it.

    asked: None leaves it to the backend, and then to the weights' own configuration. UserError where the backend has
    only another.
    """
    own, only = gelu_of(config), ONLY_GELU.get(backend)
    if asked and only and asked != only:
        raise UserError(f"--gelu {asked}: --backend {backend} has the {only} GELU only: drop the flag, or the backend")
    chosen = asked or only or own
    config.hidden_act = HIDDEN_ACT[chosen]
    if chosen == "tanh":
        why = "asked for" if asked else f"--backend {backend} has no other" if only else "as the weights were trained"
        return chosen, (
            f"GELU: the tanh approximation ({why}), recorded as hidden_act {config.hidden_act}; EsmForMaskedLM "
            "computes the exact one"
        )
    if own == "tanh":
        return chosen, "GELU: the exact one (asked for); these weights were trained with the tanh approximation"
    return chosen, None  # ESM-2 as published goes without saying
