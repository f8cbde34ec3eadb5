"""Transformer Engine's matmuls, norms, activations, rotations and softmax, in plain PyTorch and fp32.

Each takes the arguments that its Python gives (csrc/extensions/pybind.cpp) and returns what that expects.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te_on_cpu.casts import flat, quantize, torch_dtype
from tests.te_on_cpu.contracts import check_operand
from tests.te_on_cpu.operands import kind_of, values

__all__ = [
    "generic_gemm",
    "te_general_grouped_gemm",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "bgrad_quantize",
    "fp8_transpose",
    "layernorm_fwd",
    "layernorm_bwd",
    "rmsnorm_fwd",
    "rmsnorm_bwd",
    "gelu",
    "dgelu",
    "dbias_dgelu",
    "swiglu",
    "dswiglu",
    "fused_rope_forward",
    "fused_rope_backward",
    "convert_thd_to_bshd",
    "convert_bshd_to_thd",
    "scaled_masked_softmax_forward",
    "scaled_masked_softmax_backward",
]


def _result(x: Tensor, quantizer):
    return x if quantizer is None else quantize(x, quantizer)


def generic_gemm(
    A,
    transA: bool,
    B,
    transB: bool,
    D: Tensor | None,
    quantizer,
    output_dtype,
    bias: Tensor | None,
    bias_type,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
):
    """cuBLAS counts columns first: TN is B A^T, NN is B A, NT is B^T A. (result, gradient of the bias, GELU's input,
    extra output)."""
    kinds = kind_of(A), kind_of(B)
    if kinds[0] != kinds[1]:
        raise RuntimeError(f"a matmul of {kinds[0]} and {kinds[1]}")
    a, b = values(A, columnwise=not transA), values(B, columnwise=transB)
    if kinds[0]:
        check_operand(kinds[0], tuple(a.shape), 1 if transA else 0)
        check_operand(kinds[1], tuple(b.shape), 0 if transB else 1)
    out = alpha * ((b.t() if transB else b) @ (a.t() if transA else a))
    dtype = torch_dtype(output_dtype) if output_dtype is not None else A.dtype
    bias_grad = gelu_out = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.sum(0).to(bias.dtype)
        else:
            out = out + bias.detach().float()
    if gelu and grad:
        out = _gelu_gradient(out, gelu_in)
    elif gelu:
        gelu_out = out.to(dtype)
        out = _gelu(gelu_out)
    shape = out.shape if transB else (*B.size()[:-1], out.shape[-1])
    out = out.to(dtype).view(shape)
    if D is not None:
        out = D.copy_(D + out if accumulate else out)
    return _result(out, quantizer), bias_grad, gelu_out, extra_output


def te_general_grouped_gemm(
    A,
    transA: bool,
    B,
    transB: bool,
    D: list[Tensor],
    output_dtype,
    m_splits: list[int],
    bias,
    bias_type,
    single_output: bool,
    pre_gelu_out,
    grad: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
    /,
):
    """A matmul for each pair of A and B. single_output: D is one tensor, of `m_splits` rows each. What has no rows to
    multiply or to sum over is 0."""
    results = D[0].split(m_splits) if single_output else D
    for a, b, out in zip(A, B, results, strict=True):
        if 0 in (*a.size(), *b.size()):
            if not accumulate:
                out.zero_()
            continue
        given = output_dtype, None, bias_type, False, None, grad, workspaces[0], workspace_size
        generic_gemm(a, transA, b, transB, out, None, *given, accumulate, use_split_accumulator)
    return bias


def fused_multi_row_padding(x: Tensor, out: Tensor, sizes: list[int], padded: list[int], /) -> None:
    """Sections of rows, each followed by rows of zeros."""
    for part, place in zip(x.split(sizes), out.split(padded), strict=True):
        place.zero_()[: len(part)] = part


def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: list[int], sizes: list[int], /) -> None:
    for part, place in zip(x.split(padded), out.split(sizes), strict=True):
        place.copy_(part[: len(place)])


def bgrad_quantize(grad: Tensor, /, quantizer):
    return flat(grad).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


def fp8_transpose(data: Tensor, /, dtype, *, out: Tensor | None) -> Tensor:
    turned = flat(data).t().contiguous().view(data.shape[-1], *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


# ---- norms ----------------------------------------------------------------------------------------------------------


def layernorm_fwd(x, weight, bias, eps, out, quantizer, otype, sm_margin, zero_centered, /):
    """(normalised, mean [T], reciprocal of the deviation [T]). By torch, as the torch backend: what is rounded to
    eight bits and fewer next would else fall to the other side of an edge now and then."""
    scaled = x.float(), x.shape[-1:], weight.float() + int(zero_centered), bias.float(), eps
    y, mean, scale = torch.native_layer_norm(*scaled)
    return _result(y.to(torch_dtype(otype)), quantizer), mean.flatten(), scale.flatten()


def layernorm_bwd(dz, x, mean, scale, weight, sm_margin, zero_centered):
    """Gradients of x, the weight, the bias."""
    normal, grad = (x.float() - mean[:, None]) * scale[:, None], dz.float()
    inner = grad * (weight.float() + int(zero_centered))
    dx = scale[:, None] * (inner - inner.mean(-1, True) - normal * (inner * normal).mean(-1, True))
    return dx.to(x.dtype), (grad * normal).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype)


def rmsnorm_fwd(x, weight, eps, out, quantizer, otype, sm_margin, zero_centered, /):
    scale = (x.float().square().mean(-1) + eps).rsqrt()
    y = x.float() * scale[:, None] * (weight.float() + int(zero_centered))
    return _result(y.to(torch_dtype(otype)), quantizer), None, scale


def rmsnorm_bwd(dz, x, scale, weight, sm_margin, zero_centered):
    normal, grad = x.float() * scale[:, None], dz.float()
    inner = grad * (weight.float() + int(zero_centered))
    dx = scale[:, None] * (inner - normal * (inner * normal).mean(-1, True))
    return dx.to(x.dtype), (grad * normal).sum(0).to(weight.dtype)


# ---- activations ----------------------------------------------------------------------------------------------------


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x.float(), approximate="tanh")


def _swiglu(x: Tensor) -> Tensor:
    gate, linear = x.float().chunk(2, -1)
    return F.silu(gate) * linear


def _gradient(function, grad: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, grad.float())[0]


def _gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _gradient(_gelu, grad, x)


def gelu(x, /, quantizer):
    return _result(_gelu(x).to(x.dtype), quantizer)


def dgelu(grad, x, /, quantizer):
    return _result(_gelu_gradient(grad, x).to(grad.dtype), quantizer)


def dbias_dgelu(grad, x, /, quantizer):
    found = _gelu_gradient(grad, x).to(grad.dtype)
    return flat(found).float().sum(0).to(grad.dtype), quantize(found, quantizer)


def swiglu(x, /, quantizer):
    return _result(_swiglu(x).to(x.dtype), quantizer)


def dswiglu(grad, x, /, quantizer):
    return _result(_gradient(_swiglu, grad, x).to(grad.dtype), quantizer)


# ---- attention's parts ----------------------------------------------------------------------------------------------


def _rotated(
    t: Tensor, freqs: Tensor, layout, interleaved: bool, cu: Tensor | None, ranks: int, rank: int, sign: int
) -> Tensor:
    """t [T, H, D] of sequences whose boundaries cu has, or [S, B, H, D], [B, S, H, D]; freqs [S, 1, 1, D]. ranks that
    share a pack have two of 2 * ranks slices of each sequence, from the front and from the end."""
    if interleaved or (ranks > 1 and cu is None):
        raise ValueError("the stand-in rotates halves, and shares packs alone")
    angles = freqs[:, 0, 0]
    if cu is not None:
        slices = ([*torch.arange(length).chunk(2 * ranks)] for length in cu.diff().tolist() if length)
        position = torch.cat([part for of in slices for part in (of if ranks == 1 else (of[rank], of[-1 - rank]))])
        if len(position) != len(t) or int(cu.diff().max()) > len(freqs):
            raise RuntimeError(f"{len(t)} tokens, boundaries {cu.tolist()}, angles for {len(freqs)}: illegal access")
        angles = angles[position][:, None]
    elif "BSHD" in str(layout):
        angles = angles[None, : t.shape[1], None]
    else:
        angles = angles[: t.shape[0], None, None]
    first, second = t.float().chunk(2, -1)
    return (t.float() * angles.cos() + sign * torch.cat((-second, first), -1) * angles.sin()).to(t.dtype)


def fused_rope_forward(t, freqs, start, layout, interleaved, cu, cp_size, cp_rank):
    return _rotated(t, freqs, layout, interleaved, cu, cp_size, cp_rank, 1)


def fused_rope_backward(grad, freqs, start, layout, interleaved, cu, cp_size, cp_rank):
    return _rotated(grad, freqs, layout, interleaved, cu, cp_size, cp_rank, -1)


def convert_thd_to_bshd(x, cu, batch, longest):
    out = x.new_zeros(batch, longest, *x.shape[1:])
    for number, part in enumerate(x[: int(cu[-1])].split(cu.diff().tolist())):
        out[number, : len(part)] = part
    return out


def convert_bshd_to_thd(x, cu, tokens):
    out = x.new_zeros(tokens, *x.shape[2:])
    for number, (start, end) in enumerate(zip(cu.tolist(), cu[1:].tolist(), strict=False)):
        out[start:end] = x[number, : end - start]
    return out


def scaled_masked_softmax_forward(x, mask, scale):
    """A row that is masked all over has no weights."""
    weights = torch.softmax((x.float() * scale).masked_fill(mask, -10000.0), -1)
    return weights.masked_fill(mask.expand_as(x).all(-1, keepdim=True), 0).to(x.dtype)


def scaled_masked_softmax_backward(grad, weights, scale):
    g, w = grad.float(), weights.float()
    return (scale * w * (g - (g * w).sum(-1, keepdim=True))).to(grad.dtype)
