"""Each findings/NAME.sh has the form that CONTRIBUTING.md states. They install packages, so that no test runs them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import ROOT

FILES = sorted((ROOT / "findings").glob("*"))  # an image has none
SETTING_UP = """set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_form(path):
    shebang, *lines = path.read_text().splitlines()
    assert path.suffix == ".sh"
    assert path.stat().st_mode & 0o100
    assert shebang == "#!/usr/bin/env bash"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert max(map(len, lines)) <= 130
    assert len(lines) < 50
    length = next(number for number, line in enumerate(lines) if not line.startswith("# "))
    head, script = "\n".join(lines[:length]), "\n".join(lines[length:])
    for beginning in (r"Seen 20\d\d-\d\d-\d\d", r"  \S", "Fails if "):  # when; the output; what fails
        assert re.search("^# " + beginning, head, re.M), beginning
    assert script.startswith(SETTING_UP)
    pinned = re.findall(r"(?:install --quiet|download -qq) ([^\n]+?)(?: 2>/dev/null)?$", script, re.M)
    packages = [package for line in pinned for package in line.split()]
    assert packages
    assert all("=" in package for package in packages), "versions are pinned"
    assert packages[0].split("=")[-1] in head, "the head names the version"
    assert re.search(r"^ *assert |\|\| exit 1$", script, re.M), "nothing fails if the behaviour changes"
    assert not re.search(r"^\s*(?:import|from) (?:common|extras)\b|/tmp/|/home/", script, re.M)
