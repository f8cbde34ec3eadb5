"""Unpickle plain values only: nothing is imported and nothing is called.

torch.save pickles every item of a shard, and `pickle` runs whatever a file names. This interprets the few opcodes that
checkpoints use; classes and calls become inert `Name` and `Call` records.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from common.training.checkpoint_files import Refused


@dataclass(frozen=True)
class Name:
    """A global that a pickle refers to: a class, a function or a torch.dtype."""

    module: str
    name: str


@dataclass(eq=False)
class Call:
    """A call that was not made, and the state that the pickle sets on its result."""

    of: Name
    arguments: tuple
    state: Any = None


@dataclass(frozen=True)
class Persistent:
    """A reference to something outside the pickle: the storage of a tensor."""

    reference: tuple


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


def loads(data: bytes, names: Container[tuple[str, str]] = ()) -> Any:
    """The value of a pickle. names: the (module, name) pairs it may refer to.

    Refused: an unknown opcode or name, or a damaged pickle.
    """
    try:
        return _Machine(names).run(data)
    except Refused:
        raise
    except Exception as error:  # stack underflow, unhashable key, truncated argument, ...
        raise Refused(f"damaged pickle ({type(error).__name__})") from error


class _Machine:
    def __init__(self, names: Container[tuple[str, str]]):
        self.names = names
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                (value,) = self.stack
                return value
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _TUPLES:
                self.stack[-_TUPLES[name] :] = [tuple(self.top(_TUPLES[name]))]
            elif name in ("PROTO", "FRAME"):
                pass
            elif (step := getattr(self, f"do_{name.lower()}", None)) is not None:
                step(argument)
            else:
                raise Refused(f"it has the opcode {name}, which is no part of a checkpoint")
        raise Refused("damaged pickle")

    def top(self, count: int) -> list[Any]:
        """The topmost values. They stay on the stack: the caller replaces them."""
        values = self.stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise Refused("damaged pickle")
        return values

    def to_mark(self) -> list[Any]:
        """Remove and return the values above the last mark, and the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise Refused("damaged pickle")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    # ---- opcodes --------------------------------------------------------------------------------------------

    def do_mark(self, _) -> None:
        self.stack.append(_MARK)

    def do_tuple(self, _) -> None:
        self.stack.append(tuple(self.to_mark()))

    def do_memoize(self, _) -> None:
        self.memo[len(self.memo)] = self.top(1)[0]

    def do_binput(self, index: int) -> None:
        self.memo[index] = self.top(1)[0]

    do_long_binput = do_binput

    def do_binget(self, index: int) -> None:
        self.stack.append(self.memo[index])

    do_long_binget = do_binget

    def do_append(self, _) -> None:
        target, value = self.top(2)
        self.stack.pop()
        self.extend(target, [value])

    def do_appends(self, _) -> None:
        values = self.to_mark()
        self.extend(self.top(1)[0], values)

    def do_setitem(self, _) -> None:
        target, key, value = self.top(3)
        del self.stack[-2:]
        self.update(target, [key, value])

    def do_setitems(self, _) -> None:
        values = self.to_mark()
        self.update(self.top(1)[0], values)

    def do_global(self, argument: str) -> None:
        self.refer(*argument.split(" ", 1))

    def do_stack_global(self, _) -> None:
        module, name = self.top(2)
        del self.stack[-2:]
        self.refer(module, name)

    def do_reduce(self, _) -> None:
        called, arguments = self.top(2)
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise Refused("it calls something that it does not name")
        self.stack[-2:] = [Call(called, arguments)]

    do_newobj = do_reduce

    def do_build(self, _) -> None:
        target, state = self.top(2)
        if not isinstance(target, Call):
            raise Refused("it sets attributes of something that is no instance")
        self.stack.pop()
        target.state = state

    def do_binpersid(self, _) -> None:
        (reference,) = self.top(1)
        if not isinstance(reference, tuple):
            raise Refused("damaged pickle")
        self.stack[-1] = Persistent(reference)

    # ---- helpers --------------------------------------------------------------------------------------------

    def refer(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Refused("it has a name that is no text")
        if (module, name) not in self.names:
            where = f"{module}.{name}"[:100]
            raise Refused(f"it names {where}, which is no part of a checkpoint and may run code")
        self.stack.append(Name(module, name))

    @staticmethod
    def extend(target: Any, values: list[Any]) -> None:
        if type(target) is not list:
            raise Refused("it appends to something that is no list")
        target.extend(values)

    @staticmethod
    def update(target: Any, values: list[Any]) -> None:
        if type(target) is not dict:
            raise Refused("it sets items of something that is no dict")
        # Hashing a deeply nested tuple would overflow the interpreter's stack.
        if not all(isinstance(key, str | int | Call) for key in values[::2]):
            raise Refused("it has a key that is neither a text nor a number")
        target.update(zip(values[::2], values[1::2], strict=True))
