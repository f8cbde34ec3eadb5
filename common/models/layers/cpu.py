"""Everything the models do differently on a CPU: matmuls, packed attention, and which library computes them.

A reader of GPU code need not open this file. `linear` and `attention` below are called where
`device_type` is `cpu`, and compute the same as the GPU's kernels.

- Matmuls: fp32 by oneDNN or MKL, whichever has the wider vectors here. Without bf16 instructions a bf16 matmul is the
  fp32 matmul of the bf16 numbers, rounded once, as the instructions do it: they multiply exactly and sum in fp32.
  Operands are widened a block of rows at a time, which stays in the cache; bf16 is saved for the backward pass.
- Attention: torch's flash kernel in fp32, sequence by sequence. bf16 is widened for it: exact on every CPU, and faster
  than bf16 instructions.

The choice follows from the CPU and the environment, never from a timing: a resumed run takes the same path and ends
with the same bits. Measured: benchmarks/results/cpu_products.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.compat import cpu_flash_backward, cpu_flash_forward, onednn_linear
from common.models.layers.cpu_features import this_cpu

# ---- which tensors take this path ----------------------------------------------------------------------------------

_as_on_a_gpu = False  # a plain name: torch.compile looks into what reads it


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take a GPU's code paths without one, on tensors without values: for memory estimates."""
    global _as_on_a_gpu
    before, _as_on_a_gpu = _as_on_a_gpu, True
    try:
        yield
    finally:
        _as_on_a_gpu = before


def device_type(x: Tensor) -> str:
    """Which code path x takes: `cpu` (this file) or `cuda`."""
    return "cuda" if _as_on_a_gpu else x.device.type


# ---- what this CPU has ------------------------------------------------------------------------------------------

# Constants: the libraries read the environment once, too, and a compiled graph has these baked in.
_ONEDNN = torch.backends.mkldnn.is_available()
BF16_MATMULS = _ONEDNN and this_cpu().has_bf16_matmuls(os.environ)
FP32_BY_ONEDNN = _ONEDNN and torch.backends.mkl.is_available() and this_cpu().multiplies_fp32_by_onednn(os.environ)

# ---- matmuls ----------------------------------------------------------------------------------------------------

ROWS_PER_THREAD = 512  # widened at a time: 2.6 MB of fp32 for the widest operand of the 8M model


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, by autocast's rules where that is on."""
    autocast = torch.is_autocast_enabled("cpu")
    if x.dim() != 2:
        return F.linear(x, weight, bias)
    if autocast:
        to_bf16 = torch.get_autocast_dtype("cpu") == torch.bfloat16
        if BF16_MATMULS or not to_bf16 or x.dtype == torch.float64:
            return F.linear(x, weight, bias)
        x, weight = x.bfloat16(), weight.bfloat16()
        bias = None if bias is None else bias.bfloat16()
    return _Linear.apply(x, weight, bias) if _is_ours(x, weight) else F.linear(x, weight, bias)


def linear_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """grad W and grad^T x, for grad [m, out], x [m, in] and W [out, in] of one dtype."""
    if _is_ours(x, weight):
        return _backward(grad, x, weight, True, True)
    return grad @ weight, grad.t() @ x


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether this file computes the matmul, and not torch's own dispatch."""
    if not torch.compiler.is_compiling() and x.numel() == 0:
        return False
    ours = FP32_BY_ONEDNN if x.dtype == torch.float32 else x.dtype == torch.bfloat16 and not BF16_MATMULS
    return ours and x.dtype == weight.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (_matmul_operator if _needs_operator(x) else _matmul)(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x, grad_weight = _backward(grad, x, weight, need_x, need_weight)
        return grad_x if need_x else None, grad_weight if need_weight else None, grad.sum(0) if need_bias else None


def _backward(grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    """grad W and grad^T x for grad [m, n], W [n, k] and x [m, k]; empty where not needed."""
    differentiate = _matmul_backward_operator if _needs_operator(grad) else _matmul_backward
    return differentiate(grad, x, weight, need_x, need_weight)


def _needs_operator(x: Tensor) -> bool:
    """In a compiled graph; and in bf16, where selective checkpointing would keep the reused scratch memory."""
    return torch.compiler.is_compiling() or (x.dtype == torch.bfloat16 and not torch.is_inference_mode_enabled())


@torch.autocast("cpu", enabled=False)  # which would turn fp32 matmuls into bf16 ones
def _matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a [m, k] times the transpose of b [n, k]; any strides."""
    if a.dtype == torch.float32:
        return _fp32(a, b, bias)
    b = b.float()
    bias = None if bias is None else bias.float()
    if not a.is_contiguous():
        return _fp32(a.float(), b, bias).to(a.dtype)
    out = a.new_empty(len(a), len(b))
    blocks = _RowBlocks(len(a))
    wide, result = blocks.scratch(a.shape[1]), blocks.scratch(len(b))
    for rows in blocks:
        out[rows] = _fp32(blocks.widen(a, rows, wide), b, bias, blocks.trim(result, rows))
    return out


@torch.autocast("cpu", enabled=False)
def _matmul_backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    if grad.dtype == torch.float32:
        grad_x = _fp32(grad, weight.t(), None) if need_x else grad.new_empty(0)
        return grad_x, _fp32_transposed(grad, x) if need_weight else grad.new_empty(0)
    grad_x = torch.empty_like(x) if need_x else grad.new_empty(0)
    total = torch.zeros(weight.shape if need_weight else 0)
    transposed = weight.float().t()
    blocks = _RowBlocks(len(grad))
    wide, wide_x, result = (blocks.scratch(n) for n in (grad.shape[1], x.shape[1], x.shape[1]))
    for rows in blocks:  # `grad` is widened once for both
        block = blocks.widen(grad, rows, wide)
        if need_x:
            grad_x[rows] = _fp32(block, transposed, None, blocks.trim(result, rows))
        if need_weight and FP32_BY_ONEDNN:
            total += _fp32_transposed(block, blocks.widen(x, rows, wide_x))
        elif need_weight:
            total.addmm_(block.t(), blocks.widen(x, rows, wide_x))
    return grad_x, total.to(grad.dtype)


class _RowBlocks:
    """Slices of the rows that are widened at a time. Scratch memory is shared by all blocks, so it stays in cache."""

    def __init__(self, rows: int):
        self.rows = rows
        self.step = min(rows, ROWS_PER_THREAD * torch.get_num_threads())

    def __iter__(self) -> Iterator[slice]:
        return (slice(start, min(start + self.step, self.rows)) for start in range(0, self.rows, self.step))

    def scratch(self, columns: int) -> Tensor:
        return torch.empty(self.step, columns, dtype=torch.float32)

    def trim(self, scratch: Tensor, rows: slice) -> Tensor:
        return scratch[: rows.stop - rows.start]

    def widen(self, x: Tensor, rows: slice, scratch: Tensor) -> Tensor:
        return self.trim(scratch, rows).copy_(x[rows])


def _fp32(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """a [m, k] times the transpose of b [n, k]; `out` is memory that may be used for it."""
    if FP32_BY_ONEDNN:
        return onednn_linear(a, b, bias)
    return torch.mm(a, b.t(), out=out) if bias is None else torch.addmm(bias, a, b.t(), out=out)


def _fp32_transposed(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [m, n] times b [m, k]."""
    # Both factors are read column-wise here; the wider one is faster as oneDNN's second.
    wide = a.shape[1] > b.shape[1]
    return _fp32(b.t(), a.t(), None).t() if wide else _fp32(a.t(), b.t(), None)


# Custom operators, which Inductor calls as they are: oneDNN's own it takes for inference with constant weights, and
# it would skip the rounding to bf16 of what is widened again.
@torch.library.custom_op("cpu::matmul", mutates_args=())
def _matmul_operator(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return _matmul(a, b, bias)


@_matmul_operator.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op("cpu::matmul_backward", mutates_args=())
def _matmul_backward_operator(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _matmul_backward(grad, x, weight, need_x, need_weight)
    return grad_x, grad_weight.contiguous()


@_matmul_backward_operator.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    return grad.new_empty(x.shape if need_x else 0), grad.new_empty(weight.shape if need_weight else 0)


# ---- attention --------------------------------------------------------------------------------------------------


def attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, kv_heads: int = 0) -> Tensor:
    """Rotary self-attention of a pack, fp32 or bf16: [T, H * D]. cos, sin [T, D/2], cu_seqlens int32 [B + 1].

    kv_heads 0: an encoder's qkv [T, H, 3, D]. Else a decoder's: causal, qkv [T, H + 2 K, D] with K = kv_heads.
    """
    direct = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()  # operators import the compiler
    return (_attend if direct else _attention)(qkv, cos, sin, cu_seqlens, kv_heads)[0]


def attention_at(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, at: Tensor) -> Tensor:
    """The rows `at`, int64 [P], of an encoder's `attention`, and no others: [P, H * D]. Without gradients."""
    out = qkv.new_empty(len(at), qkv.shape[1], qkv.shape[-1])
    factors = rotation_factors(cos, sin, 0)
    for span in _spans(cu_seqlens):
        (rows,) = ((at >= span.start) & (at < span.stop)).nonzero(as_tuple=True)
        if not len(rows):  # the kernel divides by their number
            continue
        rotated = torch.empty_like(qkv[span])
        rotate(qkv[span], rotated, 0, *(f[span] for f in factors))
        with torch.autocast("cpu", enabled=False):
            q, k, v = split_heads(rotated.float(), 0)
            out[rows] = flash(q[at[rows] - span.start], k, v)[0].to(out.dtype)
    return out.flatten(1)


def _attend(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The output [T, H * D] of `attention`; for the backward pass, qkv rotated and lse, fp32 [T, H].

    Sequence by sequence, which stays in the cache. The heads stay where the matmuls around have them: the kernel takes
    any strides, and copies that gather the tokens of a head cost a third of the kernel at heads of 16.
    """
    tokens, heads, dim = len(qkv), qkv.shape[1] - 2 * kv_heads, qkv.shape[-1]
    rotated, out = qkv.new_empty(qkv.shape), qkv.new_empty(tokens, heads, dim)
    lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
    factors = rotation_factors(cos, sin, kv_heads)
    for span in _spans(cu_seqlens):
        rotate(qkv[span], rotated[span], kv_heads, *(f[span] for f in factors))
        with torch.autocast("cpu", enabled=False):  # which would turn the fp32 matmuls of the scores into bf16 ones
            out[span], lse[span] = flash(*split_heads(rotated[span].float(), kv_heads), causal=kv_heads > 0)
    return out.flatten(1), rotated, lse


# One operator, so that a compiled graph neither unrolls the loop over sequences nor breaks there.
_attention = torch.library.custom_op("cpu::attention", _attend, mutates_args=())


@_attention.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, dim = qkv.shape[0], qkv.shape[1] - 2 * kv_heads, qkv.shape[-1]
    lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
    return qkv.new_empty(tokens, heads * dim), qkv.new_empty(qkv.shape), lse


@torch.library.custom_op("cpu::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    rotated: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    kv_heads: int,
) -> Tensor:
    grads, by_head = rotated.new_empty(rotated.shape), (*lse.shape, rotated.shape[-1])
    factors = rotation_factors(cos, -sin, kv_heads)
    for span in _spans(cu_seqlens):
        grad_out, attended = (x.view(by_head)[span].float() for x in (grad, out))
        q, k, v = split_heads(rotated[span].float(), kv_heads)
        with torch.autocast("cpu", enabled=False):
            parts = flash_backward(grad_out, q, k, v, attended, lse[span], causal=kv_heads > 0)
        together = torch.cat(parts, dim=1) if kv_heads else torch.stack(parts, dim=2)
        rotate(together, grads[span], kv_heads, *(f[span] for f in factors))
    return grads


@_attention_backward.register_fake
def _(grad, rotated, out, lse, cos, sin, cu_seqlens, kv_heads) -> Tensor:
    return rotated.new_empty(rotated.shape)


def _save(ctx, inputs, output) -> None:
    _, cos, sin, cu_seqlens, ctx.kv_heads = inputs
    out, rotated, lse = output
    ctx.save_for_backward(rotated, out, lse, cos, sin, cu_seqlens)
    ctx.set_materialize_grads(False)  # rotated and lse have none


def _differentiate(ctx, grad: Tensor, *_):
    return _attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.kv_heads), None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """One sequence by torch's flash kernel: q [T, H, D], k, v [S, K, D] -> out [T, H, D], lse [T, H]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = cpu_flash_forward(q, k, v, 0.0, causal, scale=q.shape[-1] ** -0.5)
    return out[0].transpose(0, 1), lse[0].t()


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v."""
    grad, q, k, v, out = (x.transpose(0, 1)[None] for x in (grad, q, k, v, out))
    grads = cpu_flash_backward(grad, q, k, v, out, lse.t()[None], 0.0, causal, scale=q.shape[-1] ** -0.5)
    return tuple(x[0].transpose(0, 1) for x in grads)


def _spans(cu_seqlens: Tensor) -> list[slice]:
    bounds = cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


def split_heads(qkv: Tensor, kv_heads: int) -> tuple[Tensor, ...]:
    """Queries [T, H, D], keys and values [T, K, D]; views."""
    if not kv_heads:
        return qkv.unbind(2)
    return qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)


def rotation_factors(cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """What `rotate` multiplies heads by, themselves and with their halves swapped: [T, 1, D] or [T, 1, 3, D]."""
    direct, crossed = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    if kv_heads:
        return direct, crossed
    # Values are multiplied by 1 and 0: whole rows of 3 D numbers are faster than parts of them.
    direct = torch.stack((direct, direct, torch.ones_like(direct)), 2)
    return direct, torch.stack((crossed, crossed, torch.zeros_like(crossed)), 2)


def rotate(qkv: Tensor, out: Tensor, kv_heads: int, direct: Tensor, crossed: Tensor) -> None:
    """Write qkv to `out`, queries and keys rotated in fp32."""
    if kv_heads:
        rotated = qkv.shape[1] - kv_heads
        out[:, rotated:] = qkv[:, rotated:]
        qkv, out = qkv[:, :rotated], out[:, :rotated]
    x = qkv.float()
    to = out if out.dtype == x.dtype else torch.empty_like(x)
    torch.mul(x, direct, out=to).addcmul_(x.roll(x.shape[-1] // 2, -1), crossed)
    if to is not out:
        out.copy_(to)
