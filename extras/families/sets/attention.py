"""Block-causal attention: a token attends to its own sequence and to all earlier sequences of its set.

Nowhere is there a mask, and memory is linear in the number of tokens.

- CPU, fp32/bf16: torch's flash kernel, one call a sequence, whose keys are the slice from the set's start to the
  sequence's end. Sequences that follow each other in the kernel share keys: their gradients add up.
- Anything else (CUDA, float64): extras.speed.block_attention, in blocks by halving.

A pack comes as a table, int64 [2, N + 1] on the host. Row 0: boundaries of its N sequences in tokens. Row 1:
boundaries of its sets in sequences; the rest of the row repeats N.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import Tensor

from common.models.layers import cpu
from common.models.layers.attention import device_type, rotate
from common.models.layers.compiling import OPERATORS
from extras.speed.block_attention import AttendedBlock, Bounds, attend_all, block_causal, gradients_of_all

OPERATORS.append(sys.modules[__name__])


def set_attention(qkv: Tensor, cos: Tensor, sin: Tensor, table: Tensor) -> Tensor:
    """Rotary block-causal attention of a pack: [T, H * D], differentiable.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2], table: see above.
    """
    return _attention(qkv, cos, sin, table)[0]


def set_attention_and_rotated(qkv: Tensor, cos: Tensor, sin: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """`set_attention`, and qkv with queries and keys rotated; for inference."""
    out, rotated, _ = _attention(qkv, cos, sin, table)
    return out, rotated


# One operator, so that a compiled graph neither unrolls the loop over sequences nor breaks there.
@torch.library.custom_op("sets::attention", mutates_args=())
def _attention(qkv: Tensor, cos: Tensor, sin: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output [T, H * D]; for the backward pass, qkv rotated and lse [T, H], fp32 (float64 of float64)."""
    with torch.autocast(qkv.device.type, enabled=False):
        out, rotated, lse = (_by_sequence if _is_sliced(qkv) else _by_halving)(qkv, cos, sin, table)
    return out.flatten(1), rotated, lse


@_attention.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _, dim = qkv.shape
    lse = qkv.new_empty(tokens, heads, dtype=torch.promote_types(qkv.dtype, torch.float32))
    return qkv.new_empty(tokens, heads * dim), qkv.new_empty(qkv.shape), lse


@torch.library.custom_op("sets::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, rotated: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, table: Tensor
) -> Tensor:
    grad, out = (x.view(*lse.shape, rotated.shape[-1]) for x in (grad, out))
    differentiate = _gradients_by_sequence if _is_sliced(rotated) else _gradients_by_halving
    with torch.autocast(rotated.device.type, enabled=False):
        return differentiate(grad, rotated, out, lse, cos, sin, table)


@_attention_backward.register_fake
def _(grad, rotated, out, lse, cos, sin, table) -> Tensor:
    return rotated.new_empty(rotated.shape)


def _save(ctx, inputs, output) -> None:
    _, cos, sin, table = inputs
    out, rotated, lse = output
    ctx.save_for_backward(rotated, out, lse, cos, sin, table)
    ctx.set_materialize_grads(False)  # rotated and lse have none


def _differentiate(ctx, grad: Tensor, *_):
    return _attention_backward(grad.contiguous(), *ctx.saved_tensors), None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _is_sliced(x: Tensor) -> bool:
    return device_type(x) == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


# ---- CPU: sequence by sequence --------------------------------------------------------------------------------------


def _by_sequence(qkv: Tensor, cos: Tensor, sin: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, H, D], rotated, lse) of `_attention`."""
    tokens, heads, _, dim = qkv.shape
    rotated, out = qkv.new_empty(qkv.shape), qkv.new_empty(tokens, heads, dim)
    lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
    factors = cpu.rotation_factors(cos, sin, 0)
    for start, spans in _sets(table):
        for span in spans:
            cpu.rotate(qkv[span], rotated[span], 0, *(f[span] for f in factors))
        q, k, v = rotated[start : spans[-1].stop].float().unbind(2)
        for span in spans:
            own = slice(span.start - start, span.stop - start)
            out[span], lse[span] = cpu.flash(q[own], k[: own.stop], v[: own.stop])
    return out, rotated, lse


def _gradients_by_sequence(
    grad: Tensor, rotated: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, table: Tensor
) -> Tensor:
    """The gradient of qkv. From the last sequence of a set to its first: when a sequence has its turn, all that attend
    to its keys have had theirs."""
    grads = rotated.new_empty(rotated.shape)
    factors = cpu.rotation_factors(cos, -sin, 0)
    for start, spans in _sets(table):
        q, k, v = rotated[start : spans[-1].stop].float().unbind(2)
        totals: list[Tensor] = []  # gradients of keys and values, over sequences so far
        for span in reversed(spans):
            own = slice(span.start - start, span.stop - start)
            attended = q[own], k[: own.stop], v[: own.stop], out[span].float(), lse[span]
            dq, *parts = cpu.flash_backward(grad[span].float(), *attended)
            totals = [a[: own.stop].add_(b) for a, b in zip(totals, parts, strict=True)] if totals else parts
            together = torch.stack((dq, *(x[own] for x in totals)), 2)
            cpu.rotate(together, grads[span], 0, *(f[span] for f in factors))
    return grads


def _sets(table: Tensor) -> list[tuple[int, list[slice]]]:
    """Where each set begins, and its sequences in tokens; those without tokens are left out."""
    bounds, sets = table.tolist()
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    of_sets = ([span for span in spans[a:b] if span.stop > span.start] for a, b in pairwise(sets))
    return [(of_set[0].start, of_set) for of_set in of_sets if of_set]


# ---- elsewhere: by halving ------------------------------------------------------------------------------------------

_latest: list[tuple[Tensor, torch.device, list[AttendedBlock]]] = []  # at most one: it is the same for all layers


def blocks_of(table: Tensor, device: torch.device) -> list[AttendedBlock]:
    """What the sequences of a pack attend to; the last call's result if the table is the same."""
    if not _latest or _latest[0][1] != device or not torch.equal(_latest[0][0], table):
        whole = Bounds.make(table[:1], device)[0]
        _latest[:] = [(table, device, block_causal(table[1], whole, whole))]
    return _latest[0][2]


def _by_halving(qkv: Tensor, cos: Tensor, sin: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out, lse = attend_all(q, ((k, v, block) for block in blocks_of(table, qkv.device)))
    return out, torch.stack((q, k, v), 2), lse


def _gradients_by_halving(
    grad: Tensor, rotated: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, table: Tensor
) -> Tensor:
    q, k, v = rotated.unbind(2)
    dq, dk, dv = gradients_of_all((grad, q, out, lse), k, v, blocks_of(table, rotated.device))
    dq, dk = (rotate(x, cos, -sin) for x in (dq, dk))
    return torch.stack((dq, dk, dv), 2).to(rotated.dtype)
