"""How every script starts and fails: log format, one-line errors with exit status 2, flags parsed into dataclasses."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

BAD_INPUT = 2  # exit status for anything the user can mend; tracebacks (status 1) are for our bugs


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, line or record), what to do."""


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
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> None:
            self.exit(BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")

    parser = Parser(
        dataclass_types,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    argv = sys.argv[1:] if argv is None else argv
    try:
        if len(argv) == 1 and argv[0].endswith((".json", ".yaml", ".yml")):
            if not Path(argv[0]).is_file():
                raise UserError(f"{argv[0]}: no such file of flags")
            read = parser.parse_json_file if argv[0].endswith(".json") else parser.parse_yaml_file
            return read(argv[0], allow_extra_keys=False)
        return parser.parse_args_into_dataclasses(argv)
    except UserError:
        raise
    except ValueError as error:  # raised by a dataclass' own checks or by a file with unknown keys
        raise UserError(" ".join(str(error).split())) from error


@contextmanager
def user_errors(where: str = ""):
    """Turn the errors a user causes (bad input, unwritable paths, full disks) into one line and status 2.

    `where` names the process (the rank, say) in that line.
    """
    try:
        yield
    except UserError as error:
        sys.stderr.write(f"error: {where}{error}\n")
        raise SystemExit(BAD_INPUT) from None
    except OSError as error:
        if error.errno is None or os.environ.get("TRACEBACK"):
            raise
        path = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"error: {where}{path}{error.strerror} (set TRACEBACK=1 for the full stack)\n")
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


def run(main: Callable[[], None]) -> None:
    """Entry point of the scripts that run as one process: logging, then `main` with one-line errors."""
    setup_logging()
    with user_errors():
        main()
