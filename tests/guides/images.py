"""The images that a guide builds and starts: what is in them by their Dockerfile, and what a container would find."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from tests.guides.session import Typed
from tests.patience import run

BUILD, RUN = argparse.ArgumentParser("docker build"), argparse.ArgumentParser("docker run")
BUILD.add_argument("-t", "--tag", required=True)
BUILD.add_argument("-f", "--file")
BUILD.add_argument("--build-arg", action="append")
BUILD.add_argument("context")
RUN.add_argument("-it", "--rm", action="store_true")
RUN.add_argument("-v", "--volume", action="append", default=[])
for option in ("--gpus", "--ipc", "--network"):
    RUN.add_argument(option)
RUN.add_argument("image")
RUN.add_argument("command", nargs=argparse.REMAINDER)


@dataclass(frozen=True)
class Image:
    """What COPY puts into the image of a Dockerfile; no RUN is run."""

    context: Path
    dockerfile: Path

    @property
    def instructions(self) -> list[tuple[str, str]]:
        lines = re.sub(r"(?m)^\s*#.*\n|\\\n", "", self.dockerfile.read_text()).splitlines()
        return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]

    @property
    def workdir(self) -> PurePosixPath:
        """Of the containers: the last one."""
        return PurePosixPath("/", *(rest for name, rest in self.instructions if name == "WORKDIR"))

    @property
    def copies(self) -> dict[str, dict[PurePosixPath, Path]]:
        """Source of a COPY -> the files it makes: path in the image -> path in the context."""
        workdir, found = PurePosixPath("/"), {}
        for name, rest in self.instructions:
            if name == "WORKDIR":
                workdir /= rest
            elif name == "COPY":
                *sources, into = rest.split()
                for source in sources:
                    found[source] = dict(self._copied(source, workdir / into, into.endswith("/")))
        return found

    @property
    def files(self) -> dict[PurePosixPath, Path]:
        return {there: here for copied in self.copies.values() for there, here in copied.items()}

    def _copied(self, source: str, into: PurePosixPath, is_folder: bool) -> Iterator[tuple[PurePosixPath, Path]]:
        for path in self.context.glob(source):
            for file in path.rglob("*") if path.is_dir() else [path]:
                if file.is_file() and self._is_sent(file.relative_to(self.context)):
                    name = file.relative_to(path) if path.is_dir() else path.name if is_folder else ""
                    yield into / name, file

    def _is_sent(self, path: PurePath) -> bool:
        """By .dockerignore: the last of its lines that match the path, or a folder above it, decides."""
        sent = True
        for line in (self.context / ".dockerignore").read_text().splitlines():
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if not line.startswith("#") and any(re.fullmatch(pattern, str(part)) for part in (path, *path.parents)):
                sent = line.startswith("!")
        return sent


def images(typed: Typed) -> dict[str, Image]:
    """Tag -> what the guide's commands, this one and those before it, had docker build."""
    made = {}
    for record in typed.record.parent.glob("*/calls"):
        for call in Typed(record.parent, typed.checkout).of("docker"):
            if call.words[0] == "build":
                words = BUILD.parse_args(call.words[1:])
                context = Path(call.cwd, words.context).resolve()
                made[words.tag] = Image(context, Path(call.cwd, words.file) if words.file else context / "Dockerfile")
    return made


def containers(typed: Typed) -> list[tuple[Image, argparse.Namespace]]:
    """The command's `docker run`s, each with the image that was built under that name."""
    started = [RUN.parse_args(call.words[1:]) for call in typed.of("docker") if call.words[0] == "run"]
    assert started, "no container was started"
    built = images(typed)
    assert [words.image for words in started if words.image not in built] == [], f"built: {[*built]}"
    return [(built[words.image], words) for words in started]


def complete(image: Image) -> None:
    """The Dockerfile exists, and what it copies."""
    assert image.dockerfile.is_file()
    assert [source for source, files in image.copies.items() if not files] == []


def builds(tag: str, dockerfile: str = "Dockerfile") -> Callable[[Typed], None]:
    """`docker build` of this file in the checkout, in whose context all is that it copies."""

    def check(typed: Typed) -> None:
        image = images(typed)[tag]
        assert image.dockerfile.resolve() == typed.checkout.resolve() / dockerfile
        complete(image)

    return check


def starts_in_image(*scripts: str) -> Callable[[Typed], None]:
    """The folder in which the container starts has these scripts and those that the command names."""

    def check(typed: Typed) -> None:
        for image, words in containers(typed):
            named = re.findall(r"[\w.]+\.py\b", " ".join(words.command))
            assert scripts or named
            assert [name for name in (*scripts, *named) if image.workdir / name not in image.files] == []

    return check


def collects_tests(typed: Typed) -> None:
    """The container's pytest, with the folders that are mounted below it, collects the image's tests.

    Of these only tests/precision: to import all takes longer than to look for them.
    """
    for image, words in containers(typed):
        root = typed.record / "image"
        for there, here in image.files.items():
            (root / there.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(here, root / there.relative_to("/"))
        for volume in words.volume:
            outside, _, inside = volume.partition(":")
            (root / inside.lstrip("/")).symlink_to(outside)
        workdir = root / image.workdir.relative_to("/")
        shell, script = words.command[:2], shlex.split(words.command[2])
        assert (shell, script[0]) == (["/bin/bash", "-c"], "pytest")
        # -P: as by the command `pytest`, the working directory is not among the modules' places.
        some = ["--collect-only", f"--ignore-glob={workdir}/tests/[!p]*"]
        done = run([sys.executable, "-P", "-m", *script, *some], 120, cwd=workdir)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "<Module test_plan.py>" in done.stdout
        assert "bionemo" not in done.stdout
