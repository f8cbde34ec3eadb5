"""Held-out proteins that have a relative in training: how far a split separates families.

    python -m extras.prepare.relatives OUTPUT_DIR [IDENTITY]     of a finished step 1; default: 0.5, or its --cluster

A relative aligns with at least `identity` over COVERAGE of both proteins: what `--cluster` keeps on one side. It is
searched by MMseqs2; where that is not installed, only exact copies are found. Step 1 does this at its end for training
splits of up to SEARCHED proteins, as the time grows with their number; this command does it for any.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from common.cli import UserError, log_every, run
from common.data.alphabet import recorded_alphabet
from common.data.token_store import TokenStore, open_split
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.command_line import positional
from extras.prepare.cluster_splits import COVERAGE, PROGRAM, PROTEINS, run_mmseqs
from extras.prepare.output_directory import read_record
from extras.prepare.splits import SPLITS

logger = logging.getLogger(__name__)
IDENTITY = 0.5  # of UniRef50's clusters
SEARCHED = 100_000  # training proteins, without --cluster: a minute or two
HELP = "Say how many test proteins have a relative in training: by MMseqs2 where it is installed."
SAMPLE = 1_000  # held-out proteins: the standard error of their share is at most 1.6 %
SEARCH, COPIES = "MMseqs2 search", "exact copies"
WINDOW = 1 << 14  # records read at a time


class Relatives(NamedTuple):
    """found: bool [held-out proteins]; by: SEARCH or COPIES."""

    found: np.ndarray
    by: str


def relatives(
    held_out: Sequence[str], training: Iterable[str], identity: float, scratch: Path, threads: int = 1
) -> Relatives:
    """Which held-out sequences have a relative among those of training.

    identity: as `cluster_records`; scratch: an existing directory, for the sequences and the index of MMseqs2.
    """
    queries = [_letters(text) for text in held_out]
    wanted, copies = set(queries), set()
    searched = bool(queries) and shutil.which(PROGRAM) is not None
    with open(scratch / "training.fasta", "w") if searched else nullcontext() as file:
        for number, text in enumerate(map(_letters, training)):
            if text in wanted:
                copies.add(text)
            if file is not None:
                file.write(f">{number}\n{text}\n")
    is_relative = np.array([text in copies for text in queries], bool)
    if searched:
        try:
            is_relative[_search(queries, identity, scratch, threads)] = True
        except UserError as error:
            logger.warning("%s: only exact copies are counted", error)
            searched = False
    return Relatives(is_relative, SEARCH if searched else COPIES)


def _letters(text: str) -> str:
    """The identity of a protein here; as `write_numbered` has it."""
    return re.sub("[^A-Z]", "X", text.upper())


def _search(queries: list[str], identity: float, scratch: Path, threads: int) -> list[int]:
    """Numbers of the queries that hit scratch/training.fasta."""
    fasta, hits = scratch / "held_out.fasta", scratch / "hits.tsv"
    fasta.write_text("".join(f">{number}\n{text}\n" for number, text in enumerate(queries)))
    command = [PROGRAM, "easy-search", fasta, scratch / "training.fasta", hits, scratch / "work", *PROTEINS]
    command += ["--min-seq-id", identity, "-c", COVERAGE, "--cov-mode", 0, "--max-accept", 1]
    command += ["--format-output", "query", "--threads", threads]
    with log_every("Searching for relatives in training"):
        run_mmseqs(command, scratch / "log", "relatives of held-out proteins")
    return sorted({int(line) for line in hits.read_text().split()})


def say_relatives(test: Iterable[str], training: Iterable[str]) -> dict:
    """Count, log and return for results.json how many different test proteins have a relative in training:
    {"proteins", "with_relative", "by", "identity", "coverage"}; of at most SAMPLE, in the order of the alphabet."""
    proteins = sorted(set(test))
    with TemporaryDirectory(prefix="relatives-") as scratch:
        threads = len(os.sched_getaffinity(0))
        related = relatives(proteins[:SAMPLE], sorted(set(training)), IDENTITY, Path(scratch), threads)
    number, sampled = int(related.found.sum()), len(related.found)
    _log("test", number, sampled, len(proteins), related.by, IDENTITY)
    return {
        "proteins": sampled,
        "with_relative": number,
        "by": related.by,
        "identity": IDENTITY if related.by == SEARCH else None,
        "coverage": COVERAGE if related.by == SEARCH else None,
    }


def count_relatives(arrow: Path, splits: Sequence[str], identity: float, scratch: Path, threads: int) -> dict:
    """Count, log and return for the record of step 1's output.

    arrow: the directory of the splits; splits: those with records, of validation and test. Returns {split:
    {"proteins": searched, "with_relative": of these}} with "by", "identity" and "coverage".
    """
    shutil.rmtree(scratch, ignore_errors=True)  # MMseqs2 would go on with the files of a killed search
    scratch.mkdir()
    alphabet = recorded_alphabet(arrow) or ESM2_TOKENS
    stores = {split: open_split(arrow, split, alphabet) for split in ("train", *splits)}
    samples = {split: _sample(len(stores[split])) for split in splits}
    held_out = [text for split, records in samples.items() for text in stored_proteins(stores[split], records)]
    training = stored_proteins(stores["train"], range(len(stores["train"])))
    related = relatives(held_out, training, identity, scratch, threads)
    shutil.rmtree(scratch)
    counts: dict = {"by": related.by, "identity": identity, "coverage": COVERAGE}
    first = 0
    for split, records in samples.items():
        number = int(related.found[first : first + len(records)].sum())
        first += len(records)
        counts[split] = {"proteins": len(records), "with_relative": number}
        _log(split, number, len(records), len(stores[split]), related.by, identity)
    return counts


def _log(split: str, number: int, sampled: int, records: int, by: str, identity: float) -> None:
    of = f"{number:,} of {sampled:,} proteins" + (f" (a sample of {records:,})" if sampled < records else "")
    if by == SEARCH:
        criterion = f"identity of at least {identity:g} over {COVERAGE:.0%} of both"
        logger.info("%s: %s have a relative in train (%s, %s)", split, of, by, criterion)
    else:
        logger.info("%s: %s are exact copies of training ones; relatives were not searched (MMseqs2)", split, of)


def _sample(records: int) -> np.ndarray:
    """Numbers of at most SAMPLE records, int64, sorted: the same ones each time."""
    return np.sort(np.random.default_rng(0).choice(records, min(records, SAMPLE), replace=False))


def stored_proteins(store: TokenStore, records: range | np.ndarray) -> Iterator[str]:
    """The residues of these records, as they are trained on."""
    letters = store.tokens.amino_acids
    letters = np.where(letters == 0, ord("X"), letters).astype(np.uint8)
    for first in range(0, len(records), WINDOW):
        chosen = np.asarray(records[first : first + WINDOW])
        ids, offsets = store.gather(chosen, np.ones_like(chosen), store.lengths(chosen) - 2)  # no <cls>, no <eos>
        text = letters[ids].tobytes().decode()
        yield from (text[begin:end] for begin, end in pairwise(offsets.tolist()))


def main() -> None:
    directory, *identity = positional(__doc__, "python -m extras.prepare.relatives OUTPUT_DIR [IDENTITY]", 1, 2)
    arrow = Path(directory) / "arrow"
    record = read_record(arrow)
    if record is None or not record["made_from"].get("line_by_line"):
        raise UserError(f"{arrow}: not a finished output of step 1 with a protein a record: give its --output_dir")
    try:
        least = float(identity[0]) if identity else record["made_from"].get("cluster", IDENTITY)
    except ValueError:
        least = 0.0
    if not 0 < least <= 1:
        raise UserError(f"IDENTITY {identity[0]}: a number above 0 and up to 1, as 0.5")
    held_out = [split for split in SPLITS[1:] if record["results"][split]]
    with TemporaryDirectory(prefix="relatives-") as scratch:
        count_relatives(arrow, held_out, least, Path(scratch) / "search", len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    run(main)
