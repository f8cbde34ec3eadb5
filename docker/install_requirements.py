"""Install requirement files into an image being built, and keep what its base brings.

python3 install_requirements.py requirements.txt requirements-gpu.txt [pip's options]

NVIDIA's image has a torch of its own, with Transformer Engine and flash-attn built against it, and a list of the
versions it was tested with, /etc/pip/constraint.txt. These stay; all else gets the version of requirements.lock, and
what pip fetches has to have a hash that stands there. A base without them gets everything from the lock. flash-attn-4
comes last, and an image is made without it where the base's versions rule it out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

BUILT_FOR_EACH_OTHER = ("torch", "transformer-engine", "flash-attn")
LAST = "flash-attn-4"  # over the older files that flash-attn has in the same folder
BASE_CONSTRAINTS = Path("/etc/pip/constraint.txt")


def name_of(requirement: str) -> str:
    """`Foo_Bar[extra]==1.0` -> `foo-bar`."""
    return re.sub(r"[-_.]+", "-", re.match(r"\s*([A-Za-z0-9._-]*)", requirement)[1]).lower()


def read_requirements(path: Path) -> list[str]:
    """The file's requirements, without comments, empty lines and pip's options."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if name_of(line) and not line.startswith("-")]


def installed_versions() -> dict[str, str]:
    """Versions of what this Python can import and must not be replaced."""
    versions = {}
    for name in BUILT_FOR_EACH_OTHER:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


class Locked(NamedTuple):
    """A package of requirements.lock: version and hashes, as pip reads them, and who wants it: packages, `-r FILE`."""

    pinned: str
    wanted_by: set[str]


def read_lock(path: Path) -> dict[str, Locked]:
    """The packages of a lock file as uv writes it, by name."""
    lock = {}
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\s+# via (.+)", line):
            parents = {part if part.startswith("-") else name_of(part) for part in found[1].split(", ")}
            lock[name_of(lines[0])] = Locked(" ".join(part.strip("\\ ") for part in lines), parents)
            lines = []
        elif line and not line.startswith("#"):
            lines.append(line)
    return lock


def closure(lock: dict[str, Locked], files: list[str], kept: set[str]) -> list[str]:
    """What these requirement files want, and what that wants, but nothing on account of what the base keeps."""
    wanted_by, found = {f"-r {file}" for file in files}, set()
    while more := {name for name, package in lock.items() if name not in found and package.wanted_by & wanted_by}:
        found |= more
        wanted_by |= more - kept
    return sorted(found)


def plan(
    lock: dict[str, Locked], files: list[str], base: list[str], installed: dict[str, str], there: set[str]
) -> tuple[list[str], list[str], list[str]]:
    """What pip is to install by hash; what without, in the base's version; and what it must not go beyond.

    base: the base's constraints; installed: versions of what stays, whatever the constraints say; there: the names of
    all that is installed.
    """
    of_base = {name_of(line) for line in base}
    names = [name for name in closure(lock, files, of_base | installed.keys()) if name not in installed]
    hashed = [lock[name].pinned for name in names if name not in of_base]
    unhashed = [name for name in names if name in of_base and name not in there]
    return (
        hashed,
        unhashed,
        base + [f"{name}=={version}" for name, version in installed.items() if name not in of_base],
    )


def pip_install(options: list[str], wanted: list[str], limits: list[str]) -> int:
    """pip's exit status; 0 where nothing is wanted."""
    if not wanted:
        return 0
    with tempfile.TemporaryDirectory() as directory:
        paths = []
        for flag, lines in {"-r": wanted, "-c": limits}.items():
            (Path(directory) / flag).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            paths += [flag, str(Path(directory) / flag)]
        command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", *options, *paths]
        # The base's constraints are in the file already; twice, pip would take a torch from nowhere for another one.
        return subprocess.call(command, env={k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"})


def install(
    lock: dict[str, Locked], files: list[str], base: list[str], kept: dict[str, str], options: list[str]
) -> int:
    """pip's exit status. Arguments as of `plan`, and pip's options."""
    there = {name_of(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    hashed, unhashed, limits = plan(lock, files, base, kept, there)
    if unhashed:
        print("In the base's version, without a hash of ours:", ", ".join(unhashed), flush=True)
    return pip_install(options, unhashed, limits) or pip_install([*options, "--require-hashes"], hashed, limits)


def main(arguments: list[str]) -> int:
    options = [argument for argument in arguments if argument.startswith("-")]
    files = [argument for argument in arguments if argument not in options]
    base = read_requirements(BASE_CONSTRAINTS) if BASE_CONSTRAINTS.exists() else []
    kept = installed_versions()
    print("Kept:", ", ".join(f"{name} {version}" for name, version in kept.items()) or "nothing", flush=True)
    lock = read_lock(Path("requirements.lock"))
    status = install({name: package for name, package in lock.items() if name != LAST}, files, base, kept, options)
    if status == 0 and LAST in closure(lock, files, set()) and install(lock, files, base, kept, options):
        print(f"warning: {LAST} does not go with what the base brings: the image is without it", file=sys.stderr)
    if status == 0 and (after := installed_versions()) | kept != after:
        print(f"error: pip replaced what the base brought: {kept} became {after}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
