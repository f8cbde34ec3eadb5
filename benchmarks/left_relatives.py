"""Which relatives a split by clusters leaves in training: every held-out protein aligned with every training protein.

pip install parasail==1.3.4
python -m benchmarks.left_relatives --dataset_dir processed/arrow [--output table.md]

Smith and Waterman's alignment of all pairs, so that it shows what a search by k-mers misses: BLOSUM62, a gap of n
residues costs 10 + n, no correction for composition. Identity: identical pairs over the alignment's columns.
Coverage: aligned residues over a protein's. A protein counts in the first row that one of its relatives fits.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any, NamedTuple

from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.data.token_store import open_split
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.relatives import stored_proteins

CHANCE = 1e-3  # expected by chance of a held-out protein (Karlin and Altschul; their constants for 11, 1)
LAMBDA, LOG_K = 0.267, math.log(0.041)
OPEN, EXTEND = 11, 1
ROWS = (
    "identity 0.5 over 80 % of both",
    "identity 0.5 over 80 % of one: a fragment, or a domain alone",
    "identity 0.5 over less: a shared domain",
    "identity 0.4 to 0.5 over 80 % of both",
    "identity 0.3 to 0.4 over 80 % of both",
    "other relatives by chance in less than one search of a thousand",
)


class Relative(NamedTuple):
    identity: float
    coverage: float  # of the one that is covered less
    other: float


def row_of(relative: Relative) -> int:
    """Index of ROWS."""
    if relative.identity >= 0.5:
        return 0 if relative.coverage >= 0.8 else 1 if relative.other >= 0.8 else 2
    if relative.coverage >= 0.8 and relative.identity >= 0.3:
        return 3 if relative.identity >= 0.4 else 4
    return 5


def by_chance(score: float, query: int, searched: int) -> float:
    """How many such scores a query of so many residues has by chance among so many residues."""
    return query * searched * math.exp(LOG_K - LAMBDA * score)


def relatives(parasail: Any, query: str, others: list[str], searched: int) -> list[Relative]:
    profile = parasail.profile_create_sat(query, parasail.blosum62)
    found = []
    for other in others:
        score = parasail.sw_striped_profile_sat(profile, other, OPEN, EXTEND).score
        if by_chance(score, len(query), searched) < CHANCE:
            traced = parasail.sw_trace_striped_sat(query, other, OPEN, EXTEND, parasail.blosum62).traceback
            identical = sum(a == b for a, b in zip(traced.query, traced.ref, strict=True))
            covered = [
                sum(letter != "-" for letter in text) / len(whole)
                for text, whole in ((traced.query, query), (traced.ref, other))
            ]
            found.append(Relative(identical / len(traced.query), min(covered), max(covered)))
    return found


def table(splits: dict[str, list[list[Relative]]]) -> list[str]:
    """splits: by name, of each held-out protein its relatives in training."""
    counted = {name: Counter(min(map(row_of, each), default=None) for each in of) for name, of in splits.items()}
    lines = ["| held-out proteins with a relative in training of | " + " | ".join(counted) + " |"]
    lines.append("|---|" + "--:|" * len(counted))
    for number, name in [*enumerate(ROWS), (None, "none")]:
        lines.append(f"| {name} | " + " | ".join(f"{count[number]:,}" for count in counted.values()) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", required=True)
    parser.add_argument("--output")
    args = parser.parse_args()
    try:
        import parasail
    except ImportError:
        raise UserError("parasail is not installed: pip install parasail==1.3.4") from None
    stores = {split: open_split(args.dataset_dir, split, ESM2_TOKENS) for split in ("train", "validation", "test")}
    proteins = {split: list(stored_proteins(store, range(len(store)))) for split, store in stores.items()}
    training = proteins.pop("train")
    searched = sum(map(len, training))
    found: dict[str, list[list[Relative]]] = {}
    for split, held_out in proteins.items():
        found[split] = []
        for number, query in enumerate(held_out):
            found[split].append(relatives(parasail, query, training, searched))
            if number % 100 == 99:
                say(f"{split}: {number + 1} of {len(held_out)}")
    title = "# Relatives that a split by clusters leaves in training"
    counts = " and ".join(f"{len(each):,} {split}" for split, each in proteins.items())
    about = f"Of {counts} proteins, beside all {len(training):,} of training."
    where = where_measured("benchmarks.left_relatives", "numpy")
    publish("\n".join([title, "", *where, "", about, "", *table(found)]), args.output)


if __name__ == "__main__":
    run(main)
