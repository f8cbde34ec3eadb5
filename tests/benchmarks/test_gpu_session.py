"""tests/gpu/session.sh: its rows are commands that parse, and fit the time that a machine is lent for."""

from __future__ import annotations

import os
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch

from common.flags import parse_arguments
from tests.forked import ROOT
from tests.patience import run

SCRIPT = ROOT / "tests/gpu/session.sh"
LENT_S, STARTS_S = 15 * 60, 2 * 90  # two starts of the machine: three parts are two calls, of ten minutes at most
BUDGETS = {name: int(seconds) for name, seconds in re.findall(r"\[(\w+)\]=(\d+)", SCRIPT.read_text())}
ON_GPU = [part for part in BUDGETS if part != "cpu"]


def stub(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (directory / name).chmod(0o755)


def session(where: Path, *arguments: str, nvidia_smi: str = "true", **environment: str):
    """The script on a machine whose `timeout` only notes what it is to run."""
    stub(where / "bin", "nvidia-smi", nvidia_smi)
    stub(where / "bin", "timeout", f'printf "%q " "$@" >>{where}/rows; echo >>{where}/rows')
    path = {"PATH": f"{where / 'bin'}:{os.environ['PATH']}"}
    return run([SCRIPT, *arguments], env=os.environ | path | environment)


def rows(where: Path, part: str, **environment: str) -> list[tuple[int, list[str]]]:
    """(seconds until it is killed, command) of each row."""
    done = session(where, str(where / "out"), part, **environment)
    assert done.returncode == 0, done.stderr
    noted = [shlex.split(line) for line in (where / "rows").read_text().splitlines()]
    return [(int(seconds) + int(kill.removeprefix("--kill-after=")), command) for kill, seconds, *command in noted]


@pytest.mark.parametrize("part", BUDGETS)
def test_rows_fit_and_parse(part, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = rows(tmp_path, part)
    assert sum(seconds for seconds, _ in found) <= BUDGETS[part]
    for _, (_, _, module, *argv) in found:
        if module == "pytest":
            assert (ROOT / argv[-1]).exists()
        else:
            parse_arguments("", import_module(module).Arguments, argv)


def test_parts_fit_the_time_lent():
    assert sum(BUDGETS[part] for part in ON_GPU) <= LENT_S - STARTS_S


def test_part_ends_with_its_budget(tmp_path):
    """Begun ten seconds before its end, by bash's own count, which it takes from its environment."""
    assert [seconds for seconds, _ in rows(tmp_path, "headline", SECONDS=str(BUDGETS["headline"] - 10))] == [
        pytest.approx(10 + 5, abs=3),
        *[pytest.approx(10 + 5, abs=6)] * 2,
    ]


def test_session_without_a_gpu_fails(tmp_path):
    done = session(tmp_path, str(tmp_path / "out"), "headline", nvidia_smi="echo 'No devices were found'; exit 6")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no GPU here")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [(), ("out",), ("out", "all")])
def test_session_names_its_parts(arguments, tmp_path):
    done = session(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (2, "usage: tests/gpu/session.sh DIRECTORY headline|decide|rest|cpu\n")
