"""How near generated proteins are to those that a model was trained on, by MMseqs2."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from common.cli import log_every
from extras.prepare.cluster_splits import COVERAGE, PROGRAM, PROTEINS, run_mmseqs


def nearest_identities(
    proteins: Sequence[str], training: Iterable[str], scratch: Path, threads: int = 1
) -> np.ndarray | None:
    """float64 [proteins]: of each the largest identity to a training protein, 0 to 1, over COVERAGE of both; 0 where
    the search finds none, and it finds none of repeats but exact copies. None if MMseqs2 is not installed.

    scratch: an existing directory, for sequences and index. UserError if MMseqs2 fails.
    """
    if shutil.which(PROGRAM) is None:
        return None
    wanted, copies = set(proteins), set()  # the search finds no repeat: findings/mmseqs_repeats_not_found.sh

    def noted() -> Iterator[str]:
        for text in training:
            if text in wanted:
                copies.add(text)
            yield text

    paths = scratch / "generated.fasta", scratch / "training.fasta"
    for path, texts in zip(paths, (proteins, noted()), strict=True):
        with open(path, "w") as file:
            file.writelines(f">{number}\n{text}\n" for number, text in enumerate(texts))
    hits = scratch / "nearest.tsv"
    command = [PROGRAM, "easy-search", *paths, hits, scratch / "work", "-c", COVERAGE, "--cov-mode", 0]
    command += [*PROTEINS, "--alignment-mode", 3, "--format-output", "query,fident", "--threads", threads]
    with log_every("Searching for the nearest training proteins"):
        run_mmseqs(command, scratch / "log", "nearest training proteins")
    nearest = np.array([text in copies for text in proteins], float)
    for line in hits.read_text().splitlines():
        query, identity = line.split("\t")
        nearest[int(query)] = max(nearest[int(query)], float(identity))
    return nearest
