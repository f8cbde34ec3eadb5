#!/usr/bin/env bash
# torch 2.13.0 and 2.15.0, CPU, x86 with VNNI: torch.ops.onednn.qlinear_pointwise takes activations as int8 or as uint8. With
# int8 it computes the same numbers, without a warning, some 3,000 times slower than with uint8 and zero point 128.
# Seen 2026-11-28 on an AMD EPYC (avx512_vnni), one thread, 64 x 640 times 640 x 640:
#   uint8 0.17 ms   int8 560 ms   ratio 3242   same numbers: True        (torch 2.13.0; 0.22 and 617 ms with 2.15.0)
# Fails if int8 takes less than 100 times as long, or the numbers differ. Needs a CPU with VNNI.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$directory/venv/bin/python" - <<'END'
import time

import torch

weight = torch.randint(-127, 128, (640, 640), dtype=torch.int8)
signed = torch.randint(-127, 128, (64, 640), dtype=torch.int8)
packed = torch.ops.onednn.qlinear_prepack(weight, None)
scales, zeros = torch.ones(640), torch.zeros(640, dtype=torch.int32)


def seconds(codes, zero_point):
    arguments = (codes, 1.0, zero_point, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    result = torch.ops.onednn.qlinear_pointwise(*arguments)
    started = time.process_time()
    for _ in range(3):
        torch.ops.onednn.qlinear_pointwise(*arguments)
    return (time.process_time() - started) / 3, result


fast, expected = seconds((signed.int() + 128).to(torch.uint8), 128)
slow, result = seconds(signed, 0)
same = torch.equal(result, expected)
times = f"uint8 {fast * 1e3:.2f} ms   int8 {slow * 1e3:.0f} ms   ratio {slow / fast:.0f}"
print(f"torch {torch.__version__}: {times}   same numbers: {same}")
assert same and slow > 100 * fast
END
