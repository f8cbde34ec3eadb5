"""The encoder layer by Transformer Engine: interface and parameter names are those of common.model.layers_torch.

What differs from the torch layers, by Transformer Engine's own design: GELU is the tanh approximation; under bf16 the
residual stream is bf16, not fp32; fp32 products are TF32 unless NVIDIA_TF32_OVERRIDE=0 is set. The embeddings, the
final norm and the LM head are the torch backend's: together a thousandth of the work, they would gain nothing from
fusion, and so they stay out of every quantisation.

Written against Transformer Engine 2.20. Needs a CUDA device even to build a layer.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from common.model.attention import rotary_angles
from common.model.config import Esm2Config
from common.model.context_attention import ContextGroup, whole_sequences
from common.ranks.slices import SharedPack

# cuDNN makes, and keeps, a graph for every longest sequence it sees: lengths are rounded up to this.
LENGTH_MULTIPLE = 128


class TransformerLayer(te.TransformerLayer):
    """x [T, hidden] -> [T, hidden], in x's dtype or autocast's.

    attention: `thd` (packed) or `bshd` (unpacked around every layer: slower, for GPUs before Hopper, whose attention
    kernels take no packs).
    """

    def __init__(self, config: Esm2Config, number: int = 0, attention: str | None = None):
        attention = attention or ("thd" if torch.cuda.get_device_capability() >= (9, 0) else "bshd")
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            layernorm_epsilon=config.layer_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layer_number=number + 1,
            layer_type="encoder",
            self_attn_mask_type="padding",  # with thd: no attention across sequences
            attn_input_format=attention,
            fuse_qkv_params=True,
            qkv_weight_interleaved=True,
            activation="gelu",
            params_dtype=torch.float32,
            device="meta",  # its own initialisation is common.model.initialise's business
            name=f"encoder.layers.{number}",
        )

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        sharing: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """sharing: boundaries of the whole sequences without and with padding, where other ranks have a part of them.
        The others are of this rank's tokens."""
        if self.attn_input_format == "bshd":
            return self._unpacked(x, rotary, cu_seqlens, max_seqlen)
        cu_seqlens, padded = (cu_seqlens, None) if sharing is None else sharing
        return super().forward(
            x,
            rotary_pos_emb=rotary,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            pad_between_seqs=padded is not None,
        )

    def _unpacked(self, x: Tensor, rotary: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        real = torch.arange(max_seqlen, device=x.device) < cu_seqlens.diff()[:, None]  # [B, S]
        padded = x.new_zeros(*real.shape, x.shape[-1])
        padded[real] = x
        return super().forward(padded, attention_mask=~real[:, None, None], rotary_pos_emb=rotary)[real]

    def recompute(self) -> None:
        """Keep no activations: run the forward pass again when the backward pass comes.

        te.checkpoint minds FP8's scales, but takes each layer's second forward pass for the end of a step: the amax
        history would age as many times as there are layers. Inside another autocast it is no outermost one that ends.
        """

        def contexts():
            return nullcontext(), te.autocast(enabled=False)  # of the first pass, of the second

        self.forward = partial(te.checkpoint, self.forward, use_reentrant=False, context_fn=contexts)


def prepare(
    tokens: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim: int,
    shared: SharedPack | None = None,
    context: ContextGroup | None = None,
) -> tuple[Tensor, int, tuple[Tensor, Tensor] | None]:
    """What all layers share: (rotary angles fp32 [S, 1, 1, D], the bound S on sequence lengths, boundaries of whole
    sequences where other ranks have a part of them).

    Transformer Engine takes angles by position in the sequence, and finds the position by `cu_seqlens` itself.
    """
    sharing = None
    if shared is not None:
        bounds = whole_sequences(shared, tokens)
        max_seqlen = int(bounds.diff().max())
        sharing = tuple(bounds.to(cu_seqlens, non_blocking=True))
    multiple = LENGTH_MULTIPLE if context is None else math.lcm(LENGTH_MULTIPLE, 2 * context.size)
    longest = -(-max_seqlen // multiple) * multiple
    angles = rotary_angles(torch.arange(longest, device=cu_seqlens.device), head_dim)
    return torch.cat((angles, angles), dim=-1)[:, None, None], longest, sharing
