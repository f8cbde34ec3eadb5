"""A Docker engine of the tests' own, as root: own data, socket and host names; gone with all its files afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import Limit, run

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
STARTS_WITHIN_S = 30
IN_MEMORY_BYTES = 6 << 30  # images of the tests, twice over: kept in memory where that much is free


def need(*commands: str) -> None:
    """Skip the test unless this is root and has the commands."""
    if os.geteuid() != 0:
        pytest.skip("a Docker engine of its own needs root")
    missing = [command for command in commands if not shutil.which(command, path=PATH)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (./test.sh --system-packages installs them)")


@contextlib.contextmanager
def docker_engine(hosts: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Start dockerd without networks of its own (use --network=host); yields the environment for `docker`.

    hosts: names that the engine alone resolves, to addresses; their registries may have certificates of any kind.
    """
    need("dockerd", "docker", "unshare", "mount")
    directory = Path(tempfile.mkdtemp(prefix="docker-"))  # short: a socket's path has at most 107 characters
    hosts = hosts or {}
    names = "".join(f"{address} {name}\n" for name, address in hosts.items())
    (directory / "hosts").write_text(Path("/etc/hosts").read_text() + names)
    socket = f"unix://{directory}/docker.sock"
    daemon = ["dockerd", "--data-root", f"{directory}/data", "--exec-root", f"{directory}/exec", "-H", socket]
    daemon += ["--pidfile", f"{directory}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
    daemon += ["--ip-forward=false", "--ip-masq=false", *(f"--insecure-registry={name}" for name in hosts)]
    # A mount namespace of its own: whatever is mounted in it is gone with the engine.
    steps = [f"mount --bind {directory}/hosts /etc/hosts", f"mkdir {directory}/data"]
    if _free_memory() > IN_MEMORY_BYTES:
        steps.append(f"mount -t tmpfs -o size={IN_MEMORY_BYTES} images {directory}/data")
    steps.append(f"exec {' '.join(daemon)}")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", " && ".join(steps)]
    environment = os.environ | {"PATH": PATH, "DOCKER_HOST": socket, "DOCKER_CONFIG": f"{directory}/client"}
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        limit = Limit(STARTS_WITHIN_S)
        while subprocess.run(["docker", "info"], env=environment, capture_output=True).returncode != 0:
            if process.poll() is not None or limit.passed():
                last = (log.read_text().strip().splitlines() or ["no message"])[-1]
                pytest.skip(f"no Docker engine can run here: {last}")
            time.sleep(0.1)
        yield environment
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)
        assert not directory.exists(), f"the Docker engine left files in {directory}"


def _free_memory() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def sh(command: list, environment: dict, cwd: Path | None = None, timeout: int = 300) -> subprocess.CompletedProcess:
    return run([str(part) for part in command], timeout, env=environment, cwd=cwd)


def ok(command: list, environment: dict, **kwargs) -> str:
    done = sh(command, environment, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tiny_image(name: str, content: str, directory: Path, environment: dict[str, str]) -> None:
    """An image of one file."""
    (directory / "content").write_text(content)
    ok(["tar", "-C", directory, "-cf", directory / "content.tar", "content"], environment)
    ok(["docker", "import", directory / "content.tar", name], environment)
