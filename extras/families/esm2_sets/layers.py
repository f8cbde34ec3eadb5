"""ESM-2's layer, which some follow with attention over the set: x + proj(attention(LN(x))).

The output projection starts at zero: a model begins as the ESM-2 whose weights it has, to the last bit.
"""

from __future__ import annotations

from torch import Tensor

from common.models.esm2 import layers_torch
from common.models.esm2.layers_torch import SelfAttention
from common.models.esm2.layers_torch import prepare as prepare
from common.models.layers.attention import Layout
from common.models.layers.residual import Stream, total
from common.models.layers.residual import begin as begin
from extras.families.esm2_sets.config import EsmSetsConfig


class TransformerLayer(layers_torch.TransformerLayer):
    """number: which one it is, from 0."""

    def __init__(self, config: EsmSetsConfig, number: int = 0):
        super().__init__(config, number)
        self.set_attention = SelfAttention(config) if config.is_global(number) else None

    def forward(  # pyrefly: ignore[bad-override]  # as SetEncoder.inputs_over_sets has it
        self,
        stream: Tensor | Stream,
        rotary: tuple,
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None | tuple[Layout | None, Layout] = None,
    ) -> Stream:
        """rotary, layout: of the attention within sequences; with attention over the set, pairs of its and that's."""
        if self.set_attention is None:
            return super().forward(stream, rotary, cu_seqlens, max_seqlen, layout)
        (within, over), (own, of_set) = rotary, layout
        x = total(super().forward(stream, within, cu_seqlens, max_seqlen, own))
        return Stream(x, self.set_attention(x, over, cu_seqlens, max_seqlen, of_set))
