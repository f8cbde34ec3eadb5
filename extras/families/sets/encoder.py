"""A stack of layers of which some attend within a sequence, and some to all earlier sequences of its set as well."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError
from common.models.esm2.model import Encoder
from common.models.layers.attention import Layout, rotary_tables
from common.models.layers.residual import Model, total
from extras.families.sets.cp import CpSetLayout
from extras.families.sets.layout import Context, SetLayout

Inputs = tuple[tuple[Tensor, Tensor], Layout | None]  # cosines and sines, and the layout: of an attention


class SetEncoder(Encoder):
    """The layers are ESM-2-like ones. A configuration says which attend to sets, `is_global`, and the base of their
    rotation, `rope_theta_global`, whose positions run over the set; those within a sequence have ESM-2's."""

    def __init__(self, config: Any, layers: Any, final_norm: torch.nn.Module):
        super().__init__(config, layers, final_norm)
        self.config = config

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cp_pack: Any = None,
        sets: Tensor | None = None,
        context: Context | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden] -> the same, or [P, hidden] of the tokens `at`.

        sets: int32 [2, B + 1] on the host, boundaries of the sequences in tokens, and of sets in sequences, the last
        value repeated; None: each sequence is a set of its own. context: what all sequences follow; or, still empty,
        what the first set is to fill. UserError for a set beyond the model's limits.
        """
        check_limits(self.config, sets, context)
        to_prepare, own = (len(x), cu_seqlens, max_seqlen, self.head_dim), None
        if cp_pack is None:
            rotary, max_seqlen = self.prepare(*to_prepare)
            layout = SetLayout.of(sets, cu_seqlens, len(x), context)
        else:
            assert self.prepare_shared is not None, "a model takes its share of packs once it is in a group of ranks"
            rotary, max_seqlen, own = self.prepare_shared(*to_prepare, cp_pack)
            positions = F.pad(cp_pack.positions, (0, len(x) - len(cp_pack.positions)))
            layout = CpSetLayout(own, positions, sets)
        across = rotary_tables(layout.positions, self.head_dim, self.config.rope_theta_global)
        stream, number = self.begin(self.numbered(x, layout.numbers)), 0
        for n, layer in enumerate(self.layers.in_turn()):
            inputs = rotary, own
            if self.config.is_global(n):
                inputs = self.inputs_over_sets(inputs, (across, layout.of_layer(number)))
                number += 1
            stream = layer(stream, inputs[0], cu_seqlens, max_seqlen, inputs[1])
        x = total(stream)
        return self.emb_layer_norm_after(x if at is None else x[at])

    def numbered(self, x: Tensor, numbers: Tensor) -> Tensor:
        """The first layer's input. numbers: int64 [T], each token's sequence's in its set."""
        return x

    def inputs_over_sets(self, within: Inputs, over: Inputs) -> Any:
        """What a layer that attends to sets is given, of what is there within sequences and over sets."""
        return over


class SetModel(Model):
    """What a model with a `SetEncoder` has besides the interface of `Esm2ForMaskedLM`."""

    embeddings: Any
    encoder: SetEncoder

    @torch.no_grad()
    def read_context(self, input_ids: Tensor, cu_seqlens: Tensor) -> Context:
        """Read a set that sequences will follow: `forward` then takes the result as its `context`. Without gradients.

        input_ids: int64 [Tc], the set's sequences end to end; cu_seqlens: int32 [n + 1], where each begins.
        """
        bounds = cu_seqlens.cpu()
        sequences, tokens = len(bounds) - 1, len(input_ids)
        sets = torch.stack((bounds, torch.tensor([0] + [sequences] * sequences, dtype=bounds.dtype)))
        context = Context(sequences, tokens)
        longest = int(bounds.diff().max())
        self.encoder(self.embeddings(input_ids, cu_seqlens), cu_seqlens, longest, sets=sets, context=context)
        return context


def check_limits(config: Any, sets: Tensor | None, context: Context | None) -> None:
    """UserError for a set that has more sequences or tokens than the model's may. context: which a sequence follows,
    unless `sets` are given."""
    sequences = tokens = 0
    if sets is not None:
        bounds, of_sets = sets.cpu().long()
        sequences, tokens = int(of_sets.diff().max()), int(bounds[of_sets].diff().max())
    elif context is not None:
        sequences, tokens = context.sequences + 1, context.tokens + 1
    limits = (config.max_num_sequences, "sequences"), (config.max_num_positions_global, "tokens")
    for found, (most, what) in zip((sequences, tokens), limits, strict=True):
        if found > most:
            raise UserError(f"a set of {found:,} {what}: this model's have at most {most:,}: give smaller sets")
