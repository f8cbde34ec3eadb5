#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: numpy averages float16 in fp32, but bfloat16 (of ml_dtypes) in bfloat16 itself, row after
# row. Beyond 256 equal rows nothing is added any more: the mean-pooled embedding of a long protein is too small, without a
# warning. The mean of 1,000 rows of ones is 0.256.
# Seen 2026-11-28, Python 3.11:
#   mean of 1000 ones: float16 1.0, bfloat16 0.255859375
#   1000 rows around 1.0: largest error of the mean: float16 0.0005, bfloat16 0.4996
# Fails if the bfloat16 mean of the ones comes within 0.5 of 1. What helps: .astype(np.float32) before .mean(0).
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
"$directory/venv/bin/python" - <<'END'
import ml_dtypes
import numpy as np

ones = np.ones((1000, 8))
half, brain = (ones.astype(kind).mean(0)[0] for kind in (np.float16, ml_dtypes.bfloat16))
print(f"mean of 1000 ones: float16 {half}, bfloat16 {brain}")

rows = np.random.default_rng(0).normal(1, 0.3, (1000, 8))
errors = []
for kind in (np.float16, ml_dtypes.bfloat16):
    stored = rows.astype(kind)
    exact = stored.astype(np.float64).mean(0)
    errors.append(abs(stored.mean(0).astype(np.float64) - exact).max())
print(f"1000 rows around 1.0: largest error of the mean: float16 {errors[0]:.4f}, bfloat16 {errors[1]:.4f}")
assert half == 1 and brain < 0.5 and errors[0] < 0.001 < 0.3 < errors[1]
END
