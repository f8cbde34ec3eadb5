"""How earlier versions identified data (names, sizes, times), so that their records and checkpoints stay valid.

Nothing new is written in these forms, except for an output that was begun in one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from extras.prepare.output_directory import BUILDING, JOURNAL, MADE_FROM, Journal, read_record

logger = logging.getLogger(__name__)


def describe_file(path: Path) -> dict:
    """A local source, as 0.download_data.py recorded it."""
    return {"source": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}


def list_files(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """The cluster table, as 1.tokenize_uniref_csv.py recorded it."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def hash_listing(paths: list[Path]) -> str:
    """The CSV files, as 1.tokenize_uniref_csv.py recorded them."""
    return hashlib.sha256(repr(list_files(paths)).encode()).hexdigest()


def list_names(revision: str | None, files: Iterable[tuple[str, int]]) -> list:
    """The files (path, size) of a text split or a stream; its repr was hashed."""
    return [revision] + [[os.path.basename(path), size] for path, size in files]


def fingerprint(directory: Path, rows: int) -> str:
    """A hash of the first MiB of each file of a prepared split; "" if another tool wrote it."""
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
    """`now`, or `earlier` if an output parent/name, or the journal of an interrupted run, was recorded in that form.

    With `overwrite`, complete outputs are ignored.
    """
    earlier = json.loads(json.dumps(earlier))
    begun = Journal(parent / BUILDING / JOURNAL).done(MADE_FROM)
    records = [begun] + [read_record(parent / name) for name in names if not overwrite]
    return earlier if any(record and record["made_from"] == earlier for record in records) else now


def clustered_form(output: Path, now: dict, earlier: dict, added: Iterable[str], overwrite: bool) -> dict:
    """`now`, or the form without the keys `added` that an earlier version recorded for a complete `output`.

    Its clusters and what it held out of them were others, so the work of its interrupted runs is not resumed.
    """
    record = None if overwrite else read_record(output)
    for form in (now, earlier):
        recorded = json.loads(json.dumps({name: value for name, value in form.items() if name not in added}))
        if record and record["made_from"] == recorded:
            logger.warning(
                "%s was split by an earlier version: relatives may stand on both sides, and one family may fill a "
                "held-out split: --overwrite makes it anew",
                output,
            )
            return recorded
    return now
