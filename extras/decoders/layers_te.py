"""The decoder layer of Llama and Mistral by Transformer Engine: interface and parameter names are those of
extras.decoders.layers.

Norms and matmuls are Transformer Engine's, fused, and what its recipes quantise. Attention, rotation and the fp32
residual stream are the torch layers': `varlen_attn` is one kernel over the pack, causal and with shared heads, where
Transformer Engine would need flash-attn or a graph of cuDNN's for every longest sequence. What differs: under bf16 the
norms take the residual stream in bf16; fp32 matmuls are TF32 unless NVIDIA_TF32_OVERRIDE=0 is set.

Experts (Mixtral) are not here: their matrices are slices of one parameter, and Transformer Engine's modules have
parameters of their own.

Written against Transformer Engine 2.20. Needs a CUDA device even to build a layer.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from common.models.layers.context_attention import CpLayout
from common.models.layers.recompute import recompute_by_te
from common.models.layers.residual import Stream, total
from extras.decoders import layers as decoder_layers
from extras.decoders.config import DecoderConfig

begin = total  # these layers add up themselves
# FP8, MXFP8 and NVFP4 matmuls take multiples of 16 or 32 tokens; that of ESM-2's packs serves all.
TOKENS = 64


class DecoderLayer(decoder_layers.DecoderLayer):
    """The stream [T, hidden] -> the same, fp32 under autocast; nothing left to add, and no router."""

    recompute = recompute_by_te

    def __init__(self, config: DecoderConfig, number: int = 0):
        super().__init__(config, number)
        hidden, attention = config.hidden_size, self.self_attention
        name = f"encoder.layers.{number}"  # as ESM-2's: statistics are asked for, and logged, by it
        common = {"bias": False, "params_dtype": torch.float32, "device": "meta"}  # layers.initialise fills them
        norm = {"normalization": "RMSNorm", "eps": config.rms_norm_eps}
        rows = attention.layernorm_qkv.weight.shape[0]
        qkv = f"{name}.self_attention.layernorm_linear_qkv"
        attention.layernorm_qkv = te.LayerNormLinear(hidden, rows, **norm, **common, name=qkv)
        attention.proj = te.Linear(hidden, hidden, **common, name=f"{name}.self_attention.proj")
        self.layernorm_mlp = te.LayerNormMLP(
            hidden, config.intermediate_size, **norm, **common, activation="swiglu", name=f"{name}.layernorm_mlp"
        )

    def forward(
        self,
        stream: Tensor | Stream,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: CpLayout | None = None,
    ) -> tuple[Tensor, None, None]:
        x = total(stream)
        x = x + self.self_attention(x, rotary, cu_seqlens, max_seqlen, layout)
        return x + self.layernorm_mlp(x), None, None
