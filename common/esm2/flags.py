"""The flags about ESM-2, and which of them a backend cannot honour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.cli import Missing, UserError, flag
from common.esm2.config import Esm2Config
from common.esm2.gelu import HIDDEN_ACT
from common.layers.backend import BackendFlags
from common.layers.context_attention import WAYS

CP_COMM_TYPES = (*WAYS, "a2a")
NO_KERNEL = "Transformer Engine has no attention kernel for packs here (neither flash-attn nor cuDNN's)"


@dataclass
class ModelFlags(BackendFlags):
    group = "model"
    needed = ("config_name",)
    rarely = ("tokenizer_name", "gelu", "bf16_residual", "cp_comm_type")

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
    bf16_residual: bool = flag(
        False,
        "With --bf16, the stream from layer to layer in bf16 too, as Transformer Engine always has it: less traffic "
        "and memory, two more roundings a layer.",
    )
    cp_comm_type: str = flag(
        "p2p", "How keys come to queries with --cp_size: p2p (a ring), all_gather, or a2a (Transformer Engine only)."
    )

    instead_of = {"config_name": ("model_name_or_path",), "model_name_or_path": ("config_name", "config_overrides")}
    last_wins = ("config_name", "model_name_or_path")

    def missing(self) -> Iterator[Missing]:
        if not self.config_name and not self.model_name_or_path:
            yield Missing("--config_name", "the model to train", "facebook/esm2_t6_8M_UR50D")
        if self.bf16_residual and not self.bf16:
            yield Missing("--bf16", "--bf16_residual is of what is computed in bf16")

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
    from common.esm2.layers_te import has_kernel

    return has_kernel(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
