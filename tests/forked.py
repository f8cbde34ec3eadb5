"""Scripts in processes forked from a server that has imported torch and the rest already: real processes, soon there.

What is not tested that way: the interpreter's own start and end, and launchers that start interpreters themselves.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from tests.patience import TIMEOUT_S, join

ROOT = Path(__file__).resolve().parent.parent
SERVER = "TESTS_FORK_SERVER"  # the address of the one that all test processes share


@functools.cache
def context():
    """A server for all test processes (`serve`), or for this one; it ends with the process that started it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    if address := os.environ.get(SERVER):
        server = forkserver._forkserver
        server._forkserver_address, server._forkserver_alive_fd = address, os.pipe()[1]
        server.ensure_running = resource_tracker.ensure_running
    else:
        with contextlib.chdir(ROOT):  # where it finds tests.warm, whatever directory the test is in
            forkserver.ensure_running()
    return context


def serve() -> None:
    """Start a server, and have the processes that this one starts use it: imports are done once, while they start."""
    context()
    os.environ[SERVER] = forkserver._forkserver._forkserver_address


class Script:
    """`python SCRIPT.py ARGUMENTS` or `python -m MODULE ARGUMENTS`, running, its outputs in files.

    env: all of its environment, this process' by default. anew: packages that are imported again; the others have
    seen the environment of their server alone. settings: {"module.NAME": value} to set first.
    """

    def __init__(
        self, name: str, *argv, env: dict | None = None, settings: dict | None = None, anew: tuple[str, ...] = ()
    ):
        self.outputs = [tempfile.NamedTemporaryFile("r") for _ in ("stdout", "stderr")]  # noqa: SIM115
        names = [file.name for file in self.outputs]
        environment = dict(os.environ if env is None else env)
        told = (name, [str(argument) for argument in argv], environment, settings or {}, anew, names)
        self.process = context().Process(target=_run, args=told)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, number)

    def wait(self, seconds: float = TIMEOUT_S) -> int:
        join([self.process], seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {seconds} s:\n" + "\n".join(self.said()))
        return self.process.exitcode

    def said(self) -> list[str]:
        """Standard output and standard error so far."""
        return [Path(file.name).read_text() for file in self.outputs]


def run_script(name: str, *argv, **how) -> subprocess.CompletedProcess:
    """Until it ends; the caller looks at the return code."""
    script = Script(name, *argv, **how)
    code = script.wait()
    stdout, stderr = script.said()
    return subprocess.CompletedProcess([name, *argv], code, stdout, stderr)


def _run(name: str, argv: list[str], environment: dict, settings: dict, anew: tuple, outputs: list[str]) -> None:
    for descriptor, output in zip((1, 2), outputs, strict=True):
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    assert "tests.warm" in sys.modules, "the server's imports have failed, of which it says nothing"
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for module in [module for module in sys.modules if module.split(".")[0] in anew]:
        del sys.modules[module]
    for setting, value in settings.items():
        module, _, attribute = setting.rpartition(".")
        setattr(sys.modules[module], attribute, value)
    sys.argv = [name, *argv]
    if name.endswith(".py"):
        runpy.run_path(str(ROOT / name), run_name="__main__")
    else:
        sys.modules.pop(name, None)  # what the server imported of that name is not what runs
        runpy.run_module(name, run_name="__main__", alter_sys=True)
