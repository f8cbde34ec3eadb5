"""What score.py writes: a table with scores or matrices, each with a record of what it was made from."""

from __future__ import annotations

import csv
import json
import logging
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.cli import UserError
from common.figures import FigureFlags
from common.files.content_hash import content_hash
from common.files.safe_files import file_name, is_plain_name, read_json, replace_flushed
from extras.after.downstream.outputs import Manifest, Output, writing
from extras.after.inference.mutant_matrix import (
    SHOWN,
    Mutant,
    Shares,
    extremes,
    extremes_table,
    shares,
    write_matrix,
)
from extras.after.inference.mutant_picture import draw
from extras.after.inference.score_columns import ERROR

logger = logging.getLogger(__name__)
RECORD = "scores.json"  # in a directory of --all_single_mutants
SCRIPT = "score.py"
EXTREMES = "best_and_worst.csv"  # beside it
SAY_NOTHING = "say nothing of positions, as the two residues explain nearly all of them"
SAID, NAMED = 20, 4  # matrices whose variance is printed, and that a warning names
TABLES = 3  # proteins whose best and worst mutants are printed


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


def write(
    output: Path, record: Path, header: list[str], rows: list[dict], about: dict, flag: str = "--output"
) -> None:
    """Write the scores and their record (`about` and a checksum): flushed before they get their names. flag: for
    errors."""
    with writing(output, flag), replace_flushed(output) as partial:
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header)
            writer.writeheader()
            writer.writerows(rows)
        # The record first: scores are never beside a record of other input.
        with replace_flushed(record) as path:
            path.write_text(json.dumps(about | {"sha256": content_hash(partial)}, indent=1))


def write_matrices(
    output: Output,
    proteins: dict[str, bytes],
    scores: dict[str, list[np.ndarray]],
    first_residue: int,
    figures: FigureFlags,
    about: dict,
) -> dict[str, Shares]:
    """NAME.SCORE.csv of each protein and score, and of the first score NAME.png, and the best and worst mutants, which
    are logged too; then their record, with what each table's variance follows from, which is returned."""
    variance: dict[str, Shares] = {}
    taken: set[str] = set()
    main = next(iter(scores))
    found: dict[str, tuple[list[Mutant], list[Mutant]]] = {}
    with output.replaced() as directory:
        for number, (name, text) in enumerate(proteins.items()):
            stem = file_name(name, taken)
            for column, matrices in scores.items():
                write_matrix(directory / f"{stem}.{column}.csv", text, matrices[number], first_residue)
                if not column.endswith(ERROR):
                    variance[f"{stem}.{column}"] = shares(text, matrices[number])
            first = (text, scores[main][number], first_residue)
            found[name] = extremes(*first)
            draw(directory / stem, taken, f"{name[:60]}: {main}", *first, figures)
        write_extremes(directory / EXTREMES, main, found)
        about = about | {"variance": {name: each._asdict() for name, each in variance.items()}}
        (directory / RECORD).write_text(json.dumps(about, indent=1))
    log_extremes(main, found)
    return variance


def write_extremes(path: Path, column: str, found: dict[str, tuple[list[Mutant], list[Mutant]]]) -> None:
    """A row for each of the best and worst mutants of each protein; rank: 1 is the best, or the worst."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["protein", "end", "rank", "mutant", column])
        for name, ends in found.items():
            for end, mutants in zip(("best", "worst"), ends, strict=True):
                for rank, mutant in enumerate(mutants, 1):
                    writer.writerow([name, end, rank, mutant.name, f"{mutant.score:.6f}"])


def log_extremes(column: str, found: dict[str, tuple[list[Mutant], list[Mutant]]]) -> None:
    """A table each, of at most `TABLES` proteins."""
    some = {name: ends for name, ends in found.items() if ends[1]}
    for name, ends in list(some.items())[:TABLES]:
        table = "\n".join(extremes_table(*ends))
        logger.info("%s: the best and worst %d single mutants by %s, nats\n%s", name[:60], SHOWN, column, table)
    if some:
        more = f"; of {len(some) - TABLES:,} more proteins: {EXTREMES}" if len(some) > TABLES else ""
        logger.info("Scores say what the model finds likely, not what is stable or works: measure several%s", more)


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
    if alone := [name for name, found in variance.items() if found.of_residues_alone]:
        named = ", ".join(alone[:NAMED]) + (", ..." if len(alone) > NAMED else "")
        logger.warning("%d of %d matrices %s: %s", len(alone), len(variance), SAY_NOTHING, named)
