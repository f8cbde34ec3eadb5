"""Transformer Engine's attention to a pack that two ranks share, beside attention to the whole: run by its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.te_on_cpu import attention, boot
from tests.te_on_cpu.modules import distance

REAL, PADDED = (13, 32, 7), (16, 32, 8)  # each with two slices a rank
HEADS, HEAD_DIM = 4, 16


def whole(x: Tensor) -> Tensor:
    """[3, T, H, D] -> [T, H, D] in fp32; 0 where there is padding."""
    parts = []
    for real, part in zip(REAL, x.float().split(PADDED, 1), strict=True):
        q, k, v = part[:, :real].transpose(1, 2)[:, None]
        parts.append(
            F.pad(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1), (0, 0, 0, 0, 0, len(part[0]) - real))
        )
    return torch.cat(parts)


def compare(way: str, path: str) -> None:
    """Write (what rank 0 found wrong with its part of the results, of gradients), relative."""
    boot.start(attention=True)
    import transformer_engine.pytorch as te

    dist.init_process_group("nccl")
    rank, group = dist.get_rank(), dist.group.WORLD
    theirs = te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="thd", attn_mask_type="padding", attention_dropout=0.0)
    theirs.set_context_parallel_group(group, dist.get_process_group_ranks(group), torch.cuda.Stream(), way)
    random = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(n, sum(PADDED), HEADS, HEAD_DIM, generator=random).bfloat16() for n in (3, 1))
    real, padded = (F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int() for lengths in (REAL, PADDED))
    own = attention._by_rank(padded, 2).chunk(2)[rank]
    expected_x = x.float().requires_grad_()
    expected = whole(expected_x)
    expected.backward(grad[0].float())
    mine = x[:, own].cuda().requires_grad_()
    bounds = {f"cu_seqlens_{of}": real.cuda() for of in ("q", "kv")}
    bounds |= {f"cu_seqlens_{of}_padded": padded.cuda() for of in ("q", "kv")}
    longest = max(PADDED)
    y = theirs(*mine, **bounds, max_seqlen_q=longest, max_seqlen_kv=longest, pad_between_seqs=True)
    y.backward(grad[0][own].flatten(1).cuda())
    result = y.detach().cpu().view(-1, HEADS, HEAD_DIM), mine.grad.cpu()
    if rank == 0:
        torch.save((distance(result[0], expected[own].detach()), distance(result[1], expected_x.grad[:, own])), path)
