"""Start ranks in processes forked off one that has done their imports (multiprocessing's forkserver).

A rank's imports take longer than all else in a restart, and once in this process they are shared by the ranks' memory.
The process imports what the script imports, and never starts CUDA or a thread. Every rank has a session and the
environment that torchrun gives it, and the kernel sends it SIGTERM when its parent ends, as with a launcher;
ps and top call it rank-N.

With torchrun's --start-method spawn, and for what is no Python script or module, each rank starts an interpreter.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from common.cli import one_line
from common.compat import run_exit_functions, set_rank_starter
from common.distributed.stopping import die_with_parent, stop_with_launcher

SCRIPT = "LAUNCHED_SCRIPT"  # for the server alone: what to import, "-m" first if it is a module
# What a training run imports before its first step, beside the modules that its script names. The first of torch's
# optimisers imports dynamo, which takes half a second.
LATER = (
    *("common.checkpoint.reader", "common.models.esm2.convert", "common.training.masked_lm"),
    *("extras.launch.memory_checkpoints", "torch._dynamo"),
)
DOUBTS = ("__start_method", "__no_python", "__module", "_m", "__run_path")
STARTED_S = 10.0  # that a rank may take to begin


def use() -> None:
    """Have torch's launcher start its ranks by `start`."""
    set_rank_starter(start)


def can_be_prepared(arguments: list[str]) -> str:
    """The train script of a command line of torchrun that leaves no doubt about it before torch parses it; else ""."""
    end = next((n for n, word in enumerate(arguments) if re.fullmatch(r"train_\w+\.py", Path(word).name)), None)
    own = [word.replace("-", "_") for word in arguments[:end]]
    ranks = [re.fullmatch(r"__nproc_per_node=(\d+)", word) for word in own if word.startswith("__nproc_per_node")]
    if end is None or None in ranks or any(word.startswith(DOUBTS) for word in own):
        return ""
    if any(match and int(match[1]) > 1 for match in ranks):
        limit_threads()
    return arguments[end]


def limit_threads() -> None:
    """Of each of several ranks, as torchrun does with five lines of warning; before the library is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def prepare(script: str, is_module: bool) -> bool:
    """Start the process that ranks are forked off: it imports while the nodes meet. False if it cannot be had."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    os.environ[SCRIPT] = f"-m {script}" if is_module else script
    try:
        forkserver.ensure_running()
    except OSError as error:  # its socket's path is too long in some $TMPDIR
        sys.stderr.write(f"warning: ranks do their own imports, since $TMPDIR takes no socket: {one_line(error)}\n")
        return False
    finally:
        del os.environ[SCRIPT]
    return True


class ForkedRank:
    """A rank's process, as torch's launcher uses a subprocess.Popen."""

    def __init__(self, words: list[str], environment: dict[str, str], outputs: list[str | None]):
        self.process = multiprocessing.get_context("forkserver").Process(
            target=run_rank, args=(words, environment, outputs)
        )
        self.process.start()
        self.pid: int = self.process.pid or 0
        deadline = time.monotonic() + STARTED_S
        # Until it leads a session it cannot be signalled as one.
        while self.poll() is None and _session(self.pid) != self.pid and time.monotonic() < deadline:
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.process.exitcode


def start(args: tuple[str, ...], env: dict[str, str], outputs: list[str | None]) -> ForkedRank | None:
    """A rank of torchrun; None if it is not this Python that runs it. outputs: files of stdout and stderr, if any."""
    interpreter, *words = args
    if interpreter != sys.executable or words[:1] != ["-u"]:
        return None
    return ForkedRank(words[1:], env, outputs)


def run_rank(words: list[str], environment: dict[str, str], outputs: list[str | None]) -> None:
    """As `python -u WORDS`, in this process."""
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # Python's default, of which this process is no sign
    os.environ.clear()
    os.environ.update(environment)
    stop_with_launcher()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank-{environment['RANK']}")  # for ps and top
    for descriptor, path in enumerate(outputs, start=1):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyrefly: ignore[missing-attribute]  # TextIOWrapper's
    is_module = words[0] == "-m"
    name, *sys.argv[1:] = words[is_module:]
    sys.argv[0] = name
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(name))
            runpy.run_path(name, run_name="__main__")
    except SystemExit:
        raise
    except KeyboardInterrupt:  # before the run has handlers of its own
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        run_exit_functions()


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _import_as(script: str) -> None:
    """Import the modules that a script or "-m MODULE" names outside of functions."""
    with suppress(Exception):  # the ranks will say what is wrong
        if script.startswith("-m "):
            spec = importlib.util.find_spec(script.removeprefix("-m "))
            script = spec.origin if spec and spec.origin else ""
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
        for node in ast.parse(Path(script).read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                importlib.import_module(name)
        for name in LATER if "common.training.loop" in sys.modules else ():
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what a fork looks at for garbage it copies


if (_script := os.environ.pop(SCRIPT, None)) is not None:
    die_with_parent(os.getppid())
    _import_as(_script)
