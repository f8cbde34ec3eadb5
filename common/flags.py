"""Flags of the scripts: dataclasses, nested by concern, parsed from a flat command line and a YAML or JSON file."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar

import yaml

from common.cli import UserError, is_first_on_node, one_line
from common.cli_help import LEVELS, FlagSpec, did_you_mean, help_text

T = TypeVar("T")
Choices = Iterable[str] | Callable[[], Iterable[str]]


def flag(default, text: str | Callable[[], str], *aliases: str, choices: Choices = ()):
    """A field of a dataclass of flags: its default, its line of help, and other names of it on a command line.

    choices: all values but None that it may have once `Flags.resolve` is done; empty: any. A function of them, and of
    the help, where extras name them.
    """
    names = [f"--{name}" for name in aliases]
    choices = choices if callable(choices) else tuple(choices)
    return field(default=default, metadata={"help": text, "aliases": names, "choices": choices})


class Missing(NamedTuple):
    """A required flag that was not given. For the error line: what it is for, and an example value."""

    flag: str
    what: str
    example: str = ""


class Flags:
    """Base of the dataclasses of flags: one per concern, each next to the code that reads it.

    A script's dataclass may nest others (`data: DataFlags = field(default_factory=DataFlags)`); the command line and
    files of flags stay flat. `parse_arguments` calls `resolve`, which fills in defaults that depend on other flags,
    then looks at the choices, then calls `missing` and `check` of every class: nothing is written to flags after that.
    A class that extends another one's flags does not call the `missing` and `check` of its base: `checked` does.

    overrides: {flag: flags whose values from the file of flags it removes when given on the command line}.
    last_wins: flags of `overrides` that also replace those given before them on the command line.
    belongs_to: {flag: the one whose value it describes}: another value of that one, given later, removes it.
    changed: {flag: flag(...)} of flags of other groups that have another default, help, alias or choices here; an
    empty help keeps theirs, as no choices do. idle: {name: why it does nothing}, of names that are accepted for
    compatibility only.
    """

    overrides: ClassVar[dict[str, tuple[str, ...]]] = {}
    last_wins: ClassVar[tuple[str, ...]] = ()
    belongs_to: ClassVar[dict[str, str]] = {}
    changed: ClassVar[dict[str, Any]] = {}
    idle: ClassVar[dict[str, str]] = {}
    # For --help: the title of the class's flags, those every run needs, those that --help_all lists and --help does
    # not, and those that both only name. Last, keys of a file of flags that are no flags of a command line.
    group: ClassVar[str] = "options"
    required: ClassVar[tuple[str, ...]] = ()
    advanced: ClassVar[tuple[str, ...]] = ()
    unlisted: ClassVar[tuple[str, ...]] = ()
    file_only: ClassVar[tuple[str, ...]] = ()

    @property
    def optional(self) -> tuple[str, ...]:
        """Flags that are not missing after all, given the others (a dry run needs no data)."""
        return ()

    def resolve(self) -> Self:
        """A copy with the defaults filled in that depend on other flags."""
        return self

    def missing(self) -> Iterable[Missing]:
        """Flags that are required, given the others, and lacking. All of all groups make one error."""
        return ()

    def check(self) -> None:
        """UserError for values that are wrong or contradict each other."""

    def require_at_least(self, least: float, *names: str) -> None:
        """UserError for a flag below `least`; None means it was not given."""
        for name in names:
            if (value := getattr(self, name)) is not None and not value >= least:
                raise UserError(f"--{name} {value}: must be at least {least}")

    def require_above(self, least: float, *names: str) -> None:
        """UserError for a flag that is not above `least`; None means it was not given."""
        for name in names:
            if (value := getattr(self, name)) is not None and not value > least:
                raise UserError(f"--{name} {value}: must be above {least}")


def groups(args: Any) -> Iterator[Any]:
    """The dataclasses of flags that are nested in this one, then itself."""
    for each in fields(args):
        if isinstance(value := getattr(args, each.name), Flags):
            yield from groups(value)
    yield args


def flat(args: Any) -> dict[str, Any]:
    """{flag: value} of all groups, as checkpoints and trackers show them."""
    values: dict[str, Any] = {}
    for each in fields(args):
        value = getattr(args, each.name)
        values |= flat(value) if isinstance(value, Flags) else {each.name: value}
    return values


def with_flags(args: T, **values: Any) -> T:
    """A copy with these flags changed, whichever groups they belong to. Nothing is checked again."""
    if unknown := values.keys() - flat(args).keys():
        raise TypeError(f"unknown flags: {', '.join(sorted(unknown))}")
    return _replaced(args, values)


def _replaced(args: Any, values: dict[str, Any]) -> Any:
    changes = {}
    for each in fields(args):
        if isinstance(value := getattr(args, each.name), Flags):
            changes[each.name] = _replaced(value, values)
        elif each.name in values:
            changes[each.name] = values[each.name]
    return replace(args, **changes)


def checked(args: T) -> T:
    """The flags with all defaults resolved. UserError for what is missing, else for the first value that is wrong."""
    for spec in flag_specs(args := _resolved(args)):  # a specification's default is the value here
        if spec.choices and spec.default not in (None, *spec.choices):
            raise UserError(f"--{spec.name} {spec.default}: choose {', '.join(spec.choices)}")
    lacking: dict[str, Missing] = {}
    parts = [part for part in groups(args) if isinstance(part, Flags)]
    methods = [(part, vars(kind)) for part in parts for kind in reversed(type(part).__mro__)]
    optional = args.optional if isinstance(args, Flags) else ()
    for part, own in methods:
        for each in own["missing"](part) if "missing" in own else ():
            if each.flag not in optional:
                lacking.setdefault(each.flag, each)
    if lacking:
        named = ", ".join(f"{each.flag} ({each.what})" for each in lacking.values())
        examples = " ".join(f"{each.flag} {each.example}".strip() for each in lacking.values())
        raise UserError(f"missing: {named}: add, say, {examples}")
    for part, own in methods:
        if "check" in own:
            own["check"](part)
    return args


def _resolved(args: Any) -> Any:
    nested = {each.name: value for each in fields(args) if isinstance(value := getattr(args, each.name), Flags)}
    args = replace(args, **{name: _resolved(value) for name, value in nested.items()})
    return args.resolve() if isinstance(args, Flags) else args


def parse_arguments(
    description: str | None,
    flags: type[T] | T,
    argv: list[str] | None = None,
    elsewhere: Callable[[str], str] = lambda option: "",
    program: str | None = None,
) -> T:
    """Parse the command line into a dataclass of flags, given as its class or as an instance that has the defaults.

    A flag is a field's name: `--max_steps 5`, `--max-steps=5`, `--bf16`, `--bf16 False`, `--no_async_save` for one
    that is on. A first argument that ends in .json, .yaml or .yml is read as a file of flags; those after it win.
    UserError for unknown flags and values of the wrong type, naming the file if it is at fault.

    elsewhere: says what to give in place of an unknown word such as `--model` or `fp8_config.enabled=true`, or "";
    program: its name in help and errors. Default: that of the running script.
    """
    # What is imported by now stays for good. Kept out of garbage collection, it saves a tenth of step 0's time.
    gc.freeze()
    defaults = changed_defaults(flags() if isinstance(flags, type) else flags)
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(defaults, elsewhere, program)
    everything = "--help_all" in argv
    if everything or not {"-h", "--help"}.isdisjoint(argv):
        print(help_text(parser.prog, description, parser.specs, parser.idle, everything), end="")
        raise SystemExit(0)
    file, of_file = None, {}
    if argv and is_file_of_flags(argv[0]):
        file, *argv = argv
        of_file = parser.parse_file(file)
    flags_given = parser.split(argv, file)
    overrides, last_wins, belongs_to = {}, set(), {}
    for kind in (kind for part in groups(defaults) for kind in type(part).__mro__):
        overrides |= vars(kind).get("overrides", {})
        last_wins |= set(vars(kind).get("last_wins", ()))
        belongs_to |= vars(kind).get("belongs_to", {})
    final: list[tuple[str, list[str]]] = []
    for name, words in flags_given:
        described = tuple(each for each, of in belongs_to.items() if of == name)
        if name in of_file and parser.values(of_file[name]) != parser.values(words):
            of_file = {each: value for each, value in of_file.items() if each not in described}
        if any(each == name and parser.values(value) != parser.values(words) for each, value in final):
            final = _without(final, described, words)
        for each in (name, *overrides.get(name, ())):
            if of_file.pop(each, None) and each in parser.file_only and is_first_on_node():
                logging.getLogger(__name__).warning("%s replaces the %s of %s", " ".join(words), each, file)
        if name in last_wins:
            final = _without(final, overrides[name], words)
        final.append((name, words))
    values = parser.values([word for words in (*of_file.values(), *(words for _, words in final)) for word in words])
    for name in parser.idle.keys() & values.keys():
        why, value = parser.idle[name], values.pop(name)
        if os.environ.get("RANK", "0") == "0":
            logging.getLogger(__name__).info("--%s %s does nothing: %s", name, value, why)
    try:
        return checked(with_flags(defaults, **values))
    except ValueError as error:
        where = file if any(f"--{name}" in re.findall(r"--\w+", str(error)) for name in of_file) else None
        if where is None and isinstance(error, UserError):
            raise
        raise UserError(f"{where}: {one_line(error)}" if where else one_line(error)) from error


def changes(args: Any) -> dict[str, Any]:
    """{flag: field} of all flags whose default, help or aliases another group changes."""
    return {name: each for part in groups(args) for name, each in getattr(part, "changed", {}).items()}


def changed_defaults(args: T) -> T:
    """The flags with the defaults that `changed` gives them; those that do not exist here are skipped."""
    defaults = {name: each.default for name, each in changes(args).items() if name in flat(args)}
    return with_flags(args, **defaults)


def flag_specs(args: Any) -> list[FlagSpec]:
    """All flags of these groups, with the defaults that the instances have."""
    parts, changed = list(groups(args)), changes(args)
    kinds = [kind for part in parts for kind in type(part).__mro__]
    named = {level: {name for kind in kinds for name in vars(kind).get(level, ())} for level in LEVELS}
    specs = []
    for part in parts:
        for each in fields(part):
            if isinstance(value := getattr(part, each.name), Flags):
                continue
            metadata = each.metadata | (dict(changed[each.name].metadata) if each.name in changed else {})
            text = metadata.get("help") or each.metadata.get("help", "")
            text = text() if callable(text) else text
            choices = metadata.get("choices") or each.metadata.get("choices", ())
            choices = tuple(choices()) if callable(choices) else choices
            level = next((level for level, names in named.items() if each.name in names), "")
            annotations = ((kind, vars(kind).get("__annotations__", ())) for kind in reversed(type(part).__mro__))
            declares = (kind for kind, names in annotations if each.name in names)
            aliases = tuple(metadata.get("aliases", ()))
            group = getattr(next(declares), "group", "options")
            specs.append(FlagSpec(each.name, str(each.type), value, text, aliases, choices, group, level))
    return specs


class _Parser(argparse.ArgumentParser):
    """options: {word of a command line: flag}; idle: as `Flags.idle`; where: the file at fault, for error lines."""

    def __init__(self, defaults: Any, elsewhere: Callable[[str], str], program: str | None):
        super().__init__(program, allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        self.specs, self.where, self.elsewhere = flag_specs(defaults), "", elsewhere
        self.idle = {name: why for part in groups(defaults) for name, why in getattr(part, "idle", {}).items()}
        self.lists = {spec.name for spec in self.specs if "list" in spec.type}
        self.file_only = {spec.name for spec in self.specs if spec.level == "file_only"}
        self.options = {}
        for spec in self.specs:
            self._add(spec.name, spec.options, _converter(spec.type), spec.is_switch, spec.name in self.lists)
            if spec.is_switch and spec.default is True:
                off = [f"--no_{spec.name}", f"--no-{spec.name.replace('_', '-')}"]
                self.options |= dict.fromkeys(off, spec.name)
                self.add_argument(*off, dest=spec.name, action="store_false")
        for name in self.idle:
            self._add(name, [f"--{name}"], str, False, False)

    def _add(self, name: str, options: list[str], kind: Callable, is_switch: bool, is_list: bool) -> None:
        self.options |= dict.fromkeys(options, name)
        more: dict[str, Any] = {"nargs": "+"} if is_list else {"nargs": "?", "const": True} if is_switch else {}
        self.add_argument(*options, dest=name, type=kind, **more)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.where}{message} (see {self.prog} --help)")

    def values(self, words: list[str]) -> dict[str, Any]:
        """{flag: value}. UserError for unknown flags."""
        namespace, unknown = self.parse_known_args(words)
        if unknown and is_file_of_flags(unknown[0]):
            self.error(f"{unknown[0]}: a file of flags comes first, flags after it")
        if unknown:
            self.error(self._unknown(unknown, [w for w, name in self.options.items() if name not in self.file_only]))
        return vars(namespace)

    def split(self, argv: list[str], file: str | None) -> list[tuple[str, list[str]]]:
        """A command line as (flag, the words that give it), in order. file: the file of flags before it.

        UserError for a key of a file of flags.
        """
        self.values(argv)  # unknown flags are errors before anything else
        parts: list[tuple[str, list[str]]] = []
        for word in argv:
            name = self.options.get(word.partition("=")[0])
            if name or not parts:
                parts.append((name or "", []))
            parts[-1][1].append(word)
        for name, words in parts:
            if name in self.file_only:
                value = self.values(words)[name]
                line = f"`{name}: {str(value).lower() if isinstance(value, bool) else value}`"
                where = f"{file} or a copy of it" if file else f"FILE.yaml and give that first: {self.prog} FILE.yaml"
                raise UserError(f"--{name} is a key of a file of flags: write {line} into {where}")
        return parts

    def parse_file(self, name: str) -> dict[str, list[str]]:
        """{flag: the words that give it} of a file, so that types and names are checked alike. null: the default."""
        self.where = f"{name}: "
        words = {}
        for key, value in read_file_of_flags(name).items():
            if (dest := self.options.get(f"--{key}")) is None:
                self.error(self._unknown([f"--{key}"], self.options))
            is_list = isinstance(value, list) and dest in self.lists
            if any(isinstance(each, dict | list) for each in (value if is_list else [value])):
                kind = "an object" if isinstance(value, dict) else "a list"  # which may be nested too deeply to print
                raise UserError(f"{name}: {key}: expected one value, not {kind}")
            if value is not None:
                words[dest] = [f"--{key}", *map(str, value)] if isinstance(value, list) else [f"--{key}={value}"]
                self.values(words[dest])  # a value of the wrong type is an error of this file
        self.where = ""
        return words

    def _unknown(self, words: list[str], options: Iterable[str]) -> str:
        """Unknown words, each with what to give in its place where that is known: one of `options`, say."""
        messages: list[str] = []
        for word in words:
            hint = self.elsewhere(word) or (did_you_mean(word, options) if word.startswith("--") else "")
            if messages and not hint and not word.startswith("--"):  # the value of an unknown flag
                flag, colon, its_hint = messages[-1].partition(": ")
                messages[-1] = f"{flag} {word}{colon}{its_hint}"
            else:
                messages.append(word + (f": {hint}" if hint else ""))
        return f"unknown flag {'; '.join(messages)}"


def _converter(annotation: str) -> Callable[[str], Any]:
    kinds = {"bool": _boolean, "int": int, "float": float}
    kind: Callable[[str], Any] = next((kind for name, kind in kinds.items() if name in annotation), str)
    return (lambda text: _or_auto(kind, text)) if "Literal['auto']" in annotation else kind


def _or_auto(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return text if text == "auto" else kind(text)
    except (ValueError, argparse.ArgumentTypeError):
        what = "a number" if kind is int else "True or False"
        raise argparse.ArgumentTypeError(f"{text!r} is neither {what} nor auto") from None


def _boolean(text: str) -> bool:
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def is_file_of_flags(word: str) -> bool:
    """Whether a command line's word names a file of flags."""
    return word[:1] != "-" and word.endswith((".json", ".yaml", ".yml"))


def read_file_of_flags(name: str) -> dict[str, Any]:
    """{flag: value} of a YAML or JSON file; UserError where it is none."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{path}: no such file of flags")
    try:
        text = path.read_text(encoding="utf-8")
        flags = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"{path}: cannot be read: nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(flags, dict):
        raise UserError(f"{path}: expected names of flags and their values")
    return flags


def _without(
    given: list[tuple[str, list[str]]], replaced: tuple[str, ...], by: list[str]
) -> list[tuple[str, list[str]]]:
    """The flags given so far except those that `by`, a later one, replaces; logs which."""
    dropped = " ".join(word for name, words in given if name in replaced for word in words)
    if dropped and is_first_on_node():
        logging.getLogger(__name__).info("%s replaces what was given before it: %s", " ".join(by), dropped)
    return [(name, words) for name, words in given if name not in replaced]
