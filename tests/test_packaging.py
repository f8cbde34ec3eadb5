"""Version, dependencies and linters stand in several files, which agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from docker.install_requirements import read_requirements
from extras.commands import command_of
from tests.conftest import ROOT

SCRIPTS = [path for path in ROOT.glob("*.py") if path.name not in ("setup.py", "train.py")]
LINTER = re.compile(r"\.venv/bin/([\w-]+(?: (?:check|format))?)")


@pytest.fixture(scope="module")
def project() -> Distribution:
    """As setuptools reads it for pip and uv."""
    return apply_configuration(Distribution(), ROOT / "pyproject.toml")


def requirements(*files: str) -> list[str]:
    return [line for file in files for line in read_requirements(ROOT / file)]


def test_version_is_the_same_in_all_files(project):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert project.get_version() == citation["version"] == newest


def test_license_is_the_same_in_all_files(project):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project.metadata.license_expression == citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_each_dependency_is_a_range_that_has_the_pinned_version(project):
    ranges = {one.name: one.specifier for one in map(Requirement, project.install_requires)}
    pins = dict(line.split("==") for line in requirements("requirements.txt"))
    assert list(ranges) == list(pins)
    assert {name: version for name, version in pins.items() if version not in ranges[name]} == {}
    for name, versions in ranges.items():
        assert not {each.operator for each in versions} - {">=", "<"}, f"{name}: pip would replace what is there"
        assert ">=" in {each.operator for each in versions}, f"{name}: the oldest version tested"


def test_optional_dependencies_are_those_of_the_requirements_files(project):
    assert project.extras_require == {
        "gpu": requirements("requirements-gpu.txt"),
        "trackers": requirements("requirements-trackers.txt"),
        "finetune": requirements("requirements-finetune.txt"),
        "map": requirements("requirements-map.txt"),
        "structures": requirements("requirements-structures.txt"),
        "onnx": requirements("requirements-onnx.txt"),
        "dev": requirements(
            *("requirements-trackers.txt", "requirements-finetune.txt"),
            *("requirements-test.txt", "requirements-dev.txt"),
        ),
    }


def test_packages_are_the_core_the_extras_and_configs(project):
    folders = {path.parent.relative_to(ROOT) for name in ("common", "extras") for path in ROOT.glob(f"{name}/**/*.py")}
    folders |= {path.parent.relative_to(ROOT) for path in ROOT.glob("configs/**/*.yaml")}
    assert {Path(name.replace(".", "/")) for name in project.packages} == folders


def test_each_script_has_a_command(project):
    commands = [f"{command_of(path.name)} = extras.commands:main" for path in SCRIPTS]
    assert len(commands) > 10
    assert sorted(project.entry_points["console_scripts"]) == sorted(commands)


def build_wheel(source: Path, wheels: Path, **environment: str) -> Path:
    """The wheel of a copy of the checkout."""
    source.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name in ("common", "extras", "configs"):
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copyfile(path, source / path.name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, wheels]
    subprocess.run(command, cwd=source, env=os.environ | environment, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A wheel."""
    place = tmp_path_factory.mktemp("built")
    return build_wheel(place / "source", place / "wheels", SOURCE_DATE_EPOCH="1700000000")


@pytest.fixture(scope="module")
def installed(built) -> Path:
    """Its files, where pip would put them."""
    with zipfile.ZipFile(built) as archive:
        archive.extractall(built.parent / "installed")
    return built.parent / "installed"


def test_wheel_is_the_same_bytes_in_another_place_at_another_time(built, tmp_path):
    """Of files that were copied later, in another language and time zone; with the same umask."""
    elsewhere = {"SOURCE_DATE_EPOCH": "1700000000", "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    again = build_wheel(tmp_path / "a longer name" / "source", tmp_path / "wheels", **elsewhere)
    assert again.name == built.name
    assert again.read_bytes() == built.read_bytes()


def test_wheel_commands_run_its_scripts_anywhere(installed, tmp_path):
    def run(command: str, *flags: str) -> str:
        start = f"import sys; sys.argv[0] = {command!r}; from extras.commands import main; main()"
        environment = os.environ | {"PYTHONPATH": str(installed)}
        done = subprocess.run(
            [sys.executable, "-c", start, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n>b\nMKT\n")
    run("esm2-download-data", "--source", "a.fasta", "--output_dir", ".")
    assert len((tmp_path / "csv" / "x000.csv").read_text().splitlines()) == 3
    assert "train_ddp.py" in run("/venv/bin/esm2-train-ddp", "--config-name", "sanity", "--help")
    assert {path.name for path in installed.glob("configs/*")} == {path.name for path in ROOT.glob("configs/*")}


def test_precommit_runs_the_linters_of_test_sh():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [LINTER.search(hook["entry"])[1] for hook in local["hooks"]]
    linters = re.search(r'echo "Linters"(.*?)^fi$', (ROOT / "test.sh").read_text(), re.DOTALL | re.MULTILINE)[1]
    assert hooks == LINTER.findall(linters)


def test_type_checker_exceptions_name_their_kind():
    """A bare `# pyrefly: ignore` would hide whatever the line gets wrong later."""
    files = [path for name in ("common", "extras") for path in ROOT.glob(f"{name}/**/*.py")]
    exceptions = [line for path in files for line in path.read_text().splitlines() if "pyrefly: ignore" in line]
    assert [line for line in exceptions if not re.search(r"pyrefly: ignore\[[a-z-]+\]  # \S", line)] == []
