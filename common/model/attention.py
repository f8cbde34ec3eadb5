"""Self-attention over a pack of sequences: every token attends to the tokens of its own sequence, and to no other.

Three ways to the same numbers, chosen by `packed_attention`:
- CUDA, bf16/fp16: `torch.nn.attention.varlen.varlen_attn`, one fused kernel over the whole pack;
- CPU: `_CpuAttention`, sequence by sequence. The library's flash kernel in fp32; in bf16 (where that kernel's
  backward is two to ten times slower) batched matrix products over a scratch block that stays in the cache;
- anything else (float64, fp32 on CUDA): `scaled_dot_product_attention`, sequence by sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SCRATCH_ELEMENTS = 2 << 20  # scores worked on at a time in the bf16 CPU path: 8 MiB of fp32, to stay in the cache
BLOCK_MULTIPLE = 16  # lengths of the products there are rounded up to this
LN_2 = math.log(2.0)


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Angles of the rotary embedding, fp32 [T, D/2], for integer positions [T] (RoFormer, eq. 34)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    return positions.float()[:, None] * (1.0 / base**exponents)


def rotary_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of those angles."""
    angles = rotary_angles(positions, head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [T, H, D] by the angles of `rotary_tables`, in fp32; keeps x's dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def packed_attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Rotary self-attention of a pack.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2], cu_seqlens int32 [B + 1]
    (on the CPU too when qkv is there), max_seqlen the longest sequence. Returns [T, H * D]. Scores are scaled by
    1/sqrt(D).
    """
    if qkv.device.type == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16):
        return _cpu_attention(qkv, cos, sin, cu_seqlens)
    q, k, v = qkv.unbind(2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if qkv.device.type == "cuda" and qkv.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn  # torch >= 2.10; CUDA only

        return varlen_attn(q, k, v.contiguous(), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen).flatten(1)
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    attended = [F.scaled_dot_product_attention(*(x[None] for x in part))[0] for part in parts]
    return torch.cat(attended, dim=1).transpose(0, 1).flatten(1)


def _cpu_attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return _in_a_graph(qkv, cos, sin, cu_seqlens)[0]
    return _CpuAttention.apply(qkv, cos, sin, cu_seqlens.tolist()).flatten(1)


class _CpuAttention(torch.autograd.Function):
    """Rotary attention of a pack on the CPU; nothing of size L x L outlives the sequence it belongs to.

    Queries are stored multiplied by log2(e)/sqrt(D), so that weights are powers of two of the scores: `exp2` is
    several times faster than `exp` on a CPU. `lse` is the base-2 logarithm of the sum of the weights, fp32 [H, T].
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # autocast would turn the fp32 products of the scores into bf16 ones
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, bounds: list[int]) -> Tensor:
        tokens, heads, _, dim = qkv.shape
        rotated = _rotate_qkv(qkv, cos, sin)  # [3, H, T, D]
        out = qkv.new_empty(heads, tokens, dim)
        lse = torch.empty(heads, tokens, dtype=torch.float32)
        (_flash_forward if qkv.dtype == torch.float32 else _bmm_forward)(rotated, out, lse, bounds)
        ctx.save_for_backward(rotated, out, lse, cos, sin)
        ctx.bounds = bounds
        return out.transpose(0, 1)

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad_out: Tensor):
        rotated, out, lse, cos, sin = ctx.saved_tensors
        grad_out = grad_out.transpose(0, 1).contiguous()  # [H, T, D]
        grads = torch.empty_like(rotated)
        backward = _flash_backward if rotated.dtype == torch.float32 else _bmm_backward
        backward(grads, grad_out, rotated, out, lse, ctx.bounds)
        return _unrotate_grads(grads, cos, sin), None, None, None


# In a graph that is compiled the loop over sequences is one operator: neither unrolled nor a break in the graph.
@torch.library.custom_op("esm2::attention", mutates_args=())
def _in_a_graph(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_CpuAttention`; also what its backward pass needs: rotated [3, H, T, D] and lse [H, T]."""
    context = _Kept()
    out = _CpuAttention.forward(context, qkv, cos, sin, cu_seqlens.tolist())
    rotated, _, lse, _, _ = context.saved_tensors
    return out.flatten(1), rotated, lse


@_in_a_graph.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _, dim = qkv.shape
    lse = qkv.new_empty(heads, tokens, dtype=torch.float32)
    return qkv.new_empty(tokens, heads * dim), qkv.new_empty(3, heads, tokens, dim), lse


@torch.library.custom_op("esm2::attention_backward", mutates_args=())
def _backward_in_a_graph(
    grad: Tensor, rotated: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor
) -> Tensor:
    _, heads, tokens, dim = rotated.shape
    by_head = out.view(tokens, heads, dim).transpose(0, 1).contiguous()
    context = _Kept((rotated, by_head, lse, cos, sin), cu_seqlens.tolist())
    return _CpuAttention.backward(context, grad.view(tokens, heads, dim))[0]


@_backward_in_a_graph.register_fake
def _(grad, rotated, out, lse, cos, sin, cu_seqlens) -> Tensor:
    _, heads, tokens, dim = rotated.shape
    return rotated.new_empty(tokens, heads, 3, dim)


def _keep(ctx, inputs, output) -> None:
    _, cos, sin, cu_seqlens = inputs
    out, rotated, lse = output
    ctx.save_for_backward(rotated, out, lse, cos, sin, cu_seqlens)


def _backward(ctx, grad: Tensor, *_):
    return _backward_in_a_graph(grad.contiguous(), *ctx.saved_tensors), None, None, None


_in_a_graph.register_autograd(_backward, setup_context=_keep)


@dataclass
class _Kept:
    """The part of a context of autograd that `_CpuAttention` uses."""

    saved_tensors: tuple[Tensor, ...] = ()
    bounds: list[int] | None = None

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _query_scale(dim: int) -> float:
    return 1.0 / (LN_2 * math.sqrt(dim))


def _rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """qkv [T, H, 3, D] -> [3, H, T, D] with queries and keys rotated (in fp32) and queries scaled."""
    tokens, heads, _, dim = qkv.shape
    out = qkv.new_empty(3, heads, tokens, dim)
    for which, scale in ((0, _query_scale(dim)), (1, 1.0)):
        first, second = qkv[:, :, which].transpose(0, 1).float().chunk(2, dim=-1)
        c, s = cos * scale, sin * scale
        out[which, ..., : dim // 2] = (first * c).addcmul_(second, s, value=-1)
        out[which, ..., dim // 2 :] = (second * c).addcmul_(first, s)
    out[2] = qkv[:, :, 2].transpose(0, 1)
    return out


def _unrotate_grads(grads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of the scaled, rotated [3, H, T, D] -> gradients of qkv [T, H, 3, D]: the transposed rotation."""
    _, heads, tokens, dim = grads.shape
    out = grads.new_empty(tokens, heads, 3, dim)
    for which, scale in ((0, _query_scale(dim)), (1, 1.0)):
        first, second = grads[which].float().chunk(2, dim=-1)
        c, s = cos * scale, sin * scale
        target = out[:, :, which].transpose(0, 1)
        target[..., : dim // 2] = (first * c).addcmul_(second, s)
        target[..., dim // 2 :] = (second * c).addcmul_(first, s, value=-1)
    out[:, :, 2] = grads[2].transpose(0, 1)
    return out


def _spans(bounds: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


def _flash_forward(qkv: Tensor, out: Tensor, lse: Tensor, bounds: list[int]) -> None:
    for span in _spans(bounds):
        q, k, v = (x[None] for x in qkv[:, :, span])
        o, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=LN_2)
        out[:, span] = o[0]
        lse[:, span] = logsumexp[0]  # natural logarithm here: the same kernel's backward is its only reader


def _flash_backward(grads: Tensor, grad_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, bounds: list[int]) -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for span in _spans(bounds):
        inputs = (x[None, :, span] for x in (grad_out, *qkv, out))
        results = backward(*inputs, lse[None, :, span], 0.0, False, scale=LN_2)
        for grad, result in zip(grads, results, strict=True):
            grad[:, span] = result[0]


@dataclass(frozen=True)
class _Block:
    """Some heads of one sequence: what the bf16 path works on at a time.

    Products are `padded` tokens long, a multiple of 16: the library compiles and caches a kernel for every new shape,
    which took time and gigabytes when every length had its own. The tokens past the sequence's end belong to whatever
    follows it in the pack (buffers end in zeros); `only` cuts them off.
    """

    heads: slice
    real: slice  # the sequence's tokens in the pack
    padded: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        length = self.padded.stop - self.padded.start
        return self.heads.stop - self.heads.start, length, length

    def only(self, x: Tensor) -> Tensor:
        return x[:, : self.real.stop - self.real.start]

    def view(self, scratch: Tensor) -> Tensor:
        return scratch[: math.prod(self.shape)].view(self.shape)


def _blocks(heads: int, bounds: list[int]) -> list[_Block]:
    blocks = []
    for span in _spans(bounds):
        length = -(-(span.stop - span.start) // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        padded = slice(span.start, span.start + length)
        step = max(1, min(heads, SCRATCH_ELEMENTS // (length * length)))
        blocks += [_Block(slice(h, min(heads, h + step)), span, padded) for h in range(0, heads, step)]
    return blocks


def _scratch(blocks: list[_Block], dtype: torch.dtype) -> Tensor:
    """One flat buffer for the largest score block of a pack: fresh memory each time would cost page faults."""
    return torch.empty(max((math.prod(b.shape) for b in blocks), default=0), dtype=dtype)


def _with_tail(x: Tensor) -> Tensor:
    """[..., T, D] -> [..., T + 15, D]: zeros for the last block's padding to read."""
    return F.pad(x, (0, 0, 0, BLOCK_MULTIPLE - 1))


def _bmm_forward(qkv: Tensor, out: Tensor, lse: Tensor, bounds: list[int]) -> None:
    """Scores and softmax in fp32, weights rounded to bf16 for the product with the values."""
    blocks = _blocks(qkv.shape[1], bounds)
    values = _with_tail(qkv[2])
    queries, keys = _with_tail(qkv[:2].float())
    wide, narrow = _scratch(blocks, torch.float32), _scratch(blocks, qkv.dtype)
    for block in blocks:
        where = block.heads, block.padded
        scores = torch.bmm(queries[where], keys[where].transpose(1, 2), out=block.view(wide))
        scores[:, :, block.real.stop - block.real.start :] = -math.inf
        peak = scores.amax(-1, keepdim=True)
        total = scores.sub_(peak).exp2_().sum(-1, keepdim=True)
        weights = block.view(narrow).copy_(scores)
        attended = torch.bmm(weights, values[where]).float().div_(total)
        out[block.heads, block.real] = block.only(attended)
        lse[block.heads, block.real] = block.only(peak.add_(total.log2_())).squeeze(-1)


def _bmm_backward(grads: Tensor, grad_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, bounds: list[int]) -> None:
    """All products in bf16 with fp32 accumulation.

    `scores - lse` and `d_weights - delta` are differences of nearly equal numbers, of which bf16 would leave mostly
    rounding. So both subtractions happen inside a product's fp32 accumulators, as three more columns: the subtrahend
    as the sum of three bf16 numbers (24 bits) against ones.
    """
    _, heads, tokens, dim = qkv.shape
    delta = (grad_out.float() * out).sum(-1)
    query, d_out = _with_tail(_minus_columns(qkv[0], lse)), _with_tail(_minus_columns(grad_out, delta))
    ones = qkv.new_ones(1, 1, 1).expand(heads, tokens, query.shape[-1] - dim)
    key, value = (_with_tail(torch.cat((x, ones), dim=-1)) for x in qkv[1:])
    blocks = _blocks(heads, bounds)
    first, second = (_scratch(blocks, qkv.dtype) for _ in range(2))
    for block in blocks:
        where, target = (block.heads, block.padded), (block.heads, block.real)
        length = block.real.stop - block.real.start
        weights = torch.bmm(query[where], key[where].transpose(1, 2), out=block.view(first)).exp2_()
        weights[:, length:] = 0
        weights[:, :, length:] = 0
        grads[2][target] = block.only(torch.bmm(weights.transpose(1, 2), d_out[where][..., :dim]))
        d_scores = torch.bmm(d_out[where], value[where].transpose(1, 2), out=block.view(second)).mul_(weights)
        grads[0][target] = block.only(torch.bmm(d_scores, key[where][..., :dim]))
        grads[1][target] = block.only(torch.bmm(d_scores.transpose(1, 2), query[where][..., :dim]))
    grads[:2].mul_(LN_2)  # the scores are in base 2


def _minus_columns(x: Tensor, subtrahend: Tensor) -> Tensor:
    """[H, T, D] and fp32 [H, T] -> [H, T, D + 3]: columns that add up to minus the subtrahend."""
    columns, rest = [x], -subtrahend
    for _ in range(3):
        columns.append(rest.to(x.dtype).unsqueeze(-1))
        rest = rest - columns[-1].squeeze(-1).float()
    return torch.cat(columns, dim=-1)
