"""The flags about ESM-2, and which of them a backend cannot honour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.cli import UserError
from common.flags import Missing, flag
from common.models.esm2.config import Esm2Config
from common.models.layers.backend import BackendFlags
from common.models.layers.context_attention import WAYS

# Which GELU the layers have: ESM-2's own (exact, by erf) or the tanh approximation.
#
# Transformer Engine's fused kernels have the second only. A run records its choice as `hidden_act` in config.json
# (transformers' names), which stock `EsmForMaskedLM` does not read: its GELU is always the exact one. What that
# changes is measured in benchmarks/results/gelu.md. The LM head's GELU is exact everywhere.

HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
ONLY_GELU = {"te": "tanh"}  # a backend with one kind


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


CP_COMM_TYPES = (*WAYS, "a2a")
NO_KERNEL = "Transformer Engine has no attention kernel for packs here (neither flash-attn nor cuDNN's)"


@dataclass(frozen=True)
class ModelFlags(BackendFlags):
    """Which ESM-2, and how it computes."""

    group = "model"
    required = ("config_name",)
    advanced = ("gelu", "bf16_residual", "cp_comm_type")
    unlisted = ("tokenizer_name",)

    config_name: str | None = flag(
        None, "Train from random weights: facebook/esm2_* (built in), a directory with config.json, a Hub name."
    )
    config_overrides: str | None = flag(
        None, "Change the configuration of --config_name: num_hidden_layers=2,hidden_size=64,..."
    )
    tokenizer_name: str | None = flag(
        None, "The vocabulary is always ESM-2's: a directory with another one is refused."
    )
    gelu: str | None = flag(
        None, "exact (ESM-2's own) or tanh (an approximation, Transformer Engine's only one). Default: the backend's."
    )
    bf16_residual: bool = flag(
        False,
        "With --bf16: a bf16 residual stream too, as Transformer Engine always has it: less memory traffic, two more "
        "roundings per layer.",
    )
    cp_comm_type: str = flag(
        "p2p", "How ranks exchange keys with --cp_size: p2p (a ring), all_gather, or a2a (Transformer Engine only)."
    )

    overrides = {"config_name": ("model_name_or_path",), "model_name_or_path": ("config_name", "config_overrides")}
    last_wins = ("config_name", "model_name_or_path")

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
    from common.models.esm2.layers_te import has_kernel

    return has_kernel(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
