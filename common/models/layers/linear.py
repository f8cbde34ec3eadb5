"""y = x W^T + b: on a GPU with gradients of W in fp32, on a CPU by the faster of two libraries and bf16 on any.

On a GPU a weight whose bf16 copy is made once a step gets its gradient as the product adds it up, in fp32: neither
rounded to bf16, nor written in bf16 and read again to be widened.

On a CPU common.models.layers.cpu says which library. fp32 products of oneDNN are as exact as MKL's: fp32 inputs and
accumulators. A bf16 product without instructions is the fp32 product of the bf16 numbers, rounded once: exact products
and fp32 sums, as the instructions have them. What is kept between forward and backward is bf16 then, too: numbers are
widened a block of rows at a time, which stays in the cache and takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.compat import foreach_copy_, onednn_linear
from common.models.layers.cpu import BF16_PRODUCTS, FP32_BY_ONEDNN, device_type

# bf16 copies of the weights that products take under autocast, made once a step.
#
# Autocast rounds a weight wherever it is used: in every micro-batch, and again where a layer is recomputed, for its
# cache lasts from entering to leaving it, and a graph that is compiled has none. Rounded ahead the numbers are the
# same. So are the gradients on a CPU: in bf16 up to the weight, added up in fp32. On a GPU they are fp32 from the
# product on (common.models.layers.linear).

_COPY = "in_bf16"  # attribute of a parameter


class RoundedWeights:
    """Those of some layers, whose modules say which of their parameters go into products as they are: `multiplied`."""

    def __init__(self, layers: Iterable[nn.Module]):
        modules = [module for layer in layers for module in layer.modules()]
        self.weights = [getattr(module, name) for module in modules for name in getattr(module, "multiplied", ())]
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False) for weight in self.weights]
        for weight, copy in zip(self.weights, self.copies, strict=True):
            use_copy(weight, copy)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have been set or updated."""
        if self.copies:
            foreach_copy_(self.copies, self.weights)


def use_copy(weight: Tensor, copy: Tensor) -> None:
    """From now on `rounded` gives the copy."""
    setattr(weight, _COPY, copy)


def copy_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, _COPY, None)


def rounded(weight: Tensor) -> Tensor:
    """The copy in the place of the weight, if there is one."""
    copy = copy_of(weight)
    return weight if copy is None else _Rounded.apply(weight, copy)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.to(ctx.dtype), None


ROWS_PER_THREAD = 512  # that are widened at a time: 2.6 MB of fp32 for the widest operand of the 8M model


class Linear(nn.Linear):
    """`nn.Linear` by way of `linear`, or of what takes its place as `product`."""

    multiplied = ("weight", "bias")

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.product = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x [..., in], weight [out, in], bias [out]; by autocast's rules where that is on."""
    if _autocast_to_bf16(x.device.type):
        copy, bias_copy = copy_of(weight), None if bias is None else copy_of(bias)
        if copy is not None and _takes_copies(x):
            return _ByCopies.apply(x.bfloat16(), weight, bias, copy, bias_copy)
        weight, bias = rounded(weight), None if bias is None else rounded(bias)
    if device_type(x) != "cpu" or x.dim() != 2:
        return F.linear(x, weight, bias)
    if not BF16_PRODUCTS and _autocast_to_bf16("cpu") and x.dtype != torch.float64:
        x, weight = x.bfloat16(), weight.bfloat16()
        bias = None if bias is None else bias.bfloat16()
    elif torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if _takes(x, weight) else F.linear(x, weight, bias)


def gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `linear` gives back: grad W and grad^T x, for grad [m, out], x [m, in] and W [out, in] of one dtype."""
    if device_type(x) == "cpu" and _takes(x, weight):
        return _gradients(grad, x, weight, True, True)
    return grad @ weight, grad.t() @ x


def _autocast_to_bf16(device: str) -> bool:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def _takes_copies(x: Tensor) -> bool:
    """Whether gradients of weights come out of a product in fp32 where it computes."""
    return device_type(x) == "cuda" and x.dim() == 2


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of these is ours to make, and not the library's."""
    if not torch.compiler.is_compiling() and x.numel() == 0:
        return False
    ours = FP32_BY_ONEDNN if x.dtype == torch.float32 else x.dtype == torch.bfloat16 and not BF16_PRODUCTS
    return ours and x.dtype == weight.dtype


class _ByCopies(torch.autograd.Function):
    """bf16 copies are multiplied; the gradients of what they are of are not rounded to bf16 on their way."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor, bias_copy: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, copy)
        ctx.dtype = weight.dtype
        return F.linear(x, copy, bias_copy)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, copy = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_x = grad @ copy if need_x else None
        grad_weight = _unrounded(grad.t(), x).to(ctx.dtype) if need_weight else None
        grad_bias = grad.sum(0, dtype=ctx.dtype) if need_bias else None
        return grad_x, grad_weight, grad_bias, None, None


def _unrounded(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n], of bf16: fp32 [m, n]."""
    if device_type(a) == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x, grad_weight = _gradients(grad, x, weight, need_x, need_weight)
        return grad_x if need_x else None, grad_weight if need_weight else None, grad.sum(0) if need_bias else None


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a [m, k] times the transpose of b [n, k]; any strides."""
    return (_multiply_as_one if _is_one_operator(a) else _multiply)(a, b, bias)


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    """grad W and grad^T x for grad [m, n], W [n, k] and x [m, k]; nothing of any size where not needed."""
    differentiate = _differentiate_as_one if _is_one_operator(grad) else _differentiate
    return differentiate(grad, x, weight, need_x, need_weight)


def _is_one_operator(x: Tensor) -> bool:
    """In a graph that is compiled; and in bf16, where selective checkpointing would keep memory that is used again."""
    return torch.compiler.is_compiling() or x.dtype == torch.bfloat16


@torch.autocast("cpu", enabled=False)  # which would turn fp32 products into bf16 ones
def _multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.dtype == torch.float32:
        return _fp32(a, b, bias)
    b = b.float()
    bias = None if bias is None else bias.float()
    if not a.is_contiguous():
        return _fp32(a.float(), b, bias).to(a.dtype)
    out = a.new_empty(len(a), len(b))
    blocks = _Blocks(len(a))
    wide, result = blocks.scratch(a.shape[1]), blocks.scratch(len(b))
    for rows in blocks:
        out[rows] = _fp32(blocks.widened(a, rows, wide), b, bias, blocks.cut(result, rows))
    return out


@torch.autocast("cpu", enabled=False)
def _differentiate(grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    if grad.dtype == torch.float32:
        grad_x = _fp32(grad, weight.t(), None) if need_x else grad.new_empty(0)
        return grad_x, _fp32_summed(grad, x) if need_weight else grad.new_empty(0)
    grad_x = torch.empty_like(x) if need_x else grad.new_empty(0)
    total = torch.zeros(weight.shape if need_weight else 0)
    transposed = weight.float().t()
    blocks = _Blocks(len(grad))
    wide, of_x, result = (blocks.scratch(n) for n in (grad.shape[1], x.shape[1], x.shape[1]))
    for rows in blocks:  # of `grad` once for both
        block = blocks.widened(grad, rows, wide)
        if need_x:
            grad_x[rows] = _fp32(block, transposed, None, blocks.cut(result, rows))
        if need_weight and FP32_BY_ONEDNN:
            total += _fp32_summed(block, blocks.widened(x, rows, of_x))
        elif need_weight:
            total.addmm_(block.t(), blocks.widened(x, rows, of_x))
    return grad_x, total.to(grad.dtype)


class _Blocks:
    """The rows that are widened at a time, and memory for them: one for all blocks, so that it stays in the cache."""

    def __init__(self, rows: int):
        self.rows = rows
        self.step = min(rows, ROWS_PER_THREAD * torch.get_num_threads())

    def __iter__(self):
        return (slice(start, min(start + self.step, self.rows)) for start in range(0, self.rows, self.step))

    def scratch(self, columns: int) -> Tensor:
        return torch.empty(self.step, columns, dtype=torch.float32)

    def cut(self, scratch: Tensor, rows: slice) -> Tensor:
        return scratch[: rows.stop - rows.start]

    def widened(self, x: Tensor, rows: slice, scratch: Tensor) -> Tensor:
        return self.cut(scratch, rows).copy_(x[rows])


def _fp32(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """a [m, k] times the transpose of b [n, k]; `out` is memory that may be used for it."""
    if FP32_BY_ONEDNN:
        return onednn_linear(a, b, bias)
    return torch.mm(a, b.t(), out=out) if bias is None else torch.addmm(bias, a, b.t(), out=out)


def _fp32_summed(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [m, n] times b [m, k]."""
    # Both factors are read column-wise here; the wider one is faster as oneDNN's second.
    wide = a.shape[1] > b.shape[1]
    return _fp32(b.t(), a.t(), None).t() if wide else _fp32(a.t(), b.t(), None)


# Inductor takes oneDNN's own operator for one of inference, whose weights are constants; these it calls as they are.
# It would also leave out the rounding to bf16 of what is widened again.
@torch.library.custom_op("esm2::product", mutates_args=())
def _multiply_as_one(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(a, b, bias)


@_multiply_as_one.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op("esm2::product_backward", mutates_args=())
def _differentiate_as_one(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _differentiate(grad, x, weight, need_x, need_weight)
    return grad_x, grad_weight.contiguous()


@_differentiate_as_one.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    return grad.new_empty(x.shape if need_x else 0), grad.new_empty(weight.shape if need_weight else 0)
