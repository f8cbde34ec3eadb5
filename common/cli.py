"""How every script starts and fails: log format, one-line errors with exit status 2, signals."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)
MACHINE_FAULT = 1
BAD_INPUT = 2  # exit status for anything the user can fix; tracebacks (status 1) are for our bugs
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: `ulimit -f`
MAKE_ROOM = "make room, or choose another --output_dir"
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")  # Docker's and Podman's, in a container
INTERRUPTED = 130  # Ctrl-C, as in shells
STOPPED_BY_SIGTERM = 143  # SIGTERM, likewise
LAUNCHER_SPEAKS = (
    "LAUNCHER_SPEAKS"  # in the environment: the process that prints this rank's error line, after all else
)
MEMORY = "MEMORY_CHECKPOINTS"  # in the environment: the launcher's memory for the states of its ranks


class MachineFault(RuntimeError):
    """Something that is neither the user's fault nor ours, in one line. Status 1: what starts jobs again does so."""


class StoppedBySignal(KeyboardInterrupt):
    """SIGTERM, where it is to end a script as Ctrl-C would."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, line or record), what to do."""


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, without unprintable characters: it may quote a file."""
    text = "".join(character if character.isprintable() else "?" for character in " ".join(str(error).split()))
    return text or type(error).__name__


def setup_logging(level: int = logging.INFO) -> None:
    """Log lines on standard error as in the guides: `MM/DD/YYYY HH:MM:SS - INFO - message`; shorter on a terminal."""
    logging.basicConfig(
        level=level, format="%(asctime)s - %(levelname)s - %(message)s", datefmt="%m/%d/%Y %H:%M:%S", force=True
    )
    if sys.stderr.isatty():
        from common.console import TerminalFormatter

        for handler in logging.getLogger().handlers:
            handler.setFormatter(TerminalFormatter())
    # A progress line for every request to the Hub is noise in a training log.
    for noisy in map(logging.getLogger, ("httpx", "filelock", "fsspec", "datasets", "matplotlib", "fontTools")):
        if noisy.level != logging.WARNING:  # setting it walks through all loggers
            noisy.setLevel(logging.WARNING)


@contextmanager
def log_every(what: str, every: float = 20.0) -> Iterator[None]:
    """Log "`what`: 20 s so far" every `every` seconds until the block ends."""
    done, started = threading.Event(), time.monotonic()

    def log() -> None:
        while not done.wait(every):
            logger.info("%s: %.0f s so far", what, time.monotonic() - started)

    thread = threading.Thread(target=log, name="log_every", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def is_first_on_node() -> bool:
    """Errors of the command line, which all ranks share, are printed once per node."""
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


def owner_of_denied(error: OSError) -> str:
    """The end of an error line for a denied file: its owner if that is another user, and how to run as that user in a
    container; else ""."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str | os.PathLike):
        return ""
    path, me = Path(error.filename).absolute(), os.geteuid()
    with suppress(OSError, StopIteration):
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if (owner := there.stat().st_uid) != me:
            reason = f"{there} belongs to user {owner}, and this is user {me}"
            if any(map(os.path.exists, CONTAINER_MARKS)):
                reason += ": add --user $(id -u):$(id -g) to docker run"
            return reason
    return ""


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
            what_to_do = MAKE_ROOM if error.errno in NO_ROOM else owner_of_denied(error)
            message = f"{path}{error.strerror}{what_to_do and f': {what_to_do}'} (set TRACEBACK=1 for the full stack)"
        _say(f"error: {where}{message}", quiet)
        raise SystemExit(BAD_INPUT) from None
    except MachineFault as error:
        if os.environ.get("TRACEBACK"):
            raise
        _say(f"error: {where}{error}")
        raise SystemExit(MACHINE_FAULT) from None
    except KeyboardInterrupt as interrupt:
        stopped = isinstance(interrupt, StoppedBySignal)
        if not (quiet or where):  # Ctrl-C reaches all processes of a terminal: one says so
            sys.stderr.write("stopped as asked: the same command resumes from there\n" if stopped else "interrupted\n")
        raise SystemExit(STOPPED_BY_SIGTERM if stopped else INTERRUPTED) from None


def run(main: Callable[[], None], resumable: bool = False) -> None:
    """Entry point of the scripts: logging, then `main` with one-line errors.

    resumable: SIGTERM ends it like Ctrl-C, with STOPPED_BY_SIGTERM. PID 1 of a container would ignore it otherwise.
    """
    setup_logging()
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; a notebook's cells inherit its backend, which may be absent
    if resumable:
        _listen_to_sigterm()
    with user_errors(quiet=not is_first_on_node()):
        main()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # the work is done: the status says so
            signal.signal(number, signal.SIG_IGN)


def _listen_to_sigterm() -> None:
    process = os.getpid()

    def stop(number: int, frame) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:  # a worker, forked since: it ends as it would have
            os.kill(os.getpid(), signal.SIGTERM)
        raise StoppedBySignal

    def unraisable(unraised) -> None:
        if not isinstance(unraised.exc_value, StoppedBySignal):
            return sys.__unraisablehook__(unraised)
        # The signal came while a destructor or a weakref's callback ran, where Python drops exceptions: once more.
        signal.signal(signal.SIGTERM, stop)
        threading.Timer(0.05, os.kill, (process, signal.SIGTERM)).start()
        return None

    signal.signal(signal.SIGTERM, stop)
    sys.unraisablehook = unraisable
