"""The stand-in's functions beside the binary's, by the signatures that pybind writes into docstrings."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

from tests.te_on_cpu import attention, casts, kernels, names, operands, scaling

# What pybind calls a parameter that its author gave no name.
NUMBERED = re.compile(r"arg\d+")


def stand_ins() -> dict[str, object]:
    """Everything that the stand-in defines, by its name in `transformer_engine_torch`."""
    found = {
        name: getattr(part, name) for part in (attention, casts, kernels, operands, scaling) for name in part.__all__
    }
    of_names = vars(names).items()
    return found | {
        name: value
        for name, value in of_names
        if getattr(value, "__module__", None) == names.__name__ and not name.startswith("_") and name != "Enumeration"
    }


def parameters(docstring: str) -> dict[str, bool]:
    """Of a pybind signature: {name, or arg0, ...: whether it has a default}, in order."""
    text = docstring.partition("(")[2].rpartition(" -> ")[0].removesuffix(")")
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts = [part.strip() for part in (*parts, text[start:]) if part.strip() not in ("", "*")]
    return {part.partition(":")[0]: " = " in part for part in parts}


def differences(theirs: ModuleType) -> list[str]:
    """What of the stand-in is not as in the binary, a line each."""
    found = []
    for name, ours in stand_ins().items():
        real = getattr(theirs, name, None)
        if real is None:
            found.append(f"{name}: not in the binary")
        elif members := getattr(ours, "__members__", None):
            values = {key: int(value) for key, value in real.__members__.items()}
            wrong = {key: int(value) for key, value in members.items() if values.get(key) != value}
            found += [f"{name}: {wrong}, in the binary {values}"] if wrong else []
        else:
            found += [f"{name}: {what}" for what in _of_arguments(ours, parameters(real.__doc__.splitlines()[0]))]
    return found


def _of_arguments(ours, theirs: dict[str, bool]) -> list[str]:
    """Names count where the stand-in can be called by them, and the binary has any."""
    kinds = inspect.signature(ours).parameters
    if any(of.kind is of.VAR_POSITIONAL for of in kinds.values()):
        return []  # takes anything, and says that there is nothing
    if len(kinds) != len(theirs):
        return [f"takes {list(kinds)}, the binary {list(theirs)}"]
    found = []
    for (name, of), (real, optional) in zip(kinds.items(), theirs.items(), strict=True):
        if of.kind is not of.POSITIONAL_ONLY and not NUMBERED.fullmatch(real) and name != real:
            found.append(f"{name} is {real} in the binary")
        if optional != (of.default is not of.empty):
            found.append(f"{name} may {'' if optional else 'not '}be left out in the binary")
    return found
