"""The encoder layer by Transformer Engine: interface and parameter names are those of common.models.esm2.layers_torch.

What differs from the torch layers, by Transformer Engine's own design: GELU is the tanh approximation; under bf16 the
residual stream is bf16, not fp32; fp32 matmuls are TF32 unless NVIDIA_TF32_OVERRIDE=0 is set. The embeddings, the
final norm and the LM head are the torch backend's: too small a part of a step to gain anything (docs/precision.md has
the numbers), and so they stay out of every quantisation.

Attention is Transformer Engine's where it has a kernel for packs: flash-attn if installed, cuDNN on Hopper and later.
Otherwise it would materialise all scores, so attention is the torch backend's (`Attention`).

Written against Transformer Engine 2.20. Needs a CUDA device even to build a layer.
"""

from __future__ import annotations

import math
import os
from functools import cache

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils

from common.models.esm2.config import Esm2Config
from common.models.layers.attention import has_varlen_kernel, rotary_angles, rotated_attention
from common.models.layers.recompute import recompute_by_te
from common.models.layers.residual import total

begin = total  # these layers add up themselves
# Transformer Engine prefers flash-attn-4 where it is installed, which no GPU has run with these layers.
os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
# cuDNN builds and caches a graph for every maximum length it sees: lengths are rounded up to this.
LENGTH_MULTIPLE = 128


@cache
def has_kernel(heads: int, head_dim: int) -> bool:
    """Whether Transformer Engine has an attention kernel for packs in bf16 here, with a backward pass."""
    asked = dpa_utils.AttentionParams(
        qkv_layout="thd_thd_thd",
        batch_size=16,
        num_heads=heads,
        num_gqa_groups=heads,
        max_seqlen_q=1024,
        max_seqlen_kv=1024,
        num_tokens_q=8192,
        num_tokens_kv=8192,
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        attn_mask_type="padding",
        core_attention_bias_requires_grad=False,
        softmax_scale=head_dim**-0.5,
    )
    by_flash_attn, _, by_cudnn, *_ = dpa_utils.get_attention_backend(asked)
    return by_flash_attn or by_cudnn


class Attention(nn.Module):
    """Transformer Engine's attention where it has a kernel, else the torch backend's."""

    def __init__(self, theirs: te.DotProductAttention, heads: int, head_dim: int):
        super().__init__()
        self.theirs, self.shape = theirs, (heads, head_dim)
        self.name = theirs.name  # te.MultiheadAttention reads it

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, **others) -> Tensor:
        """q, k, v [T, H, D] -> [T, H * D]. others: what else te.MultiheadAttention passes on."""
        if others["pad_between_seqs"] or (has_varlen_kernel(q) and has_kernel(*self.shape)):
            return self.theirs(q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, **others)
        return rotated_attention(q, k, v, cu_seqlens_q, max_seqlen_q)


class TransformerLayer(te.TransformerLayer):
    """x [T, hidden] -> [T, hidden], in x's dtype or autocast's."""

    recompute = recompute_by_te

    def __init__(self, config: Esm2Config, number: int = 0):
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
            attn_input_format="thd",
            fuse_qkv_params=True,
            qkv_weight_interleaved=True,
            activation="gelu",
            params_dtype=torch.float32,
            device="meta",  # values come from common.models.layers.initialise
            name=f"encoder.layers.{number}",
        )
        shape = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.self_attention.core_attention = Attention(self.self_attention.core_attention, *shape)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: tuple[Tensor, Tensor] | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """layout: with context parallelism, boundaries of the whole sequences without and with padding; the other
        arguments are of this rank's tokens. at: int64 [P], the tokens whose output is wanted; None: all."""
        cu_seqlens, padded = (cu_seqlens, None) if layout is None else layout
        out = super().forward(
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
        return out if at is None else out[at]


def prepare(tokens: int, cu_seqlens: Tensor, max_seqlen: int, head_dim: int, parts: int = 1) -> tuple[Tensor, int]:
    """What all layers share: (rotary angles fp32 [S, 1, 1, D], the bound S on sequence lengths).

    Transformer Engine takes angles by position in the sequence, and derives the positions from `cu_seqlens`. parts:
    how many the angles are split into, which S is a multiple of.
    """
    multiple = math.lcm(LENGTH_MULTIPLE, parts)
    longest = -(-max_seqlen // multiple) * multiple
    angles = rotary_angles(torch.arange(longest, device=cu_seqlens.device), head_dim)
    return torch.cat((angles, angles), dim=-1)[:, None, None], longest
