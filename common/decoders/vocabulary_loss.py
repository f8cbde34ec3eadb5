"""Cross-entropy over a large vocabulary without the logits of all tokens: some rows at a time, gradients at once.

Logits of 8,192 tokens over 128,256 words are 4.2 GB in fp32, and as much again for their gradient. Here the forward
pass takes as many rows at a time as make 256 MB of logits, adds up their loss and, while they are there, their
gradients for the hidden states and the matrix: nothing is computed twice, and between forward and backward pass only
those two are held (the second in fp32). As in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.layers.linear import gradients, linear

IGNORE = -100
LOGITS_AT_A_TIME = 2**26


def vocabulary_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [T, H], weight [V, H], labels int64 [T], -100 where nothing is asked.

    Returns the cross-entropy in nats, summed over the labelled positions (fp32 scalar; float64 for float64), and at
    how many of them the label is the top prediction (int64 scalar). By autocast's rules where that is on.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
        weight = weight.to(hidden.dtype)
    with torch.autocast(kind, enabled=False):
        return _VocabularyLoss.apply(hidden, weight, labels, hidden.requires_grad or weight.requires_grad)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, differentiates: bool):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        if differentiates:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight, dtype=wide)
        step = max(1, LOGITS_AT_A_TIME // len(weight))
        for rows in (slice(begin, begin + step) for begin in range(0, len(hidden), step)):
            x, asked = hidden[rows], labels[rows]
            logits = linear(x, weight).to(wide)
            loss += F.cross_entropy(logits, asked, ignore_index=IGNORE, reduction="sum")
            correct += (logits.argmax(-1) == asked).sum()
            if differentiates:
                told = asked != IGNORE
                grad = logits.softmax(-1)
                grad[torch.arange(len(x), device=x.device), asked.clamp(min=0)] -= 1
                grad *= told[:, None]
                grad_hidden[rows], more = gradients(grad.to(x.dtype), x, weight)
                grad_weight += more
        if differentiates:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = torch.empty_like(grad_weight, dtype=ctx.dtype)
        return grad_hidden * grad.to(grad_hidden.dtype), torch.mul(grad_weight, grad, out=of_weight), None, None
