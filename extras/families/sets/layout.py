"""Which sequences of a pack stand together in a set, and the attention of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from common.models.layers.attention import Layout, rotate
from extras.families.sets.attention import set_attention, set_attention_and_rotated
from extras.speed.block_attention import AttendedBlock, Bounds, attend_all


@dataclass
class Context:
    """A set that sequences follow, at inference: it is read once, and its keys and values are kept.

    sequences, tokens: of the set. keys_values: rotated keys and values, [tokens, H, D] each, of every global layer in
    turn; empty until a pass of the model over the set has filled it.
    """

    sequences: int
    tokens: int
    keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class SetLayout:
    """Sets of a pack on one rank, built once a batch for all layers (common.models.layers.attention.Layout).

    table: of extras.families.sets.attention, on the host; device: of the tokens.
    """

    def __init__(self, table: Tensor, device: torch.device, context: Context | None = None):
        self.table, self.device, self.context = table, device, context

    @staticmethod
    def of(sets: Tensor | None, cu_seqlens: Tensor, tokens: int, context: Context | None = None) -> SetLayout:
        """sets: a batch's, int32 [2, B + 1] on the host (row 0 the boundaries of sequences, row 1 those of sets in
        sequences), None if each sequence is a set of its own; tokens: those behind the last sequence are fillers, one
        more set. context: what every sequence follows, with sets None; or, not read yet, what this pack is: its first
        set."""
        if sets is None:
            bounds = cu_seqlens.cpu().long()
            sets = torch.stack((bounds, torch.arange(len(bounds))))
        ends = torch.tensor([[tokens], [sets.shape[1]]])
        table = torch.cat((sets.cpu().long(), ends), 1)
        kind = SetLayout if context is None else FollowingLayout if context.keys_values else ReadingLayout
        return kind(table, cu_seqlens.device, context)

    def of_layer(self, number: int) -> Layout:
        """For one of the global layers, numbered among them from 0."""
        return self

    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int = 0) -> Tensor:
        """Rotary block-causal attention, differentiable: qkv [T, H, 3, D], cos and sin [T, D/2] -> [T, H * D].

        kv_heads is 0: encoders have as many heads of keys as of queries.
        """
        assert kv_heads == 0, "sets are read by encoders"
        return set_attention(qkv, cos, sin, self.table)

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each token's sequence in its set; int64 [T] on the device."""
        return self._per_token[0]

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its set; int64 [T] on the device."""
        return self._per_token[1]

    @cached_property
    def _per_token(self) -> tuple[Tensor, Tensor]:
        bounds, sets = self.table
        tokens = int(bounds[-1])
        first = torch.repeat_interleave(sets[:-1], sets.diff())  # of each sequence's set
        of_sequences = torch.stack((torch.arange(len(first)) - first, bounds[first], bounds.diff()))
        numbers, starts, lengths = of_sequences.to(self.device, non_blocking=True)
        indices = torch.repeat_interleave(lengths, output_size=tokens)
        return numbers[indices], torch.arange(tokens, device=self.device) - starts[indices]


class ReadingLayout(SetLayout):
    """Records keys and values of the pack's first set in its context, layer by layer."""

    @torch.compiler.disable
    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int = 0) -> Tensor:
        assert self.context is not None
        out, rotated = set_attention_and_rotated(qkv, cos, sin, self.table)
        _, keys, values = rotated[: self.context.tokens].unbind(2)
        self.context.keys_values.append((keys.clone(), values.clone()))
        return out


class FollowingLayout(SetLayout):
    """Each sequence follows the context: it attends to all of that, and to itself. No gradients."""

    @cached_property
    def _per_token(self) -> tuple[Tensor, Tensor]:
        assert self.context is not None
        numbers, positions = super()._per_token
        return numbers + self.context.sequences, positions + self.context.tokens

    def of_layer(self, number: int) -> Layout:
        assert self.context is not None
        return _Following(*self.context.keys_values[number], *self._blocks)

    @cached_property
    def _blocks(self) -> tuple[AttendedBlock, AttendedBlock]:
        assert self.context is not None
        own = Bounds.make(self.table[:1], self.device)[0]
        whole = Bounds.make(torch.tensor([[0, own.host[-1]], [0, self.context.tokens]]), self.device)
        return AttendedBlock(own, own), AttendedBlock(*whole)


@dataclass(frozen=True)
class _Following:
    """`FollowingLayout` in a layer with these keys and values of the context."""

    keys: Tensor
    values: Tensor
    own: AttendedBlock
    before: AttendedBlock

    @torch.compiler.disable
    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int = 0) -> Tensor:
        q, k, v = qkv.unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        before = self.keys.to(q.dtype), self.values.to(q.dtype), self.before
        with torch.no_grad(), torch.autocast(qkv.device.type, enabled=False):
            return attend_all(q, ((k, v, self.own), before))[0].flatten(1)
