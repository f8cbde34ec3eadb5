"""Hostile pickles, which run, build, call or allocate what no checkpoint needs: (name, pickle, error)."""

from __future__ import annotations

import os
import pickle
import struct


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


PATH_CLASS = b"\x80\x02cpathlib\nPosixPath\n"
TEXT = b"X\x04\x00\x00\x00evil"
BUILD_ON_CLASS = PATH_CLASS + b"}(X\x04\x00\x00\x00_strX\x04\x00\x00\x00evilub."  # the attack that was possible
DEEP = b"\x80\x04)" + 50_000 * b"\x85"
NO_PART = "which is no part of a checkpoint"
PICKLES = [
    ("reduce of os.system", b"\x80\x02cos\nsystem\n(" + TEXT + b"tR.", NO_PART),
    ("reduce of builtins.eval by STACK_GLOBAL", b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93(" + TEXT + b"tR.", NO_PART),
    ("attribute of an allowed class", b"\x80\x04\x8c\x07pathlib\x8c\x12PosixPath.__init__\x93.", NO_PART),
    ("function of torch", b"\x80\x02ctorch\nload\n(" + TEXT + b"tR.", NO_PART),
    ("name that is no text", b"\x80\x04K\x01K\x02\x93.", "a name that is no text"),
    ("name of a deep tuple", DEEP + b"K\x01\x93.", "a name that is no text"),
    ("BUILD on an allowed class", BUILD_ON_CLASS, "sets attributes of something"),
    ("BUILD on a dict", b"\x80\x02}}b.", "sets attributes of something"),
    ("BUILD on a dtype", b"\x80\x02ctorch\nfloat32\n}b.", "sets attributes of something"),
    ("call of a call", PATH_CLASS + b")R)R.", "calls something"),
    ("call of a dict", b"\x80\x02})R.", "calls something"),
    ("call without a tuple", PATH_CLASS + b"}R.", "calls something"),
    ("extension", b"\x80\x02\x82\x01.", "opcode EXT1"),
    ("INST", b"(ios\nsystem\n.", "opcode INST"),
    ("OBJ", b"(cos\nsystem\no.", NO_PART),
    ("OBJ of an allowed class", b"(cpathlib\nPosixPath\no.", "opcode OBJ"),
    ("NEWOBJ_EX", PATH_CLASS + b")}\x92.", "opcode NEWOBJ_EX"),
    ("persistent id by name", b"Pevil\n.", "opcode PERSID"),
    ("persistent id", b"\x80\x02" + TEXT + b"Q.", "damaged pickle"),
    ("buffers", b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    ("bytearray of 4 EiB", b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.", "damaged pickle"),
    ("bytes of 4 EiB", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.", "damaged pickle"),
    ("text of 4 EiB", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "damaged pickle"),
    ("number of 2 GiB", b"\x80\x02\x8b\xff\xff\xff\x7fx.", "damaged pickle"),
    ("memo of 32 GiB", b"\x80\x02Nr\xff\xff\xff\xff.", "it is no metadata"),
    ("memo that is not there", b"\x80\x02h\x07.", "damaged pickle"),
    ("no end", b"\x80\x02N", "damaged pickle"),
    ("nothing", b"", "damaged pickle"),
    ("two values", b"\x80\x02NN.", "damaged pickle"),
    ("a mark alone", b"\x80\x02(.", "it is no metadata"),
    ("APPENDS without a mark", b"\x80\x02]e.", "damaged pickle"),
    ("APPEND to a text", b"\x80\x02" + TEXT + b"Na.", "appends to something"),
    ("SETITEM of a list", b"\x80\x02]NNs.", "sets items of something"),
    ("key of a deep tuple", b"\x80\x04}" + DEEP[2:] + b"Ns.", "a key that is neither"),
    ("deep tuple", DEEP + b".", "it is no metadata"),
    ("no pickle", b"nonsense", "damaged pickle"),
    ("another value", pickle.dumps([1]), "it is no metadata"),
]
