"""Install requirement files into an image being built, and keep what its base brings.

python3 install_requirements.py requirements.txt requirements-gpu.txt [pip's options]

NVIDIA's image has a torch of its own, with Transformer Engine and flash-attn built against it, and a list of the
versions it was tested with, /etc/pip/constraint.txt. These stay; all else gets the version of constraints.txt and the
requirement files. A base without them gets everything from the files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

BUILT_FOR_EACH_OTHER = ("torch", "transformer-engine", "flash-attn")
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


def plan(
    requirements: list[str], constraints: list[str], base: list[str], installed: dict[str, str]
) -> tuple[list[str], list[str]]:
    """What to ask pip for and what to constrain it with, given the base's constraints and what it has for good."""
    of_base = {name_of(line) for line in base}
    # No extra of what is there, either: the base's Transformer Engine has its extras inside.
    wanted = [line for line in requirements if name_of(line) not in installed]
    wanted = [re.split(r"[=<>!~;@]", line)[0].strip() if name_of(line) in of_base else line for line in wanted]
    limits = [line for line in constraints if name_of(line) not in of_base and name_of(line) not in installed]
    limits += [f"{name}=={version}" for name, version in installed.items() if name not in of_base]
    return wanted, base + limits


def main(arguments: list[str]) -> int:
    options = [argument for argument in arguments if argument.startswith("-")]
    requirements = [line for path in arguments if path not in options for line in read_requirements(Path(path))]
    base = read_requirements(BASE_CONSTRAINTS) if BASE_CONSTRAINTS.exists() else []
    kept = installed_versions()
    wanted, limits = plan(requirements, read_requirements(Path("constraints.txt")), base, kept)
    print("Kept:", ", ".join(f"{name} {version}" for name, version in kept.items()) or "nothing", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        files = {"-r": wanted, "-c": limits}
        for flag, lines in files.items():
            (Path(directory) / flag).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        paths = [part for flag in files for part in (flag, str(Path(directory) / flag))]
        command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", *options, *paths]
        # The base's constraints are in the file already; twice, pip would take a torch from nowhere for another one.
        status = subprocess.call(command, env={k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"})
    if status == 0 and (after := installed_versions()) | kept != after:
        print(f"error: pip replaced what the base brought: {kept} became {after}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
