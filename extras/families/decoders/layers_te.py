"""The decoder layer of Llama, Mistral and Mixtral by Transformer Engine: interface and parameter names are those of
extras.families.decoders.layers.

Norms and matmuls are Transformer Engine's, fused, and what its recipes quantise. Attention, rotation and the fp32
residual stream are the torch layers': `varlen_attn` is one kernel over the pack, causal and with shared heads, where
Transformer Engine would need flash-attn or a graph of cuDNN's for every longest sequence. What differs: under bf16 the
norms take the residual stream in bf16; fp32 matmuls are TF32 unless NVIDIA_TF32_OVERRIDE=0 is set.

Experts (Mixtral) take Transformer Engine's grouped matmuls; norm and router are the torch layer's. Each expert's rows
are filled up with zeros to the multiple that the layer's number format asks for.

Written against Transformer Engine 2.20. Needs a CUDA device even to build a layer. No GPU has run the experts.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from common.models.layers.attention import Layout
from common.models.layers.recompute import recompute_by_te
from common.models.layers.residual import Stream, total
from extras.families.decoders import layers as decoder_layers
from extras.families.decoders.config import DecoderConfig

begin = total  # these layers add up themselves
# FP8, MXFP8 and NVFP4 matmuls take multiples of 16 or 32 tokens; that of ESM-2's packs serves all.
TOKENS = 64


class GroupedLinear(te.GroupedLinear):
    """A matrix for each expert, that all lie in one parameter of the module around: it has none of its own."""

    def __init__(self, experts: int, in_features: int, out_features: int, name: str):
        like = {"bias": False, "params_dtype": torch.float32, "device": "meta", "use_grouped_tensor": False}
        super().__init__(experts, in_features, out_features, **like, name=name)
        for number in range(experts):
            delattr(self, f"weight{number}")
        self.matrices: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        """x [A, in], rows sorted by expert, weight [experts * out, in] -> [A, out]. sizes: rows of each expert."""
        self.matrices = weight.chunk(self.num_gemms)
        try:
            return super().forward(x, sizes)
        finally:
            self.matrices = ()  # which hold the pass's graph

    def _get_weight_tensors(self) -> list[Tensor]:
        return list(self.matrices)


class Experts(decoder_layers.Experts):
    def __init__(self, config: DecoderConfig, name: str):
        super().__init__(config)
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.fc1_matmul = GroupedLinear(self.experts, hidden, 2 * ffn, f"{name}.fc1")
        self.fc2_matmul = GroupedLinear(self.experts, ffn, hidden, f"{name}.fc2")
        self.fill, self.cut = te.Fp8Padding(self.experts), te.Fp8Unpadding(self.experts)

    def of_normed(self, x: Tensor, extra: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # Transformer Engine would cast fp32 as it is
            x = x.to(torch.get_autocast_dtype(x.device.type))
        sizes = extra.tolist()
        if not FP8GlobalStateManager.is_fp8_enabled():
            return super().of_normed(x, sizes)
        x, filled = self.fill(x, sizes)
        return self.cut(super().of_normed(x, filled), sizes)


class DecoderLayer(decoder_layers.DecoderLayer):
    """The stream [T, hidden] -> the same, fp32 under autocast; nothing left to add."""

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
        if config.num_local_experts:
            self.layernorm_mlp = Experts(config, f"{name}.layernorm_mlp")
        else:
            self.layernorm_mlp = te.LayerNormMLP(
                hidden, config.intermediate_size, **norm, **common, activation="swiglu", name=f"{name}.layernorm_mlp"
            )

    def forward(
        self,
        stream: Tensor | Stream,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None = None,
        tokens: int | None = None,
    ) -> tuple[Tensor, None, Tensor | None]:
        x = total(stream)
        x = x + self.self_attention(x, rotary, cu_seqlens, max_seqlen, layout)
        if isinstance(self.layernorm_mlp, Experts):
            more, shares = self.layernorm_mlp(x, layout, tokens)
            return x + more, None, shares
        return x + self.layernorm_mlp(x), None, None
