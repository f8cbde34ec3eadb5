"""Who computes the encoder layers: Transformer Engine (`te`) or plain PyTorch (`torch`). Weights fit both."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch

from common.cli import UserError

BACKENDS = ("auto", "te", "torch")


def te_missing(device: torch.device) -> str | None:
    """What Transformer Engine lacks here, or None."""
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install -r requirements-gpu.txt)"
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this run is on a CPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # libraries that do not fit each other fail in many ways
        reason = " ".join(str(error).split())[:160]
        return f"Transformer Engine is installed but does not load ({type(error).__name__}: {reason})"
    return None


def choose_backend(args, device: torch.device) -> tuple[str, str]:
    """(`te` or `torch`, why). UserError if --backend te asks for what is not there."""
    if args.backend == "torch":
        return "torch", "--backend torch"
    missing = te_missing(device)
    # What only the torch backend does. `auto` gives way; a user who asked for te is told.
    conflict = next(
        (
            flag
            for flag, wanted in (
                ("--emulate_precision", getattr(args, "emulate_precision", False)),
                ("--torch_compile", args.torch_compile),
                ("--gelu exact", args.gelu == "exact"),
                ("--activation_checkpointing selective", getattr(args, "activation_checkpointing", "") == "selective"),
            )
            if wanted
        ),
        None,
    )
    if args.backend == "te":
        if missing:
            raise UserError(f"--backend te: {missing}: use --backend torch, or auto")
        if conflict:
            raise UserError(f"--backend te: {conflict} is the torch backend's: drop one of the two")
        return "te", "--backend te"
    reason = missing or (f"{conflict} is the torch backend's" if conflict else None)
    if reason is None and not args.bf16:
        reason = "without --bf16 its products would be TF32 and its attention unfused"
    return ("torch", f"not te: {reason}") if reason else ("te", "Transformer Engine is here")
