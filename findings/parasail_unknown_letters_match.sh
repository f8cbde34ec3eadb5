#!/usr/bin/env bash
# parasail 1.3.4: its BLOSUM62 has no U (selenocysteine) and no O (pyrrolysine); each counts as *. * with * scores +1 and is a
# match, so that U and O are "identical", and U beside cysteine, which relatives have in its place, scores -4 as a stop would:
# scores and identities of selenoproteins are wrong both ways, without a warning. biopython 1.88 raises an error.
# Seen 2026-11-28, Python 3.11:
#   MKUTV and MKOTV: 5 of 5 match   U with U: +1, with O: +1, with C: -4   C with C: 9
# Fails if U and O are no match, or U with C scores more. What helps: write U as C and O as K before aligning.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet parasail==1.3.4 biopython==1.88
"$directory/venv/bin/python" - <<'END'
import parasail
from Bio.Align import PairwiseAligner, substitution_matrices


def score(one, other):
    return parasail.nw(one, other, 11, 1, parasail.blosum62).score


matches = parasail.nw_stats("MKUTV", "MKOTV", 11, 1, parasail.blosum62).matches
scores = [score(*pair) for pair in ("UU", "UO", "UC", "CC")]
print("MKUTV and MKOTV: {} of 5 match   U with U: {:+}, with O: {:+}, with C: {}   C with C: {}".format(matches, *scores))
try:
    PairwiseAligner(substitution_matrix=substitution_matrices.load("BLOSUM62")).score("MKUTV", "MKOTV")
    raise AssertionError("biopython aligned them")
except ValueError:
    pass
assert matches == 5 and scores == [1, 1, -4, 9]
END
