"""The files of a download that is under way: what has arrived, whether it is right, and how it becomes whole."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.prepare.addresses import identity
from common.prepare.transfers import TemporaryError, Transfer

GZIP = b"\x1f\x8b"
COPY_BYTES = 1 << 20
HASHED_BYTES = 4 << 20


@dataclass(frozen=True)
class Expected:
    """What a file should be: `sums` by algorithm (hex, lower case), `size` in bytes or None, and who says so."""

    sums: dict[str, str] = field(default_factory=dict)
    size: int | None = None
    authority: str = ""


ANYTHING = Expected()


class Digest:
    """The checksums that are asked for, of the first `position` bytes of a file that grows."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.restart()

    def restart(self) -> None:
        self.position = 0
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in self.expected.sums}

    def update(self, data: bytes) -> None:
        for each in self._hashes.values():
            each.update(data)
        self.position += len(data)

    def catch_up(self, path: Path, end: int) -> None:
        """Have `position` be `end`, reading from `path` what has not been seen."""
        assert self.position <= end
        if not self._hashes:
            self.position = end
            return
        with open(path, "rb") as file:
            file.seek(self.position)
            while data := file.read(min(HASHED_BYTES, end - self.position)):
                self.update(data)

    def complaint(self, path: Path) -> str | None:
        """What is wrong with the whole file, or None; what was hashed while it arrived is not read again."""
        size, expected = path.stat().st_size, self.expected
        if expected.size is not None and size != expected.size:
            return f"has {size:,} bytes, {expected.authority} says {expected.size:,}"
        self.catch_up(path, size)
        for name, wanted in expected.sums.items():
            if (found := self._hashes[name].hexdigest()) != wanted:
                return f"its {name} is {found}, {expected.authority or '--' + name} says {wanted}"
        return None


class DownloadFiles:
    """The files of one download: `part` grows, `note` says what it is part of, `target` is complete; `plain` is
    `part` without the compression of the transfer."""

    def __init__(self, directory: Path, url: str) -> None:
        name = Path(unquote(urlsplit(url).path)).name or "source"
        # Names end at 255 bytes; the hash tells files of one name apart.
        self.target = directory / f"{hashlib.sha256(identity(url).encode()).hexdigest()[:8]}-{name[-100:]}"
        self.part = self.target.with_name(self.target.name + ".part")
        self.note = self.target.with_name(self.target.name + ".json")
        self.plain = self.target.with_name(self.target.name + ".plain")

    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def begin(self, transfer: Transfer) -> None:
        """Note what the bytes belong to before the first one is written."""
        self.part.unlink(missing_ok=True)
        self.note.write_text(
            json.dumps({"version": transfer.version, "total": transfer.total, "gzipped": transfer.gzipped_in_transit})
        )

    def read_note(self) -> dict:
        try:
            return json.loads(self.note.read_text())
        except (FileNotFoundError, ValueError):  # killed in mid-write
            return {"version": "", "total": None, "gzipped": False}

    def remove(self) -> None:
        for path in (self.target, self.part, self.note, self.plain):
            path.unlink(missing_ok=True)

    def keep(self) -> str:
        """After a failure: remove what cannot be gone on from. Returns what there is to say about the rest."""
        if self.size() and self.read_note()["version"]:
            return f" ({self.size():,} bytes have arrived and are kept)"
        self.remove()
        with suppress(OSError):
            self.part.parent.rmdir()  # only if there is nothing in it
        return ""

    def complete(self) -> bool:
        """Give the whole file its name; True if a compression that was the server's own idea had to be undone first.

        Raises TemporaryError, and removes everything, if that compression is broken.
        """
        if self.read_note()["gzipped"]:
            try:
                if _gzip_layers(self.part) > (self.target.suffix == ".gz"):
                    with gzip.open(self.part, "rb") as encoded, open(self.plain, "wb") as file:
                        shutil.copyfileobj(encoded, file, COPY_BYTES)
                    self.plain.rename(self.target)
                    self.part.unlink()
                    return True
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.remove()
                raise TemporaryError(f"arrived as a gzip stream that is broken ({error})") from error
        self.part.rename(self.target)
        return False


def _gzip_layers(path: Path) -> int:
    """How often the file is gzipped: 0, 1 or 2. Servers that label a .gz file as encoded send it as it is: 1."""
    with open(path, "rb") as file:
        if file.read(2) != GZIP:
            return 0
        file.seek(0)
        with gzip.open(file, "rb") as inner:
            return 1 + (inner.read(2) == GZIP)
