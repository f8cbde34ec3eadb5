"""What a piece of a step would have a GPU do, counted on tensors without values: products, bytes, kernels, waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from common.compat import TorchDispatchMode, operator_schema, storage_key, tree_iter

aten = torch.ops.aten
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}  # {aten operator: where its factors are}
ATTENTION = {"_varlen_attn": 2, "_varlen_attn_backward": 5}  # {operator: products of T x T scores with D columns}
# What makes the host wait for the device: the result is a Python value, or its shape follows from values.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # which a tensor on a CPU answers without an operator
UNSCALED = ("grads",)  # of AdamW, which would write them with a gradient scaler only
SETS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach", "alias"}


@dataclass
class Work:
    """products: {(m, n, k): how many}; attention: matrix products over pairs of tokens, by heads' width, so that FLOPs
    are 2 x pairs x hidden x this; moved: bytes that all other kernels read and write; kernels: all that are launched;
    waits: {what the host waits for: times}; by_operator: {name: bytes} of `moved`."""

    products: Counter = field(default_factory=Counter)
    attention: int = 0
    moved: int = 0
    kernels: int = 0
    waits: Counter = field(default_factory=Counter)
    by_operator: Counter = field(default_factory=Counter)

    @property
    def product_flops(self) -> int:
        return sum(2 * math.prod(shape) * times for shape, times in self.products.items())

    def __add__(self, other: Work) -> Work:
        mine, its = vars(self), vars(other)
        return Work(**{name: mine[name] + its[name] for name in mine})

    def __mul__(self, times: int) -> Work:
        def grown(value):
            return Counter({k: v * times for k, v in value.items()}) if isinstance(value, Counter) else value * times

        return Work(**{name: grown(value) for name, value in vars(self).items()})

    # ---- what is counted ----------------------------------------------------------------------------------------

    def product(self, left: Tensor, right: Tensor) -> None:
        """left [..., m, k], right [..., k, n]."""
        *batch, m, k = left.shape
        self.products[(m * math.prod(batch), right.shape[-1], k)] += 1
        self.kernels += 1

    def kernel(self, name: str, size: int) -> None:
        """One that reads and writes so many bytes."""
        self.kernels += 1
        self.moved += size
        self.by_operator[name] += size


def tensors(tree) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


class _Operators(TorchDispatchMode):
    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again by its local parts
        result = func(*args, **(kwargs or {}))
        name, given, made = operator_schema(func).name.split("::")[1], tensors((args, kwargs)), tensors(result)
        if name in WAITS:
            self.work.waits[name] += 1
        if name in PRODUCTS:
            self.work.product(*(args[place] for place in PRODUCTS[name]))
        elif name in ATTENTION:
            self.work.attention += ATTENTION[name]
            self.work.kernels += 1
        elif name not in SETS and (operator_schema(func).is_mutable or _is_new(given, made)):
            self.work.kernel(name, sum(map(_bytes, [*given, *(made or _written(func, args))])))
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.work.waits[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _is_new(given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether anything is computed: a view has the storage of what it is of."""
    storages = {storage_key(x) for x in given}
    return any(storage_key(x) not in storages for x in made)


def _written(func, args: tuple) -> list[Tensor]:
    """What an operator changes in place."""
    places = zip(operator_schema(func).arguments, args, strict=False)
    return tensors([x for a, x in places if a.alias_info and a.alias_info.is_write and a.name not in UNSCALED])


def _bytes(x: Tensor) -> int:
    """That are read or written; what is repeated by a stride of 0 is one number."""
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


@contextmanager
def counted() -> Iterator[Work]:
    """All that tensors are asked for meanwhile, operator by operator: what eager execution launches."""
    work = Work()
    with _Operators(work), _Reads(work):
        yield work
