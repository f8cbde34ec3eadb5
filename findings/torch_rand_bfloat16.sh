#!/usr/bin/env bash
# torch 2.13.0, CPU: rand() in bfloat16 is not uniform near 0: of 1,000 numbers two are exactly 0, so that `torch.rand(...,
# dtype=x.dtype) < rate` chooses too many at small rates: three times as many at 0.001 (random residues, mutations, dropped
# paths). bernoulli() of the same rate is right.
# Seen 2026-11-28, Python 3.11, 1,000,000 numbers, share below the rate:
#   0.15: 0.1515   0.01: 0.0119   0.001: 0.0029   0.0005: 0.0025   exactly 0: 0.0020
#   in fp32 0.001: 0.0010   bernoulli 0.001: 0.0011
# Fails if at 0.001 the share is below 0.002. What helps: torch.rand(..., dtype=torch.float32).
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$directory/venv/bin/python" - <<'END'
import torch

torch.manual_seed(0)
numbers = torch.rand(1_000_000, dtype=torch.bfloat16).float()
shares = {rate: float((numbers < rate).float().mean()) for rate in (0.15, 0.01, 0.001, 0.0005)}
right = float((torch.rand(1_000_000) < 0.001).float().mean())
bernoulli = float(torch.bernoulli(torch.full((1_000_000,), 0.001, dtype=torch.bfloat16)).float().mean())
words = [f"{rate}: {share:.4f}" for rate, share in shares.items()]
zeros = float((numbers == 0).float().mean())
print("   ".join(words), f"  exactly 0: {zeros:.4f}   in fp32 0.001: {right:.4f}   bernoulli 0.001: {bernoulli:.4f}")
assert shares[0.001] > 0.002 and abs(right - 0.001) < 0.0003
END
