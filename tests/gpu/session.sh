#!/usr/bin/env bash
# One call on a GPU machine, within ten minutes: whether all compute the same, then how fast. Tables go to DIRECTORY,
# row by row. See README.md beside this file.
set -euo pipefail
directory=${1:?usage: tests/gpu/session.sh DIRECTORY}
cd "$(dirname "$0")/../.."
mkdir -p "$directory"
NVIDIA_TF32_OVERRIDE=0 timeout 120 "${PYTHON:-python}" -m benchmarks.gpu_agreement \
    --output "$directory/gpu_agreement.md" || echo "gpu_agreement: exit status $?" >&2
"${PYTHON:-python}" -m benchmarks.gpu_throughput --minutes 7 --output "$directory/gpu_throughput.md"
