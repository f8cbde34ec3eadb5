"""triton_adamw: clipping, AdamW and the bf16 copies of the weights in one Triton kernel.

Apart they read and write 46 bytes a weight: 12 by norm and clipping, 28 by AdamW, 6 by the copies. Here it is 34: 4 by
the norm, 30 by the kernel. One launch serves all tensors of a parameter group: the kernel gets a table of addresses.

State and options are those of torch's AdamW: a run may change between the two when it resumes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.compat import foreach_add_
from common.models.layers.linear import copy_of
from common.training.optim import AdamW

BLOCK = 1024  # weights that one program updates


class TritonAdamW(AdamW):
    """AdamW of fp32 weights. A step divides gradients by `grad_scale`, and writes the bf16 copies too.

    `found_inf` and `grad_scale` are fp32 scalars where the weights are (`update_unless`); None: 0 and 1.
    """

    clips_and_rounds = True
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *tensors)
        *updated, _, steps = tensors  # weights, gradients, both moments
        copies = [copy_of(parameter) for parameter in group["params"] if parameter.grad is not None]
        rows = [_row(*row) for row in zip(*updated, copies, strict=True)]
        if not rows:
            return
        device = steps[0].device
        found_inf = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        grad_scale = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        table = torch.tensor(rows)
        table = (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
        # Of each block its tensor, and of each tensor its first block.
        blocks = sum(-(-size // BLOCK) for *_, size in rows)
        counts = (table[:, -1] + BLOCK - 1) // BLOCK
        tensor_of, first_of = torch.repeat_interleave(counts, output_size=blocks), counts.cumsum(0) - counts
        beta1, beta2 = group["betas"]
        taken = torch.stack(steps).double() + 1
        corrections = torch.stack([1 - beta1**taken, (1 - beta2**taken).sqrt()]).float()
        if blocks:
            update[(blocks,)](
                *(table, tensor_of, first_of, corrections, found_inf, grad_scale, len(rows)),
                *(group["lr"], group["lr"] * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]),
                BLOCK,
            )
        foreach_add_(steps, 1 - found_inf)


def _row(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, copy: Tensor | None) -> list[int]:
    """A row of the kernel's table: the tensors' addresses (0: no copy) and the number of elements."""
    for tensor, dtype in ((weight, torch.float32), (gradient, torch.float32), (copy, torch.bfloat16)):
        assert tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()), (tensor.dtype, tensor.stride())
    addresses = [tensor.data_ptr() for tensor in (weight, gradient, mean, square)]
    return [*addresses, 0 if copy is None else copy.data_ptr(), weight.numel()]


@triton.jit
def update(
    table,  # int64 [n, 6]: see `_row`
    tensor_of,  # int64 [blocks]
    first_of,  # int64 [n]
    corrections,  # fp32 [2, n]: of the first moment's bias, and the root of the second's
    found_inf,
    grad_scale,
    n,
    lr,
    decay,  # lr * weight_decay
    rate1,  # 1 - beta1
    rate2,
    eps,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    tensor = tl.load(tensor_of + block)
    row = table + tensor * 6
    at = (block - tl.load(first_of + tensor)) * BLOCK + tl.arange(0, BLOCK)
    size = tl.where(tl.load(found_inf) == 0.0, tl.load(row + 5), 0)  # 0: nothing is read or written
    mask = at < size
    weights = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    gradients = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    means = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at
    squares = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + at
    copy = tl.load(row + 4)
    weight = tl.load(weights, mask)
    mean = tl.load(means, mask)
    square = tl.load(squares, mask)
    gradient = tl.div_rn(tl.load(gradients, mask), tl.load(grad_scale))

    weight -= decay * weight
    mean += rate1 * (gradient - mean)
    square += rate2 * (gradient * gradient - square)
    denominator = tl.div_rn(tl.sqrt_rn(square), tl.load(corrections + n + tensor)) + eps
    weight -= tl.div_rn(lr, tl.load(corrections + tensor)) * tl.div_rn(mean, denominator)

    tl.store(weights, weight, mask)
    tl.store(means, mean, mask)
    tl.store(squares, square, mask)
    # To the nearest bf16, ties to even. By its bits: a cast does the same on a GPU, but not in Triton's interpreter.
    bits = weight.to(tl.uint32, bitcast=True)
    bits = tl.where(weight == weight, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    tl.store(copy.to(tl.pointer_type(tl.uint16)) + at, bits.to(tl.uint16), at < tl.where(copy != 0, size, 0))
