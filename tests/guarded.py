"""What a piece of code opens, starts and takes of memory: tests of hostile files see that nothing leaves its place."""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common

EXTRA = 4 << 30  # bytes of address space more than now, for threads' stacks and the like
PATIENCE_S = 60
_PATHS = {"open": 1, "os.listdir": 1, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.chmod": 1}
_PATHS |= {"os.symlink": 2, "os.link": 2, "os.truncate": 1, "shutil.rmtree": 1}
_NEVER = {
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
}
# Imports that happen late, and what libraries ask of the machine.
_LIBRARIES = (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), os.path.dirname(common.__path__[0]))
_SYSTEM = ("/proc/", "/sys/", "/dev/null", *map(os.path.realpath, _LIBRARIES))

_watched: list[tuple[tuple[str, ...], list[str]]] = []  # (places, what was done elsewhere) while code is guarded


def _audit(event: str, arguments: tuple) -> None:
    if not _watched:
        return
    places, strays = _watched[-1]
    if event in _NEVER:
        strays.append(f"{event} {arguments}")
    for path in arguments[: _PATHS.get(event, 0)]:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(path := os.fsdecode(path))
            if event == "open" and arguments[2] & os.O_NOFOLLOW:
                real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            within = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # of a directory that rmtree is in
            # The directory of a place is opened to flush it.
            within |= event == "open" and os.path.isdir(real) and any(os.path.dirname(p) == real for p in places)
            if not within and not real.startswith(places):
                strays.append(f"{event} {real}")


sys.addaudithook(_audit)  # for good: it does nothing while no code is guarded


@contextmanager
def guarded(*places: Path) -> Iterator[list[str]]:
    """What the code inside does outside of these places is in the list. It fails beyond 4 GB more or 60 s."""
    strays: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA, hard))
    _watched.append((tuple(os.path.realpath(place) for place in places) + _SYSTEM, strays))
    try:
        yield strays
    finally:
        _watched.pop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
