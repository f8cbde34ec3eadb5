"""Hostile shard items in place of a tensor [64, 32] in fp32, as format 1 has them: (name, bytes, error)."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any

import torch

from tests.training.hostile_pickles import NO_PART, Evil


def archive(pickled: bytes, numbers: bytes = b"", compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", numbers)
    return buffer.getvalue().ljust(64 * 32 * 4, b"\0") if compression else buffer.getvalue()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensor_pickle(rows: int = 64, offset: int = 0, stride: int = 32, count: int = 64 * 32) -> bytes:
    """What torch.save writes of a tensor [rows, 32]."""
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(64, 32)))) as file:
        good = file.read("archive/data.pkl")
    # ... BINPERSID, offset, (64, 32), (32, 1) ...
    assert good.count(b"QK\x00K@K \x86q") == 1
    number = lambda n: b"\x8a\x08" + struct.pack("<q", n)  # noqa: E731
    sizes = number(offset) + number(rows) + number(32) + b"\x86"
    changed = good.replace(b"QK\x00K@K \x86", b"Q" + sizes)
    assert changed.count(b"K K\x01\x86") == 1
    changed = changed.replace(b"K K\x01\x86", number(stride) + b"K\x01\x86")
    assert changed.count(b"M\x00\x08") == 1
    return changed.replace(b"M\x00\x08", number(count))


def _beyond_the_header(data: bytes) -> bytes:
    """The name in the local header is as long as can be: the bytes would begin elsewhere."""
    at = data.rindex(b"PK\x03\x04")
    return data[: at + 26] + b"\xff\xff" + data[at + 28 :]


def _entry_of(size: int) -> bytes:
    """The directory says that an entry has so many bytes."""
    data = archive(tensor_pickle(), bytes(64 * 32 * 4))
    at = data.rindex(b"PK\x01\x02")
    return data[: at + 20] + struct.pack("<II", size, size) + data[at + 28 :]


def _deflated(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", data)
    return buffer.getvalue().ljust(64 * 32 * 4, b"\0")


NO_STORAGE = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00K@K \x86K K\x01\x86\x89}tR."
ROW = bytes(64 * 32 * 4)
BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."
ITEMS = [
    ("no archive", bytes(64 * 32 * 4), "damaged archive"),
    ("a pickle of old", pickle.dumps("x").ljust(8192, b"\0"), "damaged archive"),
    ("an archive cut short", saved(torch.zeros(64, 32))[:-64], "damaged archive"),
    ("numbers fewer than told", archive(tensor_pickle(count=1 << 40), bytes(8188)), "is larger than its bytes"),
    ("half a number", archive(tensor_pickle(), bytes(8193)), "half a number"),
    ("offset far away", archive(tensor_pickle(offset=1 << 40), ROW), "is larger than its bytes"),
    ("offset that is negative", archive(tensor_pickle(offset=-8), ROW), "strides that are none"),
    ("strides far away", archive(tensor_pickle(stride=1 << 40), ROW), "is larger than its bytes"),
    ("strides that are negative", archive(tensor_pickle(stride=-32), ROW), "strides that are none"),
    ("another shape", archive(tensor_pickle(rows=1 << 40), ROW), "another tensor than the metadata say"),
    ("another dtype", saved(torch.zeros(64, 32, dtype=torch.float64)), "another tensor than the metadata say"),
    ("a compressed bomb", archive(tensor_pickle(), bytes(1 << 24), zipfile.ZIP_DEFLATED), "damaged archive|stored as"),
    ("a compressed pickle", _deflated(bytes(1 << 24)), "damaged archive|stored as it is"),
    ("an entry of 4 GB", _entry_of(0xFFFFFFF0), "damaged archive"),
    ("a header that lies", _beyond_the_header(archive(tensor_pickle(), ROW)), "damaged archive"),
    ("a pickle that runs", archive(pickle.dumps(Evil("made"), 2), ROW), NO_PART),
    ("a bytearray of a terabyte", archive(BYTEARRAY, ROW), NO_PART),
    ("a value, not a tensor", archive(b"\x80\x02K\x01.", ROW), "it is no tensor"),
    ("a storage by another name", archive(tensor_pickle().replace(b"FloatStorage", b"_TypedStorag"), ROW), NO_PART),
    ("a storage that is a number", archive(NO_STORAGE, ROW), "a storage that is none"),
]
VALUE_THAT_RUNS = saved({"lr": Evil("made")})
