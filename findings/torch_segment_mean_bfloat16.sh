#!/usr/bin/env bash
# torch 2.13.0, CPU: segment_reduce and index_reduce_ sum bfloat16 in bfloat16; mean() and scatter_reduce_ sum in fp32.
# Mean-pooling the proteins of a pack by their lengths gives 0.256 for a protein of 1,000 rows of ones. index_add_ does either:
# into a vector it stops at 256, into rows it does not.
# Seen 2026-11-28, Python 3.11; the mean of 1,000 rows of ones:
#   segment_reduce 0.256   index_reduce_ 0.256   index_add_ of a vector 0.256
#   index_add_ of rows 1.000   scatter_reduce_ 1.000   mean 1.000
# Fails if segment_reduce gives more than 0.5. What helps: .float() before pooling.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$directory/venv/bin/python" - 2>/dev/null <<'END'
import torch

rows, protein = torch.ones(1000, 8, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long)
empty, places = torch.zeros(1, 8, dtype=torch.bfloat16), protein[:, None].expand(-1, 8)
found = [
    torch.segment_reduce(rows, "mean", lengths=torch.tensor([1000])),
    empty.index_reduce(0, protein, rows, "mean", include_self=False),
    empty[0, :1].index_add(0, protein, rows[:, 0]) / 1000,
    empty.index_add(0, protein, rows) / 1000,
    empty.scatter_reduce(0, places, rows, "mean", include_self=False),
    rows.mean(0),
]
values = [round(float(each.flatten()[0]), 3) for each in found]
names = ("segment_reduce", "index_reduce_", "index_add_ of a vector", "index_add_ of rows", "scatter_reduce_", "mean")
print("   ".join(f"{name} {value:.3f}" for name, value in zip(names, values, strict=True)))
assert max(values[:3]) < 0.5 and min(values[3:]) > 0.99
END
