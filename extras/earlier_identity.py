"""Compatibility: how earlier versions knew data, by names, sizes and times. Their records and checkpoints stay valid.

All that makes those forms is here; nothing new is written in them, but for an output that was begun in one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from extras.prepare.output_directory import BUILDING, JOURNAL, MADE_FROM, Journal, read_record


def describe_file(path: Path) -> dict:
    """A local source of step 0, in its record."""
    return {"source": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}


def list_files(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """The cluster table of step 1, in its record."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def hash_listing(paths: list[Path]) -> str:
    """The CSV files of step 1, in its record."""
    return hashlib.sha256(repr(list_files(paths)).encode()).hexdigest()


def list_names(revision: str | None, files: Iterable[tuple[str, int]]) -> list:
    """The files (path, size) of a split of text or of a stream: hashed as a repr."""
    return [revision] + [[os.path.basename(path), size] for path, size in files]


def fingerprint(directory: Path, rows: int) -> str:
    """Of a prepared split, in its state.json: of the beginnings of its files. "" for one that is of another tool."""
    paths = sorted(directory.glob("data-*.arrow"))
    try:
        with pa.memory_map(str(paths[0])) as file, pa.ipc.open_stream(file) as stream:
            features = json.loads(stream.schema.metadata[b"huggingface"])["info"]["features"]
    except (IndexError, KeyError, TypeError, ValueError):
        return ""
    digest = hashlib.sha256(json.dumps([features, rows, sum(path.stat().st_size for path in paths)]).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def recorded_form(parent: Path, names: Iterable[str], now: dict, earlier: dict, overwrite: bool) -> dict:
    """`now`, or `earlier` where an output parent/name is recorded so, or what a killed run left of one.

    With `overwrite`, what is complete does not count.
    """
    earlier = json.loads(json.dumps(earlier))
    begun = Journal(parent / BUILDING / JOURNAL).done(MADE_FROM)
    records = [begun] + [read_record(parent / name) for name in names if not overwrite]
    return earlier if any(record and record["made_from"] == earlier for record in records) else now
