#!/usr/bin/env bash
# hnswlib 0.8.0: where many vectors of an index are equal (a protein in many copies, a peptide, an embedding that failed), the
# links of the graph go from copy to copy, and other vectors are no longer reached: not even asked for themselves. No error, no
# warning: recall measured on data without copies says nothing of it.
# Seen 2026-11-28, Python 3.11, 5,000 random vectors of 64, cosine, M 16, ef_construction 200, ef 50, one thread; share of them
# that find themselves as the nearest:
#   copies of one more vector: 0, 1.000   1000 in between, 0.875   5000 before, 0.000
# Fails if with 5,000 copies before them more than a half find themselves. What helps: each vector once.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet hnswlib==0.8.0 numpy==2.4.6
"$directory/venv/bin/python" - <<'END'
import hnswlib
import numpy as np

random = np.random.default_rng(0)
others = random.normal(size=(5000, 64)).astype(np.float32)
copied = random.normal(size=(1, 64)).astype(np.float32)


def share(copies, shuffled):
    vectors = np.vstack([copied.repeat(copies, 0), others])
    order = random.permutation(len(vectors)) if shuffled else np.arange(len(vectors))
    index = hnswlib.Index("cosine", 64)
    index.init_index(len(vectors), ef_construction=200, M=16, random_seed=1)
    index.add_items(vectors[order], order, num_threads=1)
    index.set_ef(50)
    own = np.arange(copies, len(vectors))
    return (index.knn_query(others, k=1, num_threads=1)[0][:, 0] == own).mean()


none, between, before = share(0, False), share(1000, True), share(5000, False)
print(f"copies of one more vector: 0, {none:.3f}   1000 in between, {between:.3f}   5000 before, {before:.3f}")
assert none > 0.99 and between < 0.97 and before < 0.5
END
