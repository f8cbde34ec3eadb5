"""Count what a piece of a step launches on a GPU, on fake tensors: matmuls, bytes, kernels, waits."""

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
MATMULS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "matmul_gelu": (0, 1),  # what their epilogues read and write counts as the matmul's
    "matmul_gelu_backward": (0, 1),
}  # {operator: positions of its operands}
ATTENTION = {"_varlen_attn": 2, "_varlen_attn_backward": 5}  # {operator: matmuls of T x T scores with D columns}
# What makes the host wait for the device: the result is a Python value, or its shape follows from values.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # no operator on a CPU tensor
UNSCALED = ("grads",)  # of AdamW, which writes them with a gradient scaler only
OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_"}  # what they write they do not read
SETS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach", "alias"}


@dataclass
class Work:
    """matmuls: {(m, n, k): count}; attention: matmuls over pairs of tokens, by heads' width, so that FLOPs
    are 2 x pairs x hidden x this; moved: bytes that all other kernels read and write; kernels: all that are launched;
    waits: {operator the host waits for: count}; by_operator: {name: bytes} of `moved`."""

    matmuls: Counter = field(default_factory=Counter)
    attention: int = 0
    moved: int = 0
    kernels: int = 0
    waits: Counter = field(default_factory=Counter)
    by_operator: Counter = field(default_factory=Counter)

    @property
    def matmul_flops(self) -> int:
        return sum(2 * math.prod(shape) * times for shape, times in self.matmuls.items())

    def __add__(self, other: Work) -> Work:
        left, right = vars(self), vars(other)
        return Work(**{name: left[name] + right[name] for name in left})

    def __mul__(self, times: int) -> Work:
        def scaled(value):
            return Counter({k: v * times for k, v in value.items()}) if isinstance(value, Counter) else value * times

        return Work(**{name: scaled(value) for name, value in vars(self).items()})

    # ---- what is counted ----------------------------------------------------------------------------------------

    def matmul(self, left: Tensor, right: Tensor) -> None:
        """left [..., m, k], right [..., k, n]."""
        *batch, m, k = left.shape
        self.matmuls[(m * math.prod(batch), right.shape[-1], k)] += 1
        self.kernels += 1

    def kernel(self, name: str, size: int) -> None:
        """One kernel that reads and writes `size` bytes."""
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
        if name in MATMULS:
            self.work.matmul(*(args[place] for place in MATMULS[name]))
        elif name in ATTENTION:
            self.work.attention += ATTENTION[name]
            self.work.kernels += 1
        elif name not in SETS and (operator_schema(func).is_mutable or _is_new(given, made)):
            written = _written(func, args)
            if name in OVERWRITES:
                given = tensors([args[1:], kwargs])
            self.work.kernel(name, sum(map(_bytes, [*given, *(made or written)])))
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
    """Whether anything is computed: a view shares its base's storage."""
    storages = {storage_key(x) for x in given}
    return any(storage_key(x) not in storages for x in made)


def _written(func, args: tuple) -> list[Tensor]:
    """Tensors that an operator changes in place."""
    places = zip(operator_schema(func).arguments, args, strict=False)
    return tensors([x for a, x in places if a.alias_info and a.alias_info.is_write and a.name not in UNSCALED])


def _bytes(x: Tensor) -> int:
    """Bytes read or written; an expanded dimension (stride 0) counts once."""
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


@contextmanager
def counted() -> Iterator[Work]:
    """Count all operators inside the block: what eager execution launches."""
    work = Work()
    with _Operators(work), _Reads(work):
        yield work
