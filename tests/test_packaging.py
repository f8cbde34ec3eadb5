"""Version, dependencies and linters stand in several files, which agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from docker.install_requirements import read_requirements
from tests.conftest import ROOT

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


def test_dependencies_are_those_of_the_requirements_files(project):
    assert project.install_requires == requirements("requirements.txt")
    assert project.extras_require == {
        "gpu": requirements("requirements-gpu.txt"),
        "trackers": requirements("requirements-trackers.txt"),
        "finetune": requirements("requirements-finetune.txt"),
        "dev": requirements(
            *("requirements-trackers.txt", "requirements-finetune.txt"),
            *("requirements-test.txt", "requirements-dev.txt"),
        ),
    }


def test_packages_are_those_of_the_core_and_the_extras(project):
    top = {name for name in ("common", "extras") if (ROOT / name).is_dir()}
    folders = {path.parent.relative_to(ROOT) for name in top for path in ROOT.glob(f"{name}/**/*.py")}
    assert {Path(name.replace(".", "/")) for name in project.packages} == folders


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
