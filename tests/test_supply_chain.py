"""What can be installed: licences, bill of materials, pre-releases, bases by digest; all offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from packaging.version import Version

from docker.install_requirements import name_of, read_lock
from docker.notices import LOCKS, READ_BY_HAND, licence_of
from docker.sbom import read_notices
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "supply_chain.md").read_text()
PINS = "".join((ROOT / name).read_text() for name in ("constraints.txt", "requirements-gpu.txt"))

LIMITED = ["LicenseRef-NVIDIA-Proprietary", "LicenseRef-AWS-Customer-Agreement"]


def locked(*files: str) -> dict[str, str]:
    """Versions by name."""
    locks = (read_lock(ROOT / file) for file in files)
    return {name: package.pinned.split()[0].split("==")[1] for lock in locks for name, package in lock.items()}


def test_notices_name_the_locked_packages_and_no_other():
    assert {name: version for name, (version, _) in read_notices().items()} == locked(*LOCKS)
    assert set(READ_BY_HAND) <= locked(*LOCKS).keys()


def test_each_licence_is_one_that_the_page_allows():
    table = PAGE.split("## Licences")[1].split("\n## ")[0]
    packages = {}  # by licence: patterns of the names that may have it
    for licences, why in re.findall(r"^\| (`.+?`) \| (.+) \|$", table, re.M):
        packages |= dict.fromkeys(re.findall(r"`([^`]+)`", licences), re.findall(r"`([a-z*-]+)`", why) or ["*"])
    assert len(packages) > 10
    assert {"GPL-3.0-or-later", "LGPL-2.1-only", "AGPL-3.0-only"}.isdisjoint(packages)
    assert [licence for licence, names in packages.items() if names != ["*"]] == LIMITED
    for name, (_, expression) in read_notices().items():
        for licence in re.split(r" AND | OR ", expression):
            assert licence in packages, f"{name}: {licence} is not in docs/supply_chain.md"
            assert any(fnmatch(name, pattern) for pattern in packages[licence]), f"{name}: {licence}"


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ({"license_expression": "MIT AND Zlib", "license": "BSD"}, "MIT AND Zlib"),
        ({"license": "Apache License 2.0", "classifier": ["License :: OSI Approved :: MIT License"]}, "Apache-2.0"),
        (
            {"license": "All rights reserved", "classifier": ["License :: OSI Approved :: BSD License"]},
            "LicenseRef-BSD",
        ),
        ({"license": "UNKNOWN", "classifier": ["Intended Audience :: Science/Research"]}, None),
        ({}, None),
    ],
)
def test_licence_is_what_metadata_say(metadata, licence):
    assert licence_of("some-package", metadata) == licence


def test_each_prerelease_of_the_lock_has_its_reason_beside_it():
    early = {name: version for name, version in locked(*LOCKS).items() if Version(version).is_prerelease}
    assert "flash-attn-4" in early
    beside = r"^# Pre-release: \w.*\n(\S+)==(\S+)$|^(\S+)==(\S+)  # pre-release: \w.*$"
    found = {name_of(one or other): first or second for one, first, other, second in re.findall(beside, PINS, re.M)}
    assert found == early


@pytest.mark.parametrize("file", LOCKS)
def test_bill_of_materials_is_the_locks(file, tmp_path):
    for out in ("bill.json", "again.json"):
        command = [sys.executable, ROOT / "docker" / "sbom.py", tmp_path / out, file]
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}, check=True)
    assert (tmp_path / "bill.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    bill = json.loads((tmp_path / "bill.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"

    pins = re.findall(r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:\w+)+)", (ROOT / file).read_text(), re.M)
    assert len(pins) > 20
    hashes = {f"pkg:pypi/{name_of(name)}@{version}": re.findall(r"sha256:(\w+)", text) for name, version, text in pins}
    components = {one["purl"]: one for one in bill["components"]}
    assert len(components) == len(bill["components"])
    assert components.keys() == hashes.keys()
    notices = read_notices()
    for purl, one in components.items():
        (files,) = one["externalReferences"]
        assert [each["content"] for each in files["hashes"]] == hashes[purl]
        assert one["bom-ref"] == purl == f"pkg:pypi/{one['name']}@{one['version']}"
        assert (one["version"], one["licenses"][0]["expression"]) == notices[one["name"]]

    # Every package is needed by one that is there, or by the project; training takes torch, and no developer's tool.
    needs = {one["ref"]: set(one["dependsOn"]) for one in bill["dependencies"]}
    own = bill["metadata"]["component"]["bom-ref"]
    assert needs.keys() == {own, *components}
    assert set.union(*needs.values()) == components.keys()
    scopes = {one["name"]: one["scope"] for one in bill["components"]}
    assert scopes.get("torch", "required") == "required"
    assert scopes.get("pytest", "optional") == "optional"


def test_bill_of_materials_of_another_lock_than_the_notices_is_refused(tmp_path):
    text = (ROOT / "requirements-hyperpod.lock").read_text()
    (tmp_path / "new.lock").write_text(re.sub(r"^click==\S+", "click==0.1", text, flags=re.M))
    command = [sys.executable, ROOT / "docker" / "sbom.py", tmp_path / "bill.json", tmp_path / "new.lock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "new.lock's click: run docker/lock.sh" in done.stderr
    assert not (tmp_path / "bill.json").exists()


DIGEST = f"nvcr.io/nvidia/pytorch@sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("arguments", "changed", "refused"),
    [
        (("--release", "--build-arg", f"BASE_IMAGE={DIGEST}"), False, None),
        (("--release", "-f", "Dockerfile.cuda", f"--build-arg=BASE_IMAGE={DIGEST}", "--pull"), False, None),
        (("--build-arg", "BASE_IMAGE=base:1"), True, None),
        (("--release",), False, "can become another image"),
        (("--release", "--build-arg", "BASE_IMAGE=base:1"), False, "can become another image"),
        (("--release", "--build-arg", f"BASE_IMAGE={DIGEST[:-1]}"), False, "can become another image"),
        (("--release", "--build-arg", f"OTHER={DIGEST}"), False, "can become another image"),
        (("--release", "--build-arg", f"BASE_IMAGE={DIGEST}"), True, "not those of a commit"),
    ],
)
def test_release_image_has_a_base_by_digest_and_a_commits_files(arguments, changed, refused, tmp_path):
    """In the place of Docker a program that prints what it is asked."""
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    for path in (checkout / "docker", programs):
        path.mkdir(parents=True)
    for name in ("build.sh", "docker/env.sh", "pyproject.toml"):
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    for step in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "One"]):
        subprocess.run(["git", *step], cwd=checkout, check=True)
    if changed:
        (checkout / "pyproject.toml").write_text('version = "9"\n')
    (programs / "docker").write_text('#!/bin/sh\n[ "$1" = info ] || echo "$@"\n')
    (programs / "docker").chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", "build.sh", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if refused:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert refused in done.stderr
    else:
        given = " ".join(argument for argument in arguments if argument != "--release")
        assert done.returncode == 0, done.stderr
        assert f"{given} {checkout}\n" in done.stdout
        assert "--release" not in done.stdout


def test_images_take_a_base_and_tell_it():
    for path in ROOT.glob("Dockerfile*"):
        text = path.read_text()
        assert re.findall(r"^FROM (.+)$", text, re.M) == ["${BASE_IMAGE}"], path.name
        assert 'org.opencontainers.image.base.name="${BASE_IMAGE}"' in text, path.name
