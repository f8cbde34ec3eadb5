"""AMPLIFY's layer by Transformer Engine: interface and parameter names are those of extras.families.amplify.layers.

What is Transformer Engine's, and what differs: as for ESM C (extras.families.esmc.layers_te).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.models.layers.recompute import recompute_by_te
from common.models.layers.residual import total
from extras.families.amplify import layers
from extras.families.amplify.config import AmplifyConfig
from extras.families.esmc.layers_te import use_te

begin = total  # these layers add up themselves
prepare = layers.prepare


class TransformerLayer(layers.TransformerLayer):
    """The stream [T, hidden] -> the same, fp32 under autocast; nothing left to add."""

    recompute = recompute_by_te

    def __init__(self, config: AmplifyConfig, number: int = 0):
        super().__init__(config, number)
        use_te(self, number, config.hidden_size, config.ffn_size, "RMSNorm", config.norm_eps)

    def forward(self, *inputs: Any) -> Tensor:  # pyrefly: ignore[bad-override]  # as that of ESM C
        return total(super().forward(*inputs))
