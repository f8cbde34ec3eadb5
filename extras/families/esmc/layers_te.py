"""ESM C's layer by Transformer Engine: interface and parameter names are those of extras.families.esmc.layers.

LayerNorms before matmuls, matmuls and SwiGLU are Transformer Engine's, fused, and what its recipes quantise. The norms
of queries and keys, rotation, attention and the fp32 residual stream are the torch layers'. What differs: under bf16
the norms before matmuls take the residual stream in bf16; fp32 matmuls are TF32 unless NVIDIA_TF32_OVERRIDE=0 is set.

Written against Transformer Engine 2.20. Needs a CUDA device even to build a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from common.models.layers.recompute import recompute_by_te
from common.models.layers.residual import total
from extras.families.esmc import layers
from extras.families.esmc.config import EsmcConfig

begin = total  # these layers add up themselves
prepare = layers.prepare


def use_te(layer: Any, number: int, hidden: int, ffn: int, normalization: str, eps: float) -> None:
    """Put Transformer Engine's modules, without biases, in the place of a layer's norms, matmuls and SwiGLU."""
    name = f"encoder.layers.{number}"  # as ESM-2's: statistics are asked for, and logged, by it
    common = {"bias": False, "params_dtype": torch.float32, "device": "meta"}  # layers.initialise fills them
    norm, attention = {"normalization": normalization, "eps": eps}, layer.self_attention
    qkv = f"{name}.self_attention.layernorm_linear_qkv"
    attention.layernorm_qkv = te.LayerNormLinear(hidden, 3 * hidden, **norm, **common, name=qkv)
    attention.proj = te.Linear(hidden, hidden, **common, name=f"{name}.self_attention.proj")
    layer.layernorm_mlp = te.LayerNormMLP(
        hidden, ffn, **norm, **common, activation="swiglu", name=f"{name}.layernorm_mlp"
    )


class TransformerLayer(layers.TransformerLayer):
    """The stream [T, hidden] -> the same, fp32 under autocast; nothing left to add."""

    recompute = recompute_by_te

    def __init__(self, config: EsmcConfig, number: int = 0):
        super().__init__(config, number)
        use_te(self, number, config.hidden_size, config.intermediate_size, "LayerNorm", config.layer_norm_eps)

    def forward(self, *inputs: Any) -> Tensor:
        return total(super().forward(*inputs))
