"""What score.py writes: a table with scores or matrices, each with a record of what it was made from."""

from __future__ import annotations

import csv
import json
import logging
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.cli import UserError
from common.files.content_hash import content_hash
from common.files.safe_files import file_name, is_plain_name, read_json, replace_flushed
from extras.after.downstream.outputs import Manifest, Output, writing
from extras.after.inference.mutant_matrix import WARNING, Shares, draw, shares, write_matrix

logger = logging.getLogger(__name__)
ERROR = "_error"  # ends the name of a column of standard errors over contexts
RECORD = "scores.json"  # in a directory of --all_single_mutants
SCRIPT = "score.py"
SAID = 20  # matrices whose variance is printed


def written(output: Path) -> list[Path]:
    """All files that a run writes: the scores, the record of their input, and the partial files of both."""
    final = (output, output.with_name(f"{output.name}.json"))
    return [*final, *(path.with_name(f"{path.name}.partial") for path in final)]


def is_finished(output: Path, record: Path, made_from: dict) -> bool:
    """Whether the file has the scores of this input. UserError if it has any other content."""
    if not output.exists():
        return False
    why = "exists without a record of what it was made from"
    with suppress(OSError, ValueError, KeyError):
        recorded = read_json(record)
        if recorded["made_from"] != made_from:
            why = "was made from other input or arguments"
        elif recorded["sha256"] == content_hash(output):
            return True
        else:
            why = "has changed since it was written"
    raise UserError(f"--output {output}: {why}: give --overwrite to replace it, or another --output")


def write(output: Path, record: Path, header: list[str], rows: list[dict], about: dict) -> None:
    """Write the scores and their record (`about` and a checksum): flushed before they get their names."""
    with writing(output, "--output"), replace_flushed(output) as partial:
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header)
            writer.writeheader()
            writer.writerows(rows)
        # The record first: scores are never beside a record of other input.
        with replace_flushed(record) as path:
            path.write_text(json.dumps(about | {"sha256": content_hash(partial)}, indent=1))


def write_matrices(
    output: Output, proteins: dict[str, bytes], scores: dict[str, list[np.ndarray]], first_residue: int, about: dict
) -> dict[str, Shares]:
    """NAME.SCORE.csv of each protein and score, and NAME.png of the first score; then their record, with what each
    table's variance follows from, which is returned too."""
    variance: dict[str, Shares] = {}
    taken: set[str] = set()
    with output.replaced() as directory:
        for number, (name, text) in enumerate(proteins.items()):
            stem = file_name(name, taken)
            for column, matrices in scores.items():
                write_matrix(directory / f"{stem}.{column}.csv", text, matrices[number], first_residue)
                if not column.endswith(ERROR):
                    variance[f"{stem}.{column}"] = shares(text, matrices[number])
            column = next(iter(scores))
            draw(directory / f"{stem}.png", f"{name[:60]}: {column}", text, scores[column][number], first_residue)
        about = about | {"variance": {name: each._asdict() for name, each in variance.items()}}
        (directory / RECORD).write_text(json.dumps(about, indent=1))
    return variance


def earlier_matrices(output: Path) -> Manifest | None:
    """What a version without manifests left there."""
    try:
        content = read_json(output / RECORD)
        names = (RECORD, *filter(is_plain_name, content["sha256"]))
        return Manifest({"script": SCRIPT} | content["made_from"], True, dict.fromkeys(names))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def log_variance(variance: dict[str, Shares]) -> None:
    """A line each, of at most `SAID` matrices, and a warning of those whose scores say nothing of positions."""
    for name, found in list(variance.items())[:SAID]:
        logger.info("%s: %s", name, found)
    if len(variance) > SAID:
        logger.info("... and of %s more matrices: %s", f"{len(variance) - SAID:,}", RECORD)
    alone = sum(found.of_residues_alone for found in variance.values())
    if alone:
        logger.warning("%d of %d matrices: %s", alone, len(variance), WARNING)
