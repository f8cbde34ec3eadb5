"""A stand-in for `python` and `torchrun`, for launchers that start interpreters: what it runs has imported torch.

Torchrun, a Slurm job or a pod's shell finds it in `.venv/bin`, on PATH or in sys.executable. It (tests/stand_in.py)
asks the server here for a process forked off with the imports done (tests/warm.py), which takes over arguments,
environment, directory, standard streams, ignored signals and, in a host of tests/ops/slurm_cluster.py, namespaces.
Signals come through, the exit status comes back, and killing either of the two kills the other. What the process
itself starts with sys.executable is warm as well.

A real interpreter runs instead of it

- what is neither torchrun nor a script or module of this checkout: `-c` (but for multiprocessing's forkserver),
  `-m pip`, a script that a test has written;
- what has other environment variables that are read while importing (READ_BY_IMPORTS) than the server.

What is not as with a real one, and so needs a test with one: the interpreter's own start and end; the launcher's child
is the stand-in, so /proc shows the environment there, and SIGSTOP, which none can pass on, needs `at_work`; resource
limits and niceness are the server's; of a process group that is signalled
only the stand-in is a member. HOME and HF_HOME may differ: the Hub's cache is the server's.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import importlib
import logging
import marshal
import multiprocessing.process
import os
import re
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import common
from tests.forked import ROOT, context

READ_BY_IMPORTS = re.compile(
    "(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|ONEDNN|DNNL|ATEN|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|CUDA|NVTE|HF|TRANSFORMERS"
    "|ARROW|MPL|LD|MALLOC|TZ)(_.*)?|(TORCH|PYTHON)[A-Z].*"
)
# Of these what is read when it is needed; with buffered output a test would only see less.
READ_LATER = re.compile(
    "TORCHELASTIC_.*|TORCH_(ELASTIC|FR|NCCL|DISABLE_SHARE_RDZV)_.*|PYTHON_EXEC|PYTHON(UNBUFFERED|DONTWRITE).*"
    "|CUDA_VISIBLE_DEVICES|PYTORCH_(CUDA_)?ALLOC_CONF|(TORCHINDUCTOR|TRITON)_CACHE_DIR"
    "|HF_HOME|HF_TOKEN(_PATH)?|HF_HUB_ETAG_TIMEOUT"  # the Hub's cache, of which nothing is taken, and how it is asked
    "|KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)"  # set by scikit-learn when it is imported
)
FORK_SERVER = "from multiprocessing.forkserver import main; "
MOST_FILES = 32  # that a process inherits
NAMESPACES = ("net", "uts", "ipc", "mnt")
SET_PARENT_DEATH_SIGNAL, GET_PARENT_DEATH_SIGNAL = 1, 2  # prctl's
LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def programs() -> Path:
    """The directory with the stand-ins `python`, `python3` and `torchrun`; the server ends with this process."""
    directory = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, directory)
    source = (ROOT / "tests" / "stand_in.py").read_text()
    (directory / "python").write_text(f"#!{sys.executable} -IS\n{source}")
    (directory / "python").chmod(0o755)
    for name in ("python3", "torchrun"):
        (directory / name).symlink_to("python")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(directory / "server"))
    listener.listen(100)
    context().Process(target=_serve, args=(listener,), daemon=True).start()
    return directory


def python() -> str:
    return str(programs() / "python")


def at_work(pid: int) -> int:
    """The process that does the work of this one: another one if it is a stand-in."""
    word, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition("-")
    return int(number) if word == "warm" else pid


def _serve(listener: socket.socket) -> None:
    assert "tests.warm" in sys.modules, "the server's imports have failed, of which it says nothing"
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    multiprocessing.process.current_process()._config["daemon"] = False  # they have no children
    server = Server()
    while True:
        ready, _, _ = select.select([listener, *server.ends, *server.connections], [], [])
        for one in ready:
            if one is listener:
                server.take(listener.accept()[0])
            elif one in server.ends:
                server.ended(one)
            elif one in server.connections:
                server.told(one)


class Server:
    """The processes that run for stand-ins. ends, connections: {pidfd or the stand-in's socket: process}."""

    def __init__(self):
        self.environment = dict(os.environ)
        os.environ.clear()
        importlib.reload(common)
        self.set_by_common = dict(os.environ)
        os.environ.update(self.environment)
        self.ends: dict[int, multiprocessing.process.BaseProcess] = {}
        self.connections: dict[socket.socket, multiprocessing.process.BaseProcess] = {}

    def take(self, connection: socket.socket) -> None:
        asked, files, _, _ = socket.recv_fds(connection, 250_000, MOST_FILES)
        try:
            if asked:
                self._start(connection, asked, files)
        except (FileNotFoundError, ProcessLookupError):  # the stand-in has been killed meanwhile
            asked = b""
        if not asked:
            connection.close()
        for file in files:
            os.close(file)

    def _start(self, connection: socket.socket, asked: bytes, files: list[int]) -> None:
        own, arguments, directory, environment, ignored, inherited = marshal.loads(asked)
        name, arguments = _what_to_run(arguments, Path(directory))
        if name is None or not self._imports_would_be_the_same(environment):
            _tell(connection, "fresh", 0)
            connection.close()
        else:
            spaces = _other_namespaces(connection)
            process = multiprocessing.get_context("fork").Process(
                target=_run, args=(own, name, arguments, environment, ignored, inherited, files, connection, spaces)
            )
            with _children_in(spaces.pop("pid", None)):
                process.start()
            self.ends[os.pidfd_open(process.pid)] = process
            self.connections[connection] = process
            for file in spaces.values():
                os.close(file)
            _tell(connection, "runs", process.pid)
            if name == "-c":
                _tell(connection, "dies with its launcher", signal.SIGKILL)

    def told(self, connection: socket.socket) -> None:
        """A signal has come for the process; or the stand-in is gone."""
        try:
            said = connection.recv(100)
        except ConnectionResetError:
            said = b""
        os.kill(self.connections[connection].pid, marshal.loads(said) if said else signal.SIGKILL)
        if not said:
            del self.connections[connection]
            connection.close()

    def ended(self, end: int) -> None:
        process = self.ends.pop(end)
        os.close(end)
        process.join()
        for connection in [one for one, its in self.connections.items() if its is process]:
            _tell(connection, "ended", process.exitcode)
            del self.connections[connection]
            connection.close()

    def _imports_would_be_the_same(self, environment: dict[str, str]) -> bool:
        environment = self.set_by_common | environment
        names = {*self.environment, *environment}
        names = {name for name in names if READ_BY_IMPORTS.fullmatch(name) and not READ_LATER.fullmatch(name)}
        return all(environment.get(name) == self.environment.get(name) for name in names)


def _tell(connection: socket.socket, word: str, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the stand-in has been killed; `told` hears of it, too
        connection.send(marshal.dumps((word, number)))


def _what_to_run(arguments: list[str], directory: Path) -> tuple[str | None, list[str]]:
    """(script or module, its arguments); None for what needs a real interpreter."""
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments[:1] == ["-c"] and arguments[1].startswith(FORK_SERVER):
        return "-c", arguments[1:]
    if arguments[:1] == ["-m"]:
        name, *arguments = arguments[1:]
        package = name.partition(".")[0]
        ours = package in ("common", "extras", "benchmarks") and (directory / package).resolve() == ROOT / package
        return (name if ours or name == "torch.distributed.run" else None), arguments
    if not arguments:
        return None, []
    script = (directory / arguments[0]).resolve()
    return (str(script) if script.suffix == ".py" and script.parent == ROOT else None), arguments[1:]


def _other_namespaces(connection: socket.socket) -> dict[str, int]:
    """Those of the stand-in that are not the server's, open."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = int.from_bytes(peer[:4], sys.byteorder)
    links = {name: f"/proc/{pid}/ns/{name}" for name in ("pid", *NAMESPACES)}
    return {
        name: os.open(link, os.O_RDONLY)
        for name, link in links.items()
        if os.readlink(link) != os.readlink(f"/proc/self/ns/{name}")
    }


@contextmanager
def _children_in(space: int | None) -> Iterator[None]:
    """While it lasts, children are born in another process namespace (None: in this process' own)."""
    if space is None:
        yield
        return
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    _enter(space)
    try:
        yield
    finally:
        _enter(own)
        for file in (own, space):
            os.close(file)


def _enter(namespace: int) -> None:
    if LIBC.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _prctl(option: int, argument) -> None:
    if LIBC.prctl(option, argument) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _run(own, name, arguments, environment, ignored, inherited, files, connection, spaces) -> None:
    """As a fresh interpreter that has just done its imports."""
    top = max(inherited, default=0) + 1
    held = [fcntl.fcntl(file, fcntl.F_DUPFD, max(top, 1000)) for file in files[4:]]
    for space in spaces.values():
        _enter(space)
    os.fchdir(files[3])
    for descriptor, file in enumerate(files[:3]):
        os.dup2(file, descriptor)
    os.setsid()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.executable, sys.argv = str(Path(own).with_name("python")), [name, *arguments]
    for of_server in (forkserver._forkserver, resource_tracker._resource_tracker):
        of_server.__init__()  # it has none of its own yet
    _import_common(connection)
    for known in [*logging.root.manager.loggerDict]:
        if known.startswith("torch.distributed.elastic") and "LOGLEVEL" in environment:  # read by imports as well
            logging.getLogger(known).setLevel(environment["LOGLEVEL"])
    os.closerange(3, 1000)  # the server's, and those of other stand-ins
    for file, number in zip(held, inherited, strict=True):
        os.dup2(file, number)
    os.closerange(max(top, 1000), 10_000)
    if name == "-c":
        sys.modules.pop("extras.launch.forked_ranks", None)  # to be imported, as in a process that has it not yet
        exec(arguments[0], {"__name__": "__main__"})
    elif name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        sys.modules.pop(name, None)  # what the server imported of that name is not what runs
        sys.modules.pop(f"{name}.__main__", None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _import_common(connection: socket.socket) -> None:
    """What importing `common` does to a process: it may ask the kernel to be told when its launcher dies, which the
    stand-in's parent is."""
    importlib.reload(common)
    number = ctypes.c_int()
    _prctl(GET_PARENT_DEATH_SIGNAL, ctypes.byref(number))
    if number.value:
        connection.send(marshal.dumps(("dies with its launcher", number.value)))
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
