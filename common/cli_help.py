"""The text of --help: flags in groups, needed ones first, with what they are by default; rare ones with --help_all."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields

NAMES = 30  # columns before the text of a flag
NEEDED = "needed"
ORDER = (
    NEEDED,
    "model",
    "data",
    "batches",
    "optimiser",
    "precision",
    "training and evaluation",
    "checkpoints",
    "logging",
)


def help_text(program: str, description: str | None, kinds: tuple[type, ...], everything: bool) -> str:
    """For a terminal as wide as this one, 100 columns at most.

    kinds: dataclasses of flags (common.cli.Flags). Each class says which `group` its flags belong to, which of them
    are `needed` and which are `rarely` asked for.
    """
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    groups: dict[str, list[str]] = {}
    hidden = 0
    for kind in kinds:
        needed, rarely = (_said(kind, name) for name in ("needed", "rarely"))
        for field in fields(kind):
            if field.name in rarely and not everything:
                hidden += 1
                continue
            group = NEEDED if field.name in needed else _declared_in(kind, field.name)
            groups.setdefault(group, []).extend(_lines(field, width))
    lines = [f"usage: {program} [FILE.yaml] [--FLAG VALUE ...]", ""]
    for line in (description or "").strip().splitlines():
        lines += textwrap.wrap(line, width) if len(line) > width else [line]
    for group in sorted(groups, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        lines += ["", f"{group}:", *groups[group]]
    lines += ["", "A file of flags, YAML or JSON, may come first; flags after it win."]
    if hidden:
        lines.append(f"--help_all: {hidden} more flags, which few runs need.")
    return "\n".join(lines) + "\n"


def _said(kind: type, name: str) -> set[str]:
    """What all classes of a kind say by that name."""
    return {each for base in kind.__mro__ for each in vars(base).get(name, ())}


def _declared_in(kind: type, name: str) -> str:
    """The group of the class that has the flag first; others give it another default."""
    owner = next(base for base in reversed(kind.__mro__) if name in vars(base).get("__annotations__", {}))
    return getattr(owner, "group", "options")


def _lines(field: Field, width: int) -> Iterator[str]:
    names = [f"--{field.name}", *field.metadata.get("aliases", ())]
    text = field.metadata.get("help", "").replace("%%", "%")
    value = _value(str(field.type))
    if field.default is True and not value:
        # It is so already: what one can say is that it is not to be.
        does, _, without = text.partition("; False: ")
        text = (
            without[:1].upper() + without[1:] if without else f"Switches off what is on: {does[:1].lower()}{does[1:]}"
        )
        names = [f"--no_{field.name}"]
    elif "efault" not in text and (shown := _default(field)):
        text = f"{text if text.endswith('...') else text.removesuffix('.')} [{shown}]"
    head = f"  {', '.join(names)}{value}"
    body = textwrap.wrap(text, width - NAMES) or [""]
    if len(head) < NAMES:
        head, body = f"{head:<{NAMES}}{body[0]}", body[1:]
    yield head.rstrip()
    yield from (" " * NAMES + line for line in body)


def _value(kind: str) -> str:
    if "bool" in kind and "None" not in kind:
        return ""
    for name, shown in (("bool", "[BOOL]"), ("list", "TEXT ..."), ("int", "N"), ("float", "X")):
        if name in kind:
            return f" {shown}"
    return " TEXT"


def _default(field: Field) -> str:
    if field.default is MISSING or field.default is None or field.default is False or field.default == "":
        return ""
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
