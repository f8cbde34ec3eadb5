"""enroot.sh: the real enroot where there is one, else what it asks of it, with a stand-in that writes or fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.ops.docker_engine import docker_engine, sh, tiny_image
from tests.patience import wait_until

# In the place of a program that Debian does not have. Its file is half done when it fails or waits.
STAND_IN = """#!/usr/bin/env bash
set -eu
printf '%s\\n' "$@" >"$RECORD"
[ "$1 $2" = "import --output" ] && [ ! -e "$3" ] && [ $# = 4 ] || exit 64
echo half >"$3"
case $BEHAVIOUR in fail) exit 1 ;; wait) sleep 60 ;; empty) : >"$3" ;; esac
[ "$BEHAVIOUR" != work ] || echo whole >>"$3"
"""


@pytest.fixture
def environment(tmp_path) -> Iterator[dict[str, str]]:
    with docker_engine() as environment:
        tiny_image("esm:1", "one", tmp_path, environment)
        target = tmp_path / "target"
        yield environment | {"TAG": "1", "TARGET_PATH": str(target), "DOCKER_IMAGE_NAME": "esm"}


@pytest.fixture
def stand_in(environment, tmp_path) -> dict[str, str]:
    program = tmp_path / "bin" / "enroot"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    path = f"{program.parent}:{environment['PATH']}"
    return environment | {"PATH": path, "RECORD": str(tmp_path / "record"), "BEHAVIOUR": "work"}


def test_enroot_writes_a_complete_file_or_keeps_the_old(stand_in, tmp_path):
    target = tmp_path / "target"
    done = sh(["./enroot.sh"], stand_in, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"Wrote {target}/esm.sqsh\n"), done.stderr
    asked = (tmp_path / "record").read_text().split()
    assert asked[:2] == ["import", "--output"]
    assert asked[3] == "dockerd://esm:1"
    assert Path(asked[2]).parent == target

    def is_as_it_was() -> bool:
        return os.listdir(target) == ["esm.sqsh"] and (target / "esm.sqsh").read_text() == "half\nwhole\n"

    assert is_as_it_was()
    for behaviour, message in (("fail", "enroot could not import esm:1"), ("empty", "enroot left no file for esm:1")):
        done = sh(["./enroot.sh"], stand_in | {"BEHAVIOUR": behaviour}, cwd=ROOT)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
        assert is_as_it_was()

    (tmp_path / "record").unlink()
    running = subprocess.Popen(["./enroot.sh"], env=stand_in | {"BEHAVIOUR": "wait"}, cwd=ROOT, start_new_session=True)
    wait_until(lambda: len(os.listdir(target)) >= 2, seconds=60)
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait(30) == 143
    assert is_as_it_was()
    assert sh(["./enroot.sh"], stand_in, cwd=ROOT).returncode == 0, "a second run replaces the file"


def test_enroot_names_what_is_missing(stand_in):
    for change, message in (
        ({"TARGET_PATH": ""}, "error: TARGET_PATH is not set"),
        ({"TAG": "2"}, "error: there is no image esm:2 here: run ./build.sh"),
    ):
        done = sh(["./enroot.sh"], stand_in | change, cwd=ROOT)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_enroot_itself_makes_a_squashfs(environment, tmp_path):
    if not shutil.which("enroot"):
        pytest.skip("enroot is not installed (it is not in Debian)")
    done = sh(["./enroot.sh"], environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "esm.sqsh").read_bytes()[:4] == b"hsqs"
