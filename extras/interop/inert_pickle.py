"""Unpickle plain values only: nothing is imported and nothing is called.

torch.save pickles, and `pickle` runs whatever a file names. This interprets the few opcodes that
checkpoints use; classes and calls become inert `Name` and `Call` records.
"""

from __future__ import annotations

import pickletools
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from common.checkpoint.metadata import Refused


@dataclass(frozen=True)
class Name:
    """A global that a pickle refers to: a class, a function or a torch.dtype."""

    module: str
    name: str


@dataclass(eq=False)
class Call:
    """A call that was not made, and what the pickle sets on its result: state, and items of an OrderedDict."""

    of: Name
    arguments: tuple
    state: Any = None
    items: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Persistent:
    """A reference to something outside the pickle: the storage of a tensor."""

    reference: tuple


_MARK = object()
ORDERED = Name("collections", "OrderedDict")


def loads(data: bytes, names: Container[tuple[str, str]] = ()) -> Any:
    """The value of a pickle. names: the (module, name) pairs it may refer to.

    Refused: an unknown opcode or name, or a damaged pickle.
    """
    try:
        machine = _Machine(names)
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            machine.step(opcode.name, argument)
        (value,) = machine.stack
        return value
    except Refused:
        raise
    except Exception as error:  # stack underflow, unhashable key, truncated argument, ...
        raise Refused(f"damaged pickle ({type(error).__name__})") from error


class _Machine:
    def __init__(self, names: Container[tuple[str, str]]):
        self.names = names
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: str, argument: Any) -> None:
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                self.stack.append(argument)
            case "NONE":
                self.stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                self.stack.append(opcode == "NEWTRUE")
            case "EMPTY_DICT":
                self.stack.append({})
            case "EMPTY_LIST":
                self.stack.append([])
            case "EMPTY_TUPLE":
                self.stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.stack.append(tuple(self.pop(int(opcode[-1]))))
            case "TUPLE":
                self.stack.append(tuple(self.pop_to_mark()))
            case "MARK":
                self.stack.append(_MARK)
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top()
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.top()
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "APPEND":
                self.extend(self.pop(1))
            case "APPENDS":
                self.extend(self.pop_to_mark())
            case "SETITEM":
                self.update(self.pop(2))
            case "SETITEMS":
                self.update(self.pop_to_mark())
            case "GLOBAL":
                self.refer(*argument.split(" ", 1))
            case "STACK_GLOBAL":
                self.refer(*self.pop(2))
            case "REDUCE" | "NEWOBJ":
                self.call(*self.pop(2))
            case "BUILD":
                self.set_state(*self.pop(1))
            case "BINPERSID":
                self.persist(*self.pop(1))
            case _:
                raise Refused(f"it has the opcode {opcode}, which is no part of a checkpoint")

    def top(self) -> Any:
        if self.stack[-1] is _MARK:
            raise Refused("damaged pickle")
        return self.stack[-1]

    def pop(self, count: int) -> list[Any]:
        """Remove and return the topmost values."""
        values = self.stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise Refused("damaged pickle")
        del self.stack[-count:]
        return values

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the values above the last mark, and the mark."""
        mark = len(self.stack) - 1
        while self.stack[mark] is not _MARK:
            mark -= 1
            if mark < 0:
                raise Refused("damaged pickle")
        values = self.stack[mark + 1 :]
        del self.stack[mark:]
        return values

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise Refused("it appends to something that is no list")
        target.extend(values)

    def update(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, Call) and target.of == ORDERED:
            target = target.items
        if type(target) is not dict:
            raise Refused("it sets items of something that is no dict")
        # Hashing a deeply nested tuple would overflow the interpreter's stack.
        if not all(isinstance(key, str | int | Call) for key in values[::2]):
            raise Refused("it has a key that is neither a text nor a number")
        target.update(zip(values[::2], values[1::2], strict=True))

    def refer(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Refused("it has a name that is no text")
        if (module, name) not in self.names:
            where = f"{module}.{name}"[:100]
            raise Refused(f"it names {where}, which is no part of a checkpoint and may run code")
        self.stack.append(Name(module, name))

    def call(self, called: Any, arguments: Any) -> None:
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise Refused("it calls something that it does not name")
        self.stack.append(Call(called, arguments))

    def set_state(self, state: Any) -> None:
        target = self.top()
        if not isinstance(target, Call):
            raise Refused("it sets attributes of something that is no instance")
        target.state = state

    def persist(self, reference: Any) -> None:
        if not isinstance(reference, tuple):
            raise Refused("damaged pickle")
        self.stack.append(Persistent(reference))
