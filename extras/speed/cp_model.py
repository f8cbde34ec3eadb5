"""Context parallelism of a model: it takes its rank's share of packs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError
from common.models.esm2.family import NO_KERNEL, te_attends
from common.models.layers.attention import rotary_tables
from common.models.layers.residual import Model
from extras.speed.context_attention import CpLayout
from extras.speed.context_parallel import ContextGroup, CpPack


def check_context(comm_type: str, layout: str, cp_size: int, backend: str, config: Any) -> None:
    """UserError if an encoder's backend cannot do the context parallelism that the flags ask for."""
    asked, heads = f"--cp_comm_type {comm_type}", config.num_attention_heads
    if backend == "torch" and comm_type == "a2a":
        raise UserError(f"{asked}: only Transformer Engine has all-to-all (--backend te): choose p2p or all_gather")
    if comm_type == "a2a" and heads % cp_size:
        raise UserError(f"{asked}: {heads} attention heads do not divide among --cp_size {cp_size}: choose p2p")
    if backend == "te" and layout != "dual_chunk":
        raise UserError(f"--cp_layout {layout}: Transformer Engine takes dual_chunk: choose that, or --backend torch")
    if backend == "te" and not te_attends(config):
        raise UserError(f"--cp_size: {NO_KERNEL}: use --backend torch, or install flash-attn (./install.sh --gpu)")


def enable_context_parallel(model: Model, group: dist.ProcessGroup, comm_type: str) -> None:
    """Have a model take packs that the ranks of a group share. comm_type: of `ContextGroup`."""
    context = ContextGroup(group, comm_type)
    encoder: Any = getattr(model, "encoder", None)
    if encoder is None:
        decoder: Any = model
        decoder.share_of = partial(share_of, context)
        return
    encoder.prepare_shared = partial(prepare_shared, context)
    for layer in model.layers:
        if hasattr(layer, "set_context_parallel_group"):  # Transformer Engine's own
            encoder.prepare_shared = partial(prepare_shared_by_te, context, encoder.prepare)
            ranks = dist.get_process_group_ranks(group)
            layer.set_context_parallel_group(group, ranks, torch.cuda.Stream(), comm_type)


def share_of(context: ContextGroup, cp_pack: CpPack, tokens: int) -> tuple[Tensor, CpLayout]:
    """(position in its sequence of each of this rank's tokens, fillers included, [tokens]; the pack's layout)."""
    positions = F.pad(cp_pack.positions, (0, tokens - len(cp_pack.positions)))
    return positions, CpLayout(cp_pack.real, cp_pack.bounds, positions.device, context)


def prepare_shared(
    context: ContextGroup, tokens: int, cu_seqlens: Tensor, max_seqlen: int, head_dim: int, cp_pack: CpPack
) -> tuple[tuple[Tensor, Tensor], int, CpLayout]:
    """What all torch layers share: ((cosines, sines) fp32 [T, D/2] of each token's position in its whole sequence, the
    longest sequence, the layout that attention needs)."""
    positions, layout = share_of(context, cp_pack, tokens)
    return rotary_tables(positions, head_dim), max_seqlen, layout


def prepare_shared_by_te(
    context: ContextGroup,
    prepare: Callable,
    tokens: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim: int,
    cp_pack: CpPack,
) -> tuple[Tensor, int, tuple[Tensor, Tensor]]:
    """What all layers of Transformer Engine share: (rotary angles fp32 [S, 1, 1, D], the bound S on sequence lengths,
    boundaries int32 [B + 2] of the whole sequences without and with padding)."""
    bounds = whole_sequences(cp_pack, tokens)
    longest = max(max_seqlen, int(bounds.diff().max()))
    real, padded = bounds.to(cu_seqlens, non_blocking=True)
    return *prepare(tokens, cu_seqlens, longest, head_dim, 2 * context.size), (real, padded)


def whole_sequences(cp_pack: CpPack, tokens: int) -> Tensor:
    """Boundaries of the shared sequences as Transformer Engine takes them, without and with padding: int64 [2, B + 2]
    on the host. tokens: of each rank, with fillers, which are one more sequence."""
    fillers = (tokens - cp_pack.bounds[:, -1]).sum()
    real, padded = (torch.cat((x.sum(0), fillers[None])) for x in (cp_pack.real, cp_pack.bounds.diff()))
    return F.pad(torch.stack((real, padded)).cumsum(1), (1, 0))
