"""How every script starts and fails: log format, one-line errors with exit status 2, flags parsed into dataclasses."""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from pathlib import Path
from typing import ClassVar, NamedTuple

import yaml

from common.cli_help import help_text

MACHINE_FAULT = 1
BAD_INPUT = 2  # exit status for anything the user can mend; tracebacks (status 1) are for our bugs
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MAKE_ROOM = "make room, or choose another --output_dir"
INTERRUPTED = 130  # Ctrl-C, as shells have it
TOLD_TO_STOP = 143  # SIGTERM, likewise
LAUNCHER_SPEAKS = "LAUNCHER_SPEAKS"  # in the environment: what started this rank prints its error line, after all else


class MachineFault(RuntimeError):
    """Something that is neither the user's fault nor ours, in one line. Status 1: what starts jobs again does so."""


class ToldToStop(KeyboardInterrupt):
    """SIGTERM, where it is to end a script as Ctrl-C would."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, line or record), what to do."""


def one_line(error: BaseException) -> str:
    """What an exception says, for the middle of a line: it may quote a file, and nothing of one rules a terminal."""
    said = "".join(character if character.isprintable() else "?" for character in " ".join(str(error).split()))
    return said or type(error).__name__


def flag(default, text: str, *aliases: str):
    """A field of a dataclass of flags: its default, its line of help, and other names of it on a command line."""
    metadata = {"help": text.replace("%", "%%")}  # argparse formats it with %
    if aliases:
        metadata["aliases"] = [f"--{name}" for name in aliases]
    return field(default=default, metadata=metadata)


class Missing(NamedTuple):
    """A flag that is needed and was not given. For the error line: what it is for, and a value to copy."""

    flag: str
    what: str
    example: str = ""


class Flags:
    """Base of the dataclasses of flags, one a concern, each beside the code that reads it.

    A script's own dataclass inherits from those it needs, and its one instance is handed to all of them. Each class
    tells what it lacks in a method `missing` (an iterable of Missing): all of it, of all classes, is one error. Then
    it looks at what it declares in a method `check`, which raises UserError; nothing is written after that.

    instead_of: {flag: those it stands in the place of}. Given on a command line, it puts away what a file of flags
    says of them. last_wins: flags of `instead_of` that also replace what was given before them on the command line.
    does_without: flags that are not missing after all, for what is asked for (a dry run, say).
    """

    instead_of: ClassVar[dict[str, tuple[str, ...]]] = {}
    last_wins: ClassVar[tuple[str, ...]] = ()
    # For --help: what a class' flags are about, those that every run needs, and those that few runs ask for.
    group: ClassVar[str] = "options"
    needed: ClassVar[tuple[str, ...]] = ()
    rarely: ClassVar[tuple[str, ...]] = ()

    @property
    def does_without(self) -> tuple[str, ...]:
        return ()

    def __post_init__(self) -> None:
        kinds = list(reversed(type(self).__mro__))
        lacking = [each for kind in kinds if "missing" in vars(kind) for each in kind.missing(self)]
        lacking = [each for each in lacking if each.flag not in self.does_without]
        if lacking:
            each_once: dict[str, Missing] = {}
            for each in lacking:
                each_once.setdefault(each.flag, each)
            named = ", ".join(f"{each.flag} ({each.what})" for each in each_once.values())
            examples = " ".join(f"{each.flag} {each.example}".strip() for each in each_once.values())
            raise UserError(f"missing: {named}: add, say, {examples}")
        for kind in kinds:
            if "check" in vars(kind):
                kind.check(self)

    def require_at_least(self, least: float, *names: str) -> None:
        """UserError for a flag below `least`; None stands for one that is not given."""
        for name in names:
            if (value := getattr(self, name)) is not None and not value >= least:
                raise UserError(f"--{name} {value}: must be at least {least}")

    def require_above(self, least: float, *names: str) -> None:
        """UserError for a flag that is not above `least`; None stands for one that is not given."""
        for name in names:
            if (value := getattr(self, name)) is not None and not value > least:
                raise UserError(f"--{name} {value}: must be above {least}")

    def require_choice(self, name: str, choices: Iterable[str | None]) -> None:
        """UserError unless the flag is one of the choices."""
        if getattr(self, name) not in choices:
            raise UserError(f"--{name} {getattr(self, name)}: choose {', '.join(c for c in choices if c)}")


def setup_logging(level: int = logging.INFO) -> None:
    """Log lines in the guides' shape: `MM/DD/YYYY HH:MM:SS - INFO - message`, on standard error."""
    logging.basicConfig(
        level=level, format="%(asctime)s - %(levelname)s - %(message)s", datefmt="%m/%d/%Y %H:%M:%S", force=True
    )
    # A progress line for every request to the Hub is noise in a training log.
    for noisy in map(logging.getLogger, ("httpx", "filelock", "fsspec", "datasets", "matplotlib")):
        if noisy.level != logging.WARNING:  # to set it goes through all the loggers that there are
            noisy.setLevel(logging.WARNING)


def positional(description: str, usage: str, *counts: int) -> list[str]:
    """The words of a command line that has no flags, so many of them; what it is for, where --help is among them."""
    words = sys.argv[1:]
    if not {"-h", "--help"}.isdisjoint(words):
        print(f"usage: {usage}\n\n{description.strip()}")
        raise SystemExit(0)
    if len(words) not in counts:
        raise UserError(f"usage: {usage}")
    return words


def parse_arguments(description: str | None, *dataclass_types: type, argv: list[str] | None = None) -> tuple:
    """Parse the command line into one instance of each dataclass.

    Flags are the dataclasses' field names (`--bf16`, `--bf16 True` and `--no_...` as in transformers). A first
    argument that ends in .json, .yaml or .yml is read as a file of flags; those after it win. UserError for unknown
    flags and values of the wrong type, naming the file if they are its.
    """

    class Parser(_hf_argument_parser()):
        where = ""  # the file whose flags are looked at

        def error(self, message: str) -> None:
            raise UserError(f"{self.where}{message} (see {self.prog} --help)")

        def format_help(self) -> str:
            return help_text(self.prog, description, dataclass_types, everything=False)

    # What is imported by now stays for good: the garbage collector need not walk through it again and again, which is
    # a tenth of step 0's time.
    gc.freeze()
    parser = Parser(
        dataclass_types,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # A switch that may be left open (None) takes its bare name for True, as every other does.
    kinds = {field.name: str(field.type) for kind in dataclass_types for field in fields(kind)}
    for action in parser._actions:
        if {"bool", "None"} <= set(re.findall(r"\w+", kinds.get(action.dest, ""))):
            action.nargs, action.const = "?", True
    argv = sys.argv[1:] if argv is None else argv
    if "--help_all" in argv:
        print(help_text(parser.prog, description, dataclass_types, everything=True), end="")
        raise SystemExit(0)
    file, of_file = None, {}
    if argv and is_file_of_flags(argv[0]):
        file, *argv = argv
        parser.where = f"{file}: "
        of_file = _flags_of_file(file, parser)
        parser.where = ""
    _refuse_unknown(parser, argv)
    given: list[tuple[str, list[str]]] = []
    for name, words in _by_flag(parser, argv):
        for kind in (base for each in dataclass_types for base in each.__mro__):
            replaced = vars(kind).get("instead_of", {}).get(name, ())
            for each in (name, *replaced):
                of_file.pop(each, None)
            if name in vars(kind).get("last_wins", ()):
                given = _without(given, replaced, words)
        given.append((name, words))
    try:
        return parser.parse_args_into_dataclasses(
            [word for words in (*of_file.values(), *(words for _, words in given)) for word in words]
        )
    except ValueError as error:  # raised by a dataclass' own checks
        where = file if any(f"--{name}" in re.findall(r"--\w+", str(error)) for name in of_file) else None
        if where is None and isinstance(error, UserError):
            raise
        raise UserError(f"{where}: {one_line(error)}" if where else one_line(error)) from error


def _hf_argument_parser() -> type[argparse.ArgumentParser]:
    """transformers' HfArgumentParser, without the half second that importing transformers takes.

    Its module imports nothing of the package.
    """
    if "transformers" in sys.modules:
        from transformers import HfArgumentParser

        return HfArgumentParser
    package = importlib.util.find_spec("transformers")
    if package is None:
        raise UserError("transformers is not installed for this Python: ./install.sh, then . .venv/bin/activate")
    (place,) = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location("transformers_hf_argparser", Path(place) / "hf_argparser.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.HfArgumentParser


def is_file_of_flags(word: str) -> bool:
    """Whether a command line's word names a file of flags."""
    return word[:1] != "-" and word.endswith((".json", ".yaml", ".yml"))


def _flags_of_file(name: str, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """{flag: its part of a command line}, so that types and names are checked as there. A null is the default."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{path}: no such file of flags")
    try:
        text = path.read_text(encoding="utf-8")
        flags = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(flags, dict):
        raise UserError(f"{path}: expected names of flags and their values")
    words = {}
    for key, value in flags.items():
        if (action := parser._option_string_actions.get(f"--{key}")) is None:
            parser.error(_unknown(parser, [f"--{key}"]))
        if isinstance(value, dict) or (isinstance(value, list) and action.nargs != "+"):
            raise UserError(f"{path}: {key}: expected one value, not {value}")
        if value is not None:
            words[action.dest] = [f"--{key}", *map(str, value)] if isinstance(value, list) else [f"--{key}={value}"]
            parser.parse_known_args(words[action.dest])  # a value of the wrong type is an error of this file
    return words


def _refuse_unknown(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    unknown = parser.parse_known_args(argv)[1]
    if unknown and is_file_of_flags(unknown[0]):
        parser.error(f"{unknown[0]}: a file of flags comes first, flags after it")
    if unknown:
        parser.error(_unknown(parser, unknown))


def _unknown(parser: argparse.ArgumentParser, words: list[str]) -> str:
    word, flags = words[0].partition("=")[0], list(parser._option_string_actions)
    near = [flag for flag in flags if len(word) > 3 and flag.startswith(word)]  # cut short, as argparse would take it
    near = near or difflib.get_close_matches(word, flags, n=1)
    return f"unknown flag {' '.join(words)}" + (f": did you mean {near[0]}?" if near else "")


def _by_flag(parser: argparse.ArgumentParser, argv: list[str]) -> list[tuple[str, list[str]]]:
    """A command line as (name of a flag, the words that give it), in order."""
    parts: list[tuple[str, list[str]]] = []
    for word in argv:
        action = parser._option_string_actions.get(word.partition("=")[0])
        if action or not parts:
            parts.append((action.dest if action else "", []))
        parts[-1][1].append(word)
    return parts


def _without(
    given: list[tuple[str, list[str]]], replaced: tuple[str, ...], by: list[str]
) -> list[tuple[str, list[str]]]:
    """The flags given so far but those that `by`, a later one, replaces; a line in the log says which."""
    dropped = " ".join(word for name, words in given if name in replaced for word in words)
    if dropped and _speaks_for_the_node():
        logging.getLogger(__name__).info("%s replaces what was given before it: %s", " ".join(by), dropped)
    return [(name, words) for name, words in given if name not in replaced]


def _speaks_for_the_node() -> bool:
    """One line a node for what all its processes find wrong (torchrun starts each with the same command line)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(line: str, quiet: bool = False) -> None:
    """The line that a process ends with, unless `quiet`; always in the file from which torchrun makes its report.

    torchrun's last words are then this line. Otherwise they would be "To enable traceback see: ...".
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(report).write_text(json.dumps({"message": message}))
    if report and LAUNCHER_SPEAKS in os.environ:
        return
    if quiet:
        # torchrun ends all processes when the first has ended: let that not be one that says nothing.
        time.sleep(10)  # or until torchrun ends this one
    else:
        sys.stderr.write(f"{line}\n")


@contextmanager
def user_errors(where: str = "", quiet: bool = False):
    """Turn the errors a user causes (bad input, unwritable paths, full disks) into one line and status 2.

    where: names the process (the rank, say) in that line; quiet: another process prints the same line.
    """
    try:
        yield
    except (UserError, OSError) as error:
        if os.environ.get("TRACEBACK") or (isinstance(error, OSError) and error.errno is None):
            raise
        message = str(error)
        if isinstance(error, OSError):
            path = f"{error.filename}: " if error.filename else ""
            what_to_do = f": {MAKE_ROOM}" if error.errno in NO_ROOM else ""
            message = f"{path}{error.strerror}{what_to_do} (set TRACEBACK=1 for the full stack)"
        _say(f"error: {where}{message}", quiet)
        raise SystemExit(BAD_INPUT) from None
    except MachineFault as error:
        if os.environ.get("TRACEBACK"):
            raise
        _say(f"error: {where}{error}")
        raise SystemExit(MACHINE_FAULT) from None
    except KeyboardInterrupt as interrupt:
        told = isinstance(interrupt, ToldToStop)
        if not (quiet or where):  # Ctrl-C reaches all processes of a terminal: one says so
            sys.stderr.write("stopped as asked: the same command goes on from there\n" if told else "interrupted\n")
        raise SystemExit(TOLD_TO_STOP if told else INTERRUPTED) from None


def run(main: Callable[[], None], resumable: bool = False) -> None:
    """Entry point of the scripts: logging, then `main` with one-line errors.

    resumable: SIGTERM ends it as Ctrl-C does, with TOLD_TO_STOP. As the first process of a container it would be deaf.
    """
    setup_logging()
    if resumable:
        _listen_to_sigterm()
    with user_errors(quiet=not _speaks_for_the_node()):
        main()


def _listen_to_sigterm() -> None:
    process = os.getpid()

    def stop(number: int, frame) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:  # a worker, forked since: it ends as it would have
            os.kill(os.getpid(), signal.SIGTERM)
        raise ToldToStop

    def unraisable(unraised) -> None:
        if not isinstance(unraised.exc_value, ToldToStop):
            return sys.__unraisablehook__(unraised)
        # The signal came while a destructor or a weakref's callback ran, where Python drops exceptions: once more.
        signal.signal(signal.SIGTERM, stop)
        threading.Timer(0.05, os.kill, (process, signal.SIGTERM)).start()
        return None

    signal.signal(signal.SIGTERM, stop)
    sys.unraisablehook = unraisable
