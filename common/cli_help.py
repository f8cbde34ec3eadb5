"""The text of --help: flags in groups, required ones first, with their defaults; advanced ones with --help_all.

And the guess at what a misspelt flag may mean.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

COMMAND = re.compile(r"\s*(python|torchrun) ")
CLOSE = 0.8  # difflib's ratio: --learing_rate is close to --learning_rate (0.96), --use_fsdp not to --use_cpu (0.67)
NAMES = 30  # columns before the text of a flag
LEAST = 30  # columns of that text: a narrower terminal has it below the flag
REQUIRED = "needed"
ORDER = (
    REQUIRED,
    "model",
    "data",
    "batches",
    "optimiser",
    "precision",
    "training and evaluation",
    "checkpoints",
    "logging",
)


# Of a flag, see common.flags.Flags; the first that names it counts. Neither `unlisted` nor `file_only` has a line.
LEVELS = ("file_only", "unlisted", "required", "advanced")


class FlagSpec(NamedTuple):
    """A flag as the command line, --help and docs/flags.md show it. type: its annotation."""

    name: str
    type: str
    default: Any
    help: str
    aliases: tuple[str, ...]
    choices: tuple[str, ...]  # empty: any value
    group: str
    level: str  # one of LEVELS, or empty

    @property
    def is_switch(self) -> bool:
        """Whether its bare name means True."""
        return "bool" in self.type

    @property
    def options(self) -> list[str]:
        """Its names on a command line, without those that switch it off."""
        names = [f"--{self.name}", *self.aliases]
        return [*names, *(f"--{name[2:].replace('_', '-')}" for name in names if "_" in name)]


def help_text(
    program: str, description: str | None, specs: Iterable[FlagSpec], idle: dict[str, str], all_: bool
) -> str:
    """For a terminal as wide as this one, 100 columns at most.

    idle: {name accepted for compatibility: why it does nothing}; all_: of --help_all.
    """
    from common.console import columns

    width = max(LEAST + 6, columns())
    groups: dict[str, list[str]] = {}
    unlisted, file_only, hidden = [], [], 0
    for spec in specs:
        if spec.level == "unlisted":
            unlisted.append(f"--{spec.name}")
        elif spec.level == "file_only":
            file_only.append(spec.name)
        if spec.level in ("unlisted", "file_only") or (spec.level == "advanced" and not all_):
            hidden += 1
            continue
        group = REQUIRED if spec.level == "required" else spec.group
        groups.setdefault(group, []).extend(_lines(spec, width))
    lines = [f"usage: {program} [FILE.yaml] [--FLAG VALUE ...]", ""]
    for paragraph in re.split(r"\n{2,}", (description or "").strip()):
        lines += [*_filled(paragraph.splitlines(), width), ""]
    lines.pop()
    for group in sorted(groups, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        lines += ["", f"{group}:", *groups[group]]
    lines += ["", *textwrap.wrap("A file of flags, YAML or JSON, may come first; flags after it win.", width)]
    if all_ and unlisted:
        lines += textwrap.wrap(f"Rarely of use, see docs/flags.md: {', '.join(unlisted)}.", width)
    if all_ and file_only:
        names = ", ".join(file_only)
        lines += textwrap.wrap(f"Keys of a file of flags alone, see docs/flags.md: {names}.", width)
    if all_ and idle:
        names = ", ".join(f"--{name}" for name in idle)
        lines += textwrap.wrap(f"Accepted for compatibility, without effect: {names}.", width)
    if hidden and not all_:
        lines.append(f"--help_all: {hidden} more flags, which few runs need.")
    return "\n".join(lines) + "\n"


def _filled(lines: list[str], width: int) -> Iterator[str]:
    """A paragraph: prose is filled; a command continues on the next line after a backslash, its comment goes first."""
    if all(len(line) <= width for line in lines):
        yield from lines
        return
    if not COMMAND.match(lines[0]):
        yield from textwrap.wrap(" ".join(lines), width)
        return
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        command, *comment = re.split(r"\s{3,}", line.strip(), maxsplit=1)
        if len(line) <= width:
            yield line
            continue
        if comment:
            yield from textwrap.wrap(comment[0], width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        parts = textwrap.wrap(
            re.sub(r"(--\w+) (?!-)", "\\1\0", command),  # a flag keeps its value
            width - 2,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from " \\\n".join(parts).replace("\0", " ").splitlines()


def _lines(spec: FlagSpec, width: int) -> Iterator[str]:
    names, text = [f"--{spec.name}", *spec.aliases], spec.help
    value = f" {{{','.join(spec.choices)}}}" if spec.choices else _value(spec.type)
    if spec.default is True and not value:  # only switching it off makes sense
        on, _, off = text.partition("; False: ")
        text = off[:1].upper() + off[1:] if off else f"Switches off what is on: {on[:1].lower()}{on[1:]}"
        names = [f"--no_{spec.name}"]
    elif "efault" not in text and (default := _default(spec.default)):
        text = f"{text if text.endswith('...') else text.removesuffix('.')} [{default}]"
    head = f"  {', '.join(names)}{value}"
    begin = NAMES if width - NAMES >= LEAST else 6
    body = textwrap.wrap(text, width - begin, break_on_hyphens=False) or [""]
    if len(head) < begin:
        head, body = f"{head:<{NAMES}}{body[0]}", body[1:]
    while len(head) > width and "," in head[:width]:  # many choices
        cut = head.rindex(",", 0, width) + 1
        yield head[:cut]
        head = f"      {head[cut:]}"
    yield head.rstrip()
    yield from (" " * begin + line for line in body)


def _value(annotation: str) -> str:
    """The placeholder of a flag's value."""
    if "bool" in annotation and "None" not in annotation:
        return ""
    for name, shown in (("bool", "[BOOL]"), ("list", "TEXT ..."), ("int", "N"), ("float", "X")):
        if name in annotation:
            return f" {shown}"
    return " TEXT"


def _default(value: Any) -> str:
    if value is None or value is False or value in ("", []):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A question that names the option that an abbreviated or misspelt one may mean; empty if none is close."""
    name, options = word.partition("=")[0], list(options)
    near = [option for option in options if len(name) > 3 and option.startswith(name)]
    if not near:  # without the dashes, which make all alike
        names = [option[2:] for option in options]
        near = [f"--{each}" for each in difflib.get_close_matches(name[2:], names, n=1, cutoff=CLOSE)]
    return f"did you mean {near[0]}?" if near else ""
