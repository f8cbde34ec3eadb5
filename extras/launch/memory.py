"""Memory of the launcher for its ranks' states (extras.launch.memory_checkpoints), which outlives them.

It is in files without a name (memfd): no other user can open them, /dev/shm may be small, and they end with the
launcher.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from isal import isal_zlib
from torch import Tensor

from common.cli import MEMORY, UserError

SLOTS = 4  # of a rank: two of its own, two for what a rank of another node holds
HEAD = struct.Struct("<8sQQII")  # MAGIC, bytes of data, bytes of JSON behind them, and the CRC-32 of each
MAGIC = b"PLMSTATE"
DATA = 4096  # where the data begin: a page


class LauncherMemory:
    """The launcher's side, for the ranks of this node: it holds the memory and reads only how far they came."""

    def __init__(self, ranks: int):
        self.files = [os.memfd_create(f"state-{n}", os.MFD_CLOEXEC) for n in range(SLOTS * ranks)]
        for file in self.files:
            os.fchmod(file, 0o600)
        self.paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self.files]
        os.environ[MEMORY] = " ".join(self.paths)

    def newest(self) -> int | None:
        """The last step that the first rank of this node holds."""
        heads = (Slot(path).head() for path in self.paths[: SLOTS // 2])
        return max((head[0]["step"] for head in heads if head), default=None)

    def clear(self) -> None:
        """Forget all, while no rank runs."""
        for file in self.files:
            os.ftruncate(file, 0)


@dataclass(frozen=True)
class Content:
    """What a slot holds: a rank's share of the state after a step.

    about: {"step", "rank", "size", "bytes", "model", "tensors", "state"}: rank of `size`; bytes of data; the model's
    fingerprint; where the tensors lie, as in metadata.json; the trainer state, with the position of that rank's data.
    data: uint8 [bytes].
    """

    about: dict
    data: Tensor


class Slot:
    """Memory for one share. A path of LauncherMemory; UserError if another user could have written there."""

    def __init__(self, path: str):
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        about = os.fstat(self.file)
        if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
            raise UserError(f"{path}: not memory of this user's launcher alone: start it again")
        self.memory = torch.empty(0, dtype=torch.uint8)  # all of it

    def __del__(self) -> None:
        os.close(self.file)

    def allocate(self, size: int) -> Tensor:
        """uint8 [size], which `commit` makes the slot's data. OSError if there is not so much memory."""
        self._map(DATA + size)
        return self.memory[DATA:]

    def begin(self) -> None:
        """What the slot holds is being overwritten: it holds nothing."""
        os.pwrite(self.file, bytes(HEAD.size), 0)

    def commit(self, about: bytes, size: int, expected: list[int] | None = None) -> list[int]:
        """The first `size` bytes of data are whole: the CRC-32 of data and `about`, JSON as in Content.

        OSError if they are not as expected.
        """
        checksums = [isal_zlib.crc32(self._bytes(DATA, size)), isal_zlib.crc32(about)]
        if expected not in (None, checksums):
            raise OSError(errno.EIO, "damaged on the way from another node")
        os.pwrite(self.file, about, DATA + size)
        os.pwrite(self.file, HEAD.pack(MAGIC, size, len(about), *checksums), 0)
        return checksums

    def read(self) -> Content | None:
        """What it holds; None if that is nothing whole."""
        if (head := self.head()) is None:
            return None
        about, checksum = head
        self._map(DATA + about["bytes"])
        if isal_zlib.crc32(self._bytes(DATA, about["bytes"])) != checksum:
            return None
        return Content(about, self.memory[DATA : DATA + about["bytes"]])

    def head(self) -> tuple[dict, int] | None:
        """(Content.about, the CRC-32 of the data, which are not looked at); None if there is nothing whole."""
        magic, size, length, *checksums = HEAD.unpack(os.pread(self.file, HEAD.size, 0).ljust(HEAD.size, b"\0"))
        if magic != MAGIC or os.fstat(self.file).st_size < DATA + size + length:
            return None
        about = os.pread(self.file, length, DATA + size)
        return (json.loads(about), checksums[0]) if isal_zlib.crc32(about) == checksums[1] else None

    def _map(self, size: int) -> None:
        if len(self.memory) < size:
            os.posix_fallocate(self.file, 0, size)  # or a page that cannot be had would end the process when touched
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.memory = torch.frombuffer(mmap.mmap(self.file, size, flags), dtype=torch.uint8)

    def _bytes(self, begin: int, size: int) -> memoryview:
        return memoryview(self.memory[begin : begin + size].numpy())


def available_memory() -> int:
    """Bytes that this machine, or this container, can still give."""
    free = [int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        numbers = [int(line) for path in (limit, used) for line in _lines(path) if line.isdigit()]
        free += [numbers[0] - numbers[1]] if len(numbers) == 2 else []
    return min(free, default=0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
