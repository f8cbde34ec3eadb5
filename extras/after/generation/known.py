"""What is known of generated proteins: how many, their score, composition and nearest training protein.

python -m extras.after.generation.known GENERATED.fasta processed/arrow

The FASTA file is generate.py's, the directory the training data as step 1 wrote them. The nearest protein is searched
by MMseqs2, among at most SEARCHED training proteins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from common.cli import UserError, run
from common.data.token_store import open_split
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.after.generation.fasta import STANDARD
from extras.after.generation.novelty import nearest_identities
from extras.command_line import positional
from extras.prepare.relatives import SEARCHED, stored_proteins
from extras.prepare.sources.proteins import proteins_of

LOG_P = re.compile(r"^>.* log_p=(-?[0-9.]+)", re.M)


def composition(proteins: Iterable[str]) -> np.ndarray:
    """Shares of the standard residues, float64 [20], in the order of STANDARD."""
    counts = np.zeros(256, np.int64)
    for text in proteins:
        counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
    of_standard = counts[np.frombuffer(STANDARD.encode(), np.uint8)]
    return of_standard / max(1, of_standard.sum())


def known(fasta: Path, arrow: Path) -> list[str]:
    """Lines for the terminal. UserError if one of the two holds no proteins."""
    generated = [residues.decode() for _, residues in proteins_of(str(fasta))]
    if not generated:
        raise UserError(f"{fasta}: no record is a protein")
    scores = [float(score) for score in LOG_P.findall(fasta.read_text())]
    store = open_split(arrow, "train", ESM2_TOKENS)
    training = list(islice(stored_proteins(store, range(len(store))), SEARCHED))
    ours, theirs = composition(generated), composition(training)
    most = int(abs(ours - theirs).argmax())
    lines = [
        f"proteins     {len(generated):,}, {len(set(generated)):,} different, {np.mean([*map(len, generated)]):.0f} "
        "residues in the mean",
        f"score        {np.mean(scores):.3f} nats a residue, the model's log-probability; uniform residues: -2.996",
        f"composition  {100 * abs(ours - theirs).sum() / 2:.1f} % away from training's; most so {STANDARD[most]}, "
        f"{100 * ours[most]:.1f} % ({100 * theirs[most]:.1f} % in training)",
    ]
    with TemporaryDirectory(prefix="nearest-") as scratch:
        nearest = nearest_identities(generated, training, Path(scratch), len(os.sched_getaffinity(0)))
    if nearest is None:
        return [*lines, "nearest      not known: needs MMseqs2, which is not installed"]
    found = nearest > 0
    lines.append(f"nearest      {found.sum():,} of {len(nearest):,} have a training protein near them (MMseqs2)")
    if found.any():
        lines[-1] += (
            f"; identity {100 * nearest[found].mean():.0f} % in their mean, at most {100 * nearest.max():.0f} %"
        )
    return lines


def main() -> None:
    fasta, arrow = positional(__doc__, "python -m extras.after.generation.known GENERATED.fasta processed/arrow", 2)
    if not Path(fasta).is_file():
        raise UserError(f"{fasta}: no such file")
    print("\n".join(known(Path(fasta), Path(arrow))))


if __name__ == "__main__":
    run(main)
