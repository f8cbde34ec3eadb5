#!/usr/bin/env bash
# What to measure on a GPU machine, in order of value: ten minutes on one H100 are meant, then the tests. Each part has its
# own time limit, and one that fails costs itself only. Tables and logs go to DIRECTORY as they are made. See README.md.
#   tests/gpu/session.sh DIRECTORY        on a GPU
#   tests/gpu/session.sh DIRECTORY cpu    tries the script itself, in two minutes
set -euo pipefail
directory=${1:?usage: tests/gpu/session.sh DIRECTORY [cpu]}
device=${2:-cuda}
python=${PYTHON:-python}
cd "$(dirname "$0")/../.."
if [[ $device == cuda ]] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "error: no GPU here (nvidia-smi -L): tests/gpu/session.sh DIRECTORY cpu tries the script itself" >&2
  exit 2
fi
mkdir -p "$directory"
status=0

part() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 code=0 started=$SECONDS
  shift 2
  timeout --kill-after=30 "$seconds" "$@" >"$directory/$name.log" 2>&1 || code=$?
  ((code == 0)) || status=1
  echo "$name: $((SECONDS - started)) s, exit status $code" | tee -a "$directory/session.log"
}

table() { # NAME SECONDS MODULE FLAGS...
  local name=$1 seconds=$2 module=$3
  shift 3
  part "$name" "$seconds" "$python" -m "benchmarks.$module" --device "$device" --output "$directory/$name.md" "$@"
}

if [[ $device == cuda ]]; then
  reasons=clocks_event_reasons.active # older drivers have the other name
  [[ $(nvidia-smi --help-query-gpu) == *"$reasons"* ]] || reasons=clocks_throttle_reasons.active
  fields=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,$reasons
  nvidia-smi --query-gpu="$fields" --format=csv -l 1 >"$directory/clocks.csv" &
  trap 'kill $!' EXIT
  # (a) why 15B's layers took three times what their work explains
  table profile_15b 180 gpu_profile --size 15B/8 --tokens 8192 --modes torch-compiled,te
  # (b) the product
  table throughput_650m 210 gpu_throughput --sizes 650M --modes torch-compiled,fp32-residual,4-packs
  table throughput_650m_options 300 gpu_throughput --sizes 650M \
    --modes flash2,cuda-graphs,te-cuda-graphs,triton-adamw,scaled-mm
  table throughput_650m_32k 90 gpu_throughput --sizes 650M --modes torch-compiled --tokens 32768
  table profile_650m 90 gpu_profile --modes torch-compiled
  # (c), (d) attention, matmuls, launches
  table kernels_attention 40 gpu_kernels --parts attention
  table kernels_matmuls 60 gpu_kernels --parts matmuls,launch
  # (e) Transformer Engine, with the right cuDNN
  table profile_650m_te 120 gpu_profile --modes te,te-fp8
  # (f) whether all compute the same
  table prove 240 prove
  NVIDIA_TF32_OVERRIDE=0 table agreement 120 gpu_agreement
  NVIDIA_TF32_OVERRIDE=0 part tests 300 "$python" -m pytest -q -rs tests/gpu --ignore tests/gpu/test_runs.py
  part test_runs 300 "$python" -m pytest -q -rs tests/gpu/test_runs.py
  # What is left: the peer, and the other sizes
  table throughput 540 gpu_throughput --minutes 8.5
else
  table profile 90 gpu_profile --size tiny --tokens 1024 --modes torch
  table throughput 90 gpu_throughput --sizes tiny --tokens 1024 --steps 2 --warmup 1 --modes torch,te,peer
  table kernels 90 gpu_kernels --sizes tiny --tokens 128
  table agreement 90 gpu_agreement --size tiny --tokens 1024
  part tests 60 "$python" -m pytest -q -rs -p no:cacheprovider tests/gpu
fi
exit "$status"
