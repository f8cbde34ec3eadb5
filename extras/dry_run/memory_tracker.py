"""Tensors that have a shape and no values: training code runs as it is, and what it would hold is counted.

Floating-point tensors are torch's fake ones, on the CPU by their own account; integers (tokens, boundaries, places)
are computed, for code reads them; places that `topk` finds are dealt out evenly. Every storage is counted from the
operator that makes it until it is let go, under one of the KINDS; so what a backward pass keeps, and for how long, is
found by running the real modules, and not by a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
GATHERED = "gathered"  # weights in the form they are computed with, where it is a copy; what is on its way to ranks
LAYERS, ENDS = "layers", "ends"  # made in a forward pass by the layers; by embeddings, head and loss
BACKWARD = "backward"  # made in a backward pass: gradients of activations, what is recomputed
HOST = "host"  # in host memory, whatever the device
KINDS = (WEIGHTS, OPTIMIZER, GRADIENTS, GATHERED, LAYERS, ENDS, BACKWARD, HOST)

_EXCHANGE = ("fsdp", "c10d", "_c10d_functional")  # namespaces of operators
_STAYS = (WEIGHTS, OPTIMIZER, GRADIENTS, HOST)  # whatever is done with them


class MemoryTracker(TorchDispatchMode):
    """While this is active, tensors have no values and are counted.

    kind: under which new storages are. on_host: kinds that the device does not hold. peak: bytes the device holds at
    most, since `begin_peak`; at_peak: {kind: bytes} then. most_on_host: bytes of HOST at most since then.
    """

    def __init__(self, on_host: tuple[str, ...] = ()):
        super().__init__()
        self.kind, self.on_host = ENDS, {*on_host, HOST}
        self.bytes = dict.fromkeys(KINDS, 0)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, list] = {}  # {place: [kind, bytes, what tells that it is gone]}
        self.begin_peak()

    def begin_peak(self) -> None:
        self.peak, self.at_peak, self.most_on_host = 0, dict(self.bytes), self.bytes[HOST]
        self._see_peak()

    def kind_of(self, tensor: Tensor) -> str | None:
        entry = self._storages.get(_place(tensor))
        return entry and entry[0]

    def put(self, tensor: Tensor, kind: str) -> None:
        """From now on the tensor's storage counts as of this kind; that of a sharded tensor is this rank's share."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._count(tensor)
        entry = self._storages[_place(tensor)]
        self.bytes[entry[0]] -= entry[1]
        self.bytes[kind] += entry[1]
        entry[0] = kind

    def put_all(self, kinds: tuple[str, ...], kind: str) -> None:
        """Everything of some kinds is of this one."""
        for entry in self._storages.values():
            if entry[0] in kinds:
                self.bytes[entry[0]] -= entry[1]
                self.bytes[kind] += entry[1]
                entry[0] = kind

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    # ---- what torch calls -----------------------------------------------------------------------------------

    def __enter__(self):
        # FSDP lets gathered weights go, and takes memory for them again, by the size of their storages.
        self._resize = torch.UntypedStorage.resize_
        counted = self

        def resize_(storage: torch.UntypedStorage, size: int):
            result = counted._resize(storage, size)
            counted._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again by its local parts
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in given):
            with self._fake:
                result = func(*args, **kwargs)
        else:
            result = self._made_of_nothing(func, args, kwargs) if all(x.is_meta for x in given) else None
            result = self._without_values(func(*args, **kwargs)) if result is None else result
        if func is torch.ops.aten.topk.default and isinstance(result[0], FakeTensor):
            result = result[0], _dealt_evenly(result[1].shape, given[0].shape[args[2] if len(args) > 2 else -1])
        made = [x for x in tree_iter(result) if isinstance(x, Tensor) and not x.is_meta]
        exchanged = func.namespace in _EXCHANGE
        for tensor in made:
            self._count(tensor)
        if exchanged:
            self._exchange(func, given, made)
        elif pinned:
            for tensor in made:
                self.put(tensor, HOST)
        elif func is torch.ops.aten._to_copy.default and self.kind_of(given[0]) in (WEIGHTS, GATHERED):
            self.put(made[0], GATHERED)  # autocast's
        self._see_peak()
        return result

    # ---- its parts ------------------------------------------------------------------------------------------

    def _made_of_nothing(self, func, args: tuple, kwargs: dict) -> Tensor | None:
        """What a factory makes, if those are floating-point numbers of which there is to be a storage."""
        with self._fake:
            result = func(*args, **kwargs)
        shape_alone = isinstance(result, Tensor) and result.is_floating_point() and not result.is_meta
        return result if shape_alone else None

    def _without_values(self, result):
        if isinstance(result, Tensor) and result.is_floating_point() and not result.is_meta:
            return self._fake.from_tensor(result)
        return result

    def _exchange(self, func, given: list[Tensor], made: list[Tensor]) -> None:
        # A share that is left in what the whole came in goes with it.
        reduces = "reduce_scatter" in func.__name__ and _place(given[0]) not in map(_place, given[1:])
        for number, tensor in enumerate((*given, *made)):
            if isinstance(tensor, FakeTensor) and self.kind_of(tensor) not in _STAYS:
                self.put(tensor, GRADIENTS if reduces and number == 0 else GATHERED)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._storages:
            size = storage.nbytes()
            self._storages[place] = [self.kind, size, weakref.ref(storage, lambda _: self._gone(place))]
            self.bytes[self.kind] += size

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if entry := self._storages.get(storage._cdata):
            size = storage.nbytes()
            self.bytes[entry[0]] += size - entry[1]
            entry[1] = size
            self._see_peak()

    def _gone(self, place: int) -> None:
        kind, size, _ = self._storages.pop(place)
        self.bytes[kind] -= size

    def _see_peak(self) -> None:
        now = sum(size for kind, size in self.bytes.items() if kind not in self.on_host)
        if now > self.peak:
            self.peak, self.at_peak = now, dict(self.bytes)
        self.most_on_host = max(self.most_on_host, self.bytes[HOST])


def _dealt_evenly(shape: torch.Size, among: int) -> Tensor:
    """Places that would follow from values (experts that a router chooses): each as often as any other."""
    return (torch.arange(shape.numel()) % among).view(shape)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
