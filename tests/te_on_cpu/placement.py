"""Which tensors of this process would lie on a GPU: all are on the CPU, each with the place it was asked to be in.

A tensor is where its storage is, and a storage where its maker asked for it (`device=`, `.to`, `.cuda()`) or where the
operands lie of which it was computed. An operator that gets both is refused in the words of a CUDA build, with the two
exceptions that those make: numbers without dimensions, and indices, may come from the CPU. `.device`, `.is_cuda` and
`.get_device()` answer by that place, so that code takes its GPU's ways.

What C++ makes for itself (buckets of DDP, autograd's zeros) has no place until it meets a tensor that has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
aten = torch.ops.aten
COPIES = {aten._to_copy, aten.copy_, aten._copy_from, aten.set_, aten.set_data, aten._foreach_copy_}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# A tensor made of these, with no tensor among the arguments, was asked for by Python.
MAKERS = {
    getattr(torch, name)
    for name in (
        *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "arange", "linspace"),
        *("eye", "rand", "randn", "randint", "randperm", "from_numpy", "frombuffer", "scalar_tensor"),
    )
}


class Places:
    """Of storages, for as long as they live."""

    def __init__(self):
        self.of: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self.limit = 10_000

    def __getitem__(self, tensor: Tensor) -> torch.device | None:
        """None: unknown so far."""
        storage = _storage(tensor)
        if storage is None:
            return CUDA if hasattr(tensor, "_quantizer") else None
        reference, place = self.of.get(storage._cdata, (None, None))
        return None if reference is None or reference.expired() else place

    def __setitem__(self, tensor: Tensor, place: torch.device) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        self.of[storage._cdata] = StorageWeakRef(storage), place
        if len(self.of) > self.limit:
            self.of = {key: (reference, at) for key, (reference, at) in self.of.items() if not reference.expired()}
            self.limit = max(10_000, 2 * len(self.of))

    def settle(self, tensors: list[Tensor], place: torch.device) -> None:
        """Those that have no place get this one."""
        for tensor in tensors:
            if self[tensor] is None:
                self[tensor] = place


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Of a DTensor's part, too; None of what has none (meta tensors, Transformer Engine's quantised ones)."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if type(tensor) not in PLAIN and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    with torch._C.DisableTorchFunction():
        return None if tensor.is_meta else tensor.untyped_storage()


places = Places()
capturing: list[Any] = []  # the graph that launches are added to (tests/te_on_cpu/graphs.py), if there is one


def tensors_of(*values) -> list[Tensor]:
    """Those in tuples, lists and dictionaries; of Transformer Engine's quantised ones the parts."""
    found: list[Tensor] = []
    _gather(values, found)
    return found


def _gather(values: Iterable, found: list[Tensor]) -> None:
    for value in values:
        if hasattr(value, "_INNER_TENSORS"):
            found += [part for name, _ in value._INNER_TENSORS if (part := getattr(value, name)) is not None]
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            _gather(value, found)
        elif isinstance(value, dict):
            _gather(value.values(), found)


def as_place(device) -> torch.device | None:
    """CPU or CUDA of what names one; None of anything else."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CUDA
    if isinstance(device, str) and device.split(":")[0] in ("cpu", "cuda"):
        return CUDA if device.startswith("cuda") else CPU
    if isinstance(device, torch.device) and device.type in ("cpu", "cuda"):
        return CUDA if device.type == "cuda" else CPU
    return None


class _Asked(TorchFunctionMode):
    """What Python asks for: devices by name become the CPU, and what comes of it has its place."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if answer := _ANSWERS.get(func):
            return answer(*args, **kwargs)
        if func is torch.as_tensor and args and isinstance(args[0], Tensor):  # not anew where it is there already
            return _to(args[0], **kwargs)
        place = as_place(kwargs.get("device"))
        if place is CUDA:
            kwargs["device"] = CPU
        if place is None and func in MAKERS and kwargs.get("device") is None and not tensors_of(args):
            place = CPU
        result = func(*args, **kwargs)
        if place is not None:
            for tensor in tensors_of(result):
                places[tensor] = place
        return result


def _device(tensor: Tensor) -> torch.device:
    real = Tensor.device.__get__(tensor)
    return CUDA if real.type == "cpu" and places[tensor] is CUDA else real


def _is_cuda(tensor: Tensor) -> bool:
    return _device(tensor).type == "cuda"


def _to(tensor: Tensor, *args, **kwargs) -> Tensor:
    """Another place is another storage; the same place is the tensor itself, as without a mode."""
    place = as_place(kwargs.pop("device", None)) if as_place(kwargs.get("device")) else None
    if args and isinstance(args[0], Tensor):
        place, args = _device(args[0]), (args[0].dtype, *args[1:])
    elif args and (named := as_place(args[0])) is not None:
        place, args = named, args[1:]
    elif args and args[0] is None:
        args = args[1:]
    kwargs.pop("non_blocking", None)
    if args and isinstance(args[-1], bool):  # (dtype, non_blocking[, copy])
        args = args[:1] if isinstance(args[0], torch.dtype) else ()
    if not args and not kwargs:
        kwargs["dtype"] = tensor.dtype
    if place is not None and place.type != _device(tensor).type:
        kwargs["copy"] = True
    result = Tensor.to(tensor, *args, **kwargs)
    if place is not None:
        places[result] = place
    elif result is not tensor:
        places.settle([result], _device(tensor))
    return result


def _numpy(tensor: Tensor, **kwargs):
    if _is_cuda(tensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to host memory first")
    return Tensor.numpy(tensor, **kwargs)


def _tolist(tensor: Tensor) -> list:
    if capturing and _is_cuda(tensor):
        raise RuntimeError("tolist: operation not permitted when stream is capturing")
    return Tensor.tolist(tensor)


def _pin(tensor: Tensor, *args) -> Tensor:
    if _is_cuda(tensor):
        raise RuntimeError("cannot pin a tensor of the GPU")
    return tensor


def _backward(tensor: Tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
    """`Tensor.backward` under the mode, so that operators of backward passes are checked too."""
    with _modes[0]:
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_ANSWERS = {
    Tensor.backward: _backward,
    Tensor.device.__get__: _device,
    Tensor.is_cuda.__get__: _is_cuda,
    Tensor.is_cpu.__get__: lambda tensor: _device(tensor).type == "cpu",
    Tensor.get_device: lambda tensor: CUDA.index if _is_cuda(tensor) else -1,
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, **kwargs: _to(tensor, "cpu"),
    Tensor.cuda: lambda tensor, *args, **kwargs: _to(tensor, "cuda"),
    Tensor.numpy: _numpy,
    Tensor.tolist: _tolist,
    Tensor.pin_memory: _pin,
    Tensor.is_pinned: lambda tensor, *args: False,
}


class _Computed(TorchDispatchMode):
    """What operators make lies where their operands do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # of shapes alone
        with torch._C.DisableTorchFunction():  # what C++ asks for names the CPU, for there its tensors are
            return self.computed(func, types, args, dict(kwargs or {}))

    def computed(self, func, types, args, kwargs):
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # the subclass first; what it calls comes here again
        place = as_place(kwargs.get("device"))
        if place is CUDA:
            kwargs["device"] = CPU
        else:
            place = None
        given = tensors_of(args, kwargs)
        if place is None and given:
            place = places[given[-1]] if func.overloadpacket is aten.copy_ and places[given[0]] is None else None
            place = place or common_place(func, given)
        result = func(*args, **kwargs)
        if place is not None:
            places.settle(tensors_of(result), place)
            if func.overloadpacket not in COPIES:
                places.settle(given, place)
        return result


def common_place(func, given: list[Tensor]) -> torch.device | None:
    """Of an operator's operands. RuntimeError where they are apart and it takes no such pair."""
    known = [(tensor, place) for tensor in given if (place := places[tensor]) is not None]
    if func.overloadpacket in COPIES:
        return known[0][1] if known else None
    whole = {place for tensor, place in known if tensor.dim() > 0}
    numbers = {place for tensor, place in known if tensor.dim() == 0}
    if func.overloadpacket in BY_INDEX and places[given[0]] is CUDA:
        whole = {CUDA}  # indices may come from the CPU
    if len(whole) > 1 or (CPU in whole and CUDA in numbers):
        where = ", ".join(f"{tuple(tensor.shape)} on {place}" for tensor, place in known)
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}: {where}")
    if whole:
        return whole.pop()
    if any(tensor.dim() > 0 for tensor in given):
        return None  # unknown: a 0-d tensor may be on either device
    return CUDA if CUDA in numbers else next(iter(numbers), None)


_modes = (_Asked(), _Computed())


def install() -> None:
    """For the rest of this process, in this thread."""
    torch.autograd.has_torch_function = lambda tensors: False  # else backward passes run without the mode
    for mode in _modes:
        mode.__enter__()


def kernel(function):
    """A function that computes as a kernel does: its tensors are the GPU's, and so is what it makes."""

    def launched(*args, **kwargs):
        for tensor in tensors_of(args, kwargs):
            if places[tensor] is CPU and tensor.dim() > 0:
                raise RuntimeError(f"{function.__name__}: a tensor {tuple(tensor.shape)} of the CPU: illegal access")
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            result = function(*args, **kwargs)
        places.settle(tensors_of(result), CUDA)
        if capturing:
            capturing[-1].add(launched, args, kwargs, result, torch.is_autocast_enabled("cpu"))
        return result

    launched.__name__ = function.__name__
    return launched
