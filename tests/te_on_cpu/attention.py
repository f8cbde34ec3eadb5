"""Attention to packs, as cuDNN's kernels give it, and what Transformer Engine's Python asks for where ranks share one.

Sequences lie in [T, H, D] where the padded boundaries say, each with its real tokens first; the rest is 0. Computed in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    "fused_attn_fwd",
    "fused_attn_bwd",
    "thd_out_correction",
    "thd_sequence_order_to_cp_rank_order",
    "thd_cp_rank_order_to_sequence_order",
]


def _check(layout, mask, q: Tensor, longest: int, cu: Tensor) -> None:
    if str(layout) != "NVTE_THD_THD_THD" or str(mask) != "NVTE_PADDING_MASK":
        raise ValueError(f"the stand-in attends to packs, in both directions, not {layout} with {mask}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"cuDNN's attention takes fp16 and bf16, not {q.dtype}")
    if int(cu.diff().max()) > longest:
        raise RuntimeError(f"a sequence of {int(cu.diff().max())} tokens, where the longest is said to be {longest}")


def _sequences(*bounds: tuple[Tensor, Tensor | None]) -> Iterator[tuple[slice, ...]]:
    """Of each sequence, the rows that its real tokens have in q and in k. bounds: (real, padded) of either."""
    begins = ((real if padded is None else padded)[:-1].tolist() for real, padded in bounds)
    lengths = (real.diff().tolist() for real, _ in bounds)
    rows = ([slice(b, b + n) for b, n in zip(*of, strict=True)] for of in zip(begins, lengths, strict=True))
    return zip(*rows, strict=True)


def fused_attn_fwd(
    max_q, max_kv, is_training, scale, dropout, fill, layout, o_format, scale_format, bias_type, mask, softmax, window,
    bottom_right, cu_q, cu_kv, q, k, v, fake_dtype, padded_q, padded_kv, pages_k, pages_v, s_quantizer, o_quantizer,
    bias, offset, generator, elements, return_max_logit, cuda_graph, /,
):  # fmt: skip
    """[out [T, H, D], log-sum-exp [T, H, 1], state of the random numbers]"""
    _check(layout, mask, q, max_q, cu_q)
    _check(layout, mask, k, max_kv, cu_kv)
    out, lse = torch.zeros_like(q), q.new_zeros(*q.shape[:2], 1, dtype=torch.float32)
    for of_q, of_k in _sequences((cu_q, padded_q), (cu_kv, padded_kv)):
        scores = torch.einsum("qhd,khd->qhk", q[of_q].float(), k[of_k].float()) * scale
        lse[of_q] = scores.logsumexp(-1, keepdim=True)
        out[of_q] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v[of_k].float()).to(q.dtype)
    return [out, lse, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_q, max_kv, scale, dropout, fill, layout, o_format, do_format, dqkv_layout, scale_format, do_scale_format,
    bias_type, mask, softmax, window, bottom_right, deterministic, cu_q, cu_kv, q, k, v, out, grad, fake_dtype, kept,
    padded_q, padded_kv, s_quantizer, dp_quantizer, dqkv_quantizer, cuda_graph, /,
):  # fmt: skip
    """[dq, dk, dv, none of a bias, none of a sink]. kept: log-sum-exp over all ranks' keys, and the state."""
    _check(layout, mask, q, max_q, cu_q)
    _check(layout, mask, k, max_kv, cu_kv)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for of_q, of_k in _sequences((cu_q, padded_q), (cu_kv, padded_kv)):
        queries, keys, values, dy = q[of_q].float(), k[of_k].float(), v[of_k].float(), grad[of_q].float()
        weights = torch.exp(torch.einsum("qhd,khd->qhk", queries, keys) * scale - kept[0][of_q])
        inner = torch.einsum("qhd,khd->qhk", dy, values) - (dy * out[of_q].float()).sum(-1, keepdim=True)
        dscores = weights * inner * scale
        dq[of_q] = torch.einsum("qhk,khd->qhd", dscores, keys).to(q.dtype)
        dk[of_k] = torch.einsum("qhk,qhd->khd", dscores, queries).to(q.dtype)
        dv[of_k] = torch.einsum("qhk,qhd->khd", weights, dy).to(q.dtype)
    return [dq, dk, dv, None, None]


def thd_out_correction(out, more, lse_before, lse, lse_of_more, cu, only_second_half, packed, /) -> None:
    """out [T, H, D] in place: with what other keys gave, each by its share. lse: [H, T], after both."""
    if only_second_half or not packed:
        raise ValueError("the stand-in joins whole sequences in packs")
    before, share = (torch.exp(x - lse).t()[..., None] for x in (lse_before, lse_of_more))
    out.copy_(out.float() * before + more.float() * share)


def _by_rank(cu: Tensor, ranks: int) -> Tensor:
    """Of each token, rank by rank, where it is in the sequences: rank r has the r-th of 2 * ranks slices of each and
    the r-th from the end."""
    slices = [torch.arange(*pair).chunk(2 * ranks) for pair in zip(cu.tolist(), cu[1:].tolist(), strict=False)]
    return torch.cat([part[n] for rank in range(ranks) for part in slices if part for n in (rank, -1 - rank)])


def thd_sequence_order_to_cp_rank_order(x: Tensor, cu: Tensor, ranks: int, tokens: int, /) -> Tensor:
    return x[_by_rank(cu, ranks)]


def thd_cp_rank_order_to_sequence_order(x: Tensor, cu: Tensor, ranks: int, tokens: int, /) -> Tensor:
    return torch.empty_like(x).index_copy_(0, _by_rank(cu, ranks), x)
