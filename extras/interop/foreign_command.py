"""A command of another program: its words (flags and values, hydra's keys, a shell's) and its translation."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from common.cli import one_line
from extras.interop.flag_tables import RECIPE, RECIPE_OBJECTS, Ours


@dataclass
class Translation:
    """A command as it is written here, and what differs, a line each."""

    before: list[str] = field(default_factory=list)  # srun and its options, variables of the environment
    launcher: list[str] = field(default_factory=list)
    script: str = ""
    config: str = ""  # a file of flags
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        """The arguments of the script."""
        return [*([self.config] if self.config else []), *self.flags]

    def __str__(self) -> str:
        command = shown([*self.before, *self.launcher, self.script, *self.argv])
        # A note quotes the command: one line each, or a shell would run the next.
        return "\n".join([command, *(f"# {one_line(ValueError(note))}" for note in self.notes)])


def of_recipe(word: str) -> tuple[str, str, str] | None:
    """(key, field of an object or "", value) of a word such as fp8_config.enabled=true; None if it is no such word."""
    name, equals, value = word.lstrip("+~").partition("=")
    value = value[1:-1] if re.fullmatch(r"(['\"]).*\1", value) else value
    if not equals or name.startswith("-"):
        return None
    if name in RECIPE:
        return name, "", value
    for group in RECIPE_OBJECTS:
        if re.match(rf"{re.escape(group)}\.\w", name):
            return group, name.removeprefix(f"{group}."), value
    return None


def entry_of(group: str, entries: dict[str, str]) -> str:
    """The value of the flag for an object of the recipe."""
    if group == "config_kwargs":
        return ",".join(f"{name}={value}" for name, value in entries.items())
    return json.dumps({name: _scalar(value) for name, value in entries.items()})


def _scalar(value: str) -> Any:
    try:
        return json.loads(value.lower() if value.lower() in ("true", "false", "null") else value)
    except ValueError:
        return value


def shown(words: Iterable[str]) -> str:
    """Words as a shell reads them. `$NAME` and `${NAME}` stay variables, anything else is data."""
    with_variables = r"(?=.*\$)([\w@%+=:,./ -]|\$\w+|\$\{\w+\})+"
    return " ".join(f'"{word}"' if re.fullmatch(with_variables, word) else shlex.quote(word) for word in words)


def pairs(words: list[str]) -> Iterable[tuple[str, str | None]]:
    """(word, its value) of words such as --a=1, --a 1, --a; a word that belongs to no flag comes alone."""
    index = 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        index += 1
        if not name.startswith("-"):
            yield f"{name}{equals}{value}", None
        elif equals:
            yield name, value
        elif index < len(words) and not re.match(r"-(?!\d)", words[index]) and not of_recipe(words[index]):
            yield name, words[index]
            index += 1
        else:
            yield name, None


def note_of(theirs: str, ours: Ours, words: list[str]) -> str:
    """The line of a flag that was translated."""
    if not words:
        return f"{theirs}: {ours.why or 'as by default here'}"
    return f"{theirs}: {shown(words)}" + (f" ({ours.why})" if ours.why else "")
