"""What step 1 made, in numbers: lengths, duplicates, unknown characters (OUTPUT_DIR/arrow/data_report.json)."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from common.files.json_files import write_json_flushed
from common.files.output_directory import Build
from common.prepare.duplicates import read_keys

logger = logging.getLogger(__name__)
FILE = "data_report.json"
QUANTILES = {"5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "99%": 0.99}


def write_report(build: Build, files: list[Path], copies: np.ndarray, max_seq_length: int | None) -> None:
    """Add lengths, tokens and bytes to the build's results, log them, and write all results to FILE.

    files, copies: as of `count_lengths`; max_seq_length: tokens that a record was truncated to.
    """
    lengths = count_lengths(files, copies)
    quantiles = length_quantiles(lengths)
    longest = max_seq_length or sys.maxsize
    tokens = sum(min(residues + 2, longest) * records for residues, records in lengths.items())
    written = sum(path.stat().st_size for path in build.paths["arrow"].rglob("*.arrow"))
    build.results |= {"tokens": tokens, "bytes": written, "residues": quantiles}
    logger.info("%s tokens, %.0f bytes a record", f"{tokens:,}", written / lengths.total())
    logger.info("Residues a protein: %s", ", ".join(f"{name} {value:,}" for name, value in quantiles.items()))
    write_json_flushed(build.paths["arrow"] / FILE, build.results, sort_keys=False)


def count_lengths(files: list[Path], copies: np.ndarray) -> Counter:
    """{residues before truncation: records} of the records in files of KEY that are no copies."""
    lengths: Counter = Counter()
    first = 0
    for keys in (keys for path in files for keys in read_keys(path)):
        kept = ~copies[first : first + len(keys)]
        found = np.unique(keys["residues"][kept], return_counts=True)
        lengths.update(dict(zip(*(column.tolist() for column in found), strict=True)))
        first += len(keys)
    return lengths


def length_quantiles(lengths: Counter) -> dict[str, int | float]:
    """Least, greatest and mean length, and QUANTILES: the least length that so large a share of records stays within.

    lengths: as of `count_lengths`, not empty.
    """
    values, counts = (np.array(column, np.int64) for column in zip(*sorted(lengths.items()), strict=True))
    within = np.cumsum(counts)
    places = {name: np.searchsorted(within, share * within[-1]) for name, share in QUANTILES.items()}
    quantiles = {name: int(values[place]) for name, place in places.items()}
    mean = round(float((values * counts).sum() / within[-1]), 1)
    return {"min": int(values[0]), **quantiles, "max": int(values[-1]), "mean": mean}
