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
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

import yaml

MACHINE_FAULT = 1
BAD_INPUT = 2  # exit status for anything the user can mend; tracebacks (status 1) are for our bugs
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MAKE_ROOM = "make room, or choose another --output_dir"
INTERRUPTED = 130  # Ctrl-C, as shells have it


class MachineFault(RuntimeError):
    """Something that is neither the user's fault nor ours, in one line. Status 1: what starts jobs again does so."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, line or record), what to do."""


def one_line(error: BaseException) -> str:
    """What an exception says, for the middle of a line: it may quote a file, and nothing of one rules a terminal."""
    said = "".join(character if character.isprintable() else "?" for character in " ".join(str(error).split()))
    return said or type(error).__name__


def flag(default, text: str):
    """A field of a dataclass of flags: its default and its line of help."""
    return field(default=default, metadata={"help": text.replace("%", "%%")})  # argparse formats it with %


class Flags:
    """Base of the dataclasses of flags, one a concern, each beside the code that reads it.

    A script's own dataclass inherits from those it needs, and its one instance is handed to all of them. Each class
    looks at what it declares in a method `check`, which raises UserError; nothing is written after that.
    """

    def __post_init__(self) -> None:
        for kind in reversed(type(self).__mro__):
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
    for noisy in ("httpx", "filelock", "fsspec", "datasets", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def parse_arguments(description: str | None, *dataclass_types: type, argv: list[str] | None = None) -> tuple:
    """Parse the command line into one instance of each dataclass.

    Flags are the dataclasses' field names (`--bf16`, `--bf16 True` and `--no_...` as in transformers). A single
    argument ending in .json, .yaml or .yml is read as a file of flags instead. Unknown flags and values of the
    wrong type end the program with one line and status 2.
    """

    class Parser(_hf_argument_parser()):
        def error(self, message: str) -> None:
            if not _speaks_for_the_node():
                _let_the_speaker_end()
                self.exit(BAD_INPUT)
            self.exit(BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")

    # What is imported by now stays for good: the garbage collector need not walk through it again and again, which is
    # a tenth of step 0's time.
    gc.freeze()
    parser = Parser(
        dataclass_types,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    argv = sys.argv[1:] if argv is None else argv
    try:
        if len(argv) == 1 and argv[0][:1] != "-" and argv[0].endswith((".json", ".yaml", ".yml")):
            argv = _flags_of_file(Path(argv[0]))
        unknown = parser.parse_known_args(argv)[1]
        if unknown:
            known = [option for action in parser._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            parser.error(f"unknown flag {' '.join(unknown)}" + (f": did you mean {near[0]}?" if near else ""))
        return parser.parse_args_into_dataclasses(argv)
    except UserError:
        raise
    except ValueError as error:  # raised by a dataclass' own checks
        raise UserError(one_line(error)) from error


def _hf_argument_parser() -> type[argparse.ArgumentParser]:
    """transformers' HfArgumentParser, without the half second that importing transformers takes.

    Its module imports nothing of the package.
    """
    if "transformers" in sys.modules:
        from transformers import HfArgumentParser

        return HfArgumentParser
    package = importlib.util.find_spec("transformers").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("transformers_hf_argparser", Path(package) / "hf_argparser.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.HfArgumentParser


def _flags_of_file(path: Path) -> list[str]:
    """The file's keys and values as a command line, so that types and names are checked as there."""
    if not path.is_file():
        raise UserError(f"{path}: no such file of flags")
    try:
        if path.suffix == ".json":
            flags = json.loads(path.read_text(encoding="utf-8"))
        else:
            flags = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(flags, dict):
        raise UserError(f"{path}: expected names of flags and their values")
    for name, value in flags.items():
        if isinstance(value, list | dict):
            raise UserError(f"{path}: {name}: expected one value, not {value}")
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def _speaks_for_the_node() -> bool:
    """One line a node for what all its processes find wrong (torchrun starts each with the same command line)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _let_the_speaker_end() -> None:
    """torchrun ends all processes when the first has ended: let that not be one that says nothing."""
    time.sleep(10)  # or until torchrun ends this one


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
        if quiet:
            _let_the_speaker_end()
        else:
            sys.stderr.write(f"error: {where}{message}\n")
        raise SystemExit(BAD_INPUT) from None
    except MachineFault as error:
        if os.environ.get("TRACEBACK"):
            raise
        sys.stderr.write(f"error: {where}{error}\n")
        raise SystemExit(MACHINE_FAULT) from None
    except KeyboardInterrupt:
        if not (quiet or where):  # Ctrl-C reaches all processes of a terminal: one says so
            sys.stderr.write("interrupted\n")
        raise SystemExit(INTERRUPTED) from None


def run(main: Callable[[], None]) -> None:
    """Entry point of the scripts: logging, then `main` with one-line errors."""
    setup_logging()
    with user_errors(quiet=not _speaks_for_the_node()):
        main()
