#!/usr/bin/env bash
# What to measure in fifteen minutes of one GPU, its starts included: three parts, in order of what decides. A part ends
# within its seconds (`budgets`), a row within its own; one that fails, hangs or kills its process costs itself only.
# Tables and logs go to DIRECTORY as they are made. See README.md.
#   tests/gpu/session.sh DIRECTORY headline    650M compiled in BF16: tokens/s, MFU, attention kernels, forked workers
#   tests/gpu/session.sh DIRECTORY decide      whether all is right; CUDA graphs
#   tests/gpu/session.sh DIRECTORY rest        FP8, 3B, Muon
#   tests/gpu/session.sh DIRECTORY cpu         tries the script itself without a GPU
set -euo pipefail
declare -A budgets=([headline]=300 [decide]=220 [rest]=200 [cpu]=400)
directory=${1:-} part=${2:-none}
if [[ -z $directory || -z ${budgets[$part]:-} ]]; then
  echo "usage: tests/gpu/session.sh DIRECTORY headline|decide|rest|cpu" >&2
  exit 2
fi
device=cuda
[[ $part != cpu ]] || device=cpu
python=${PYTHON:-python}
cd "$(dirname "$0")/../.."
if [[ $device == cuda ]] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "error: no GPU here (nvidia-smi -L): tests/gpu/session.sh DIRECTORY cpu tries the script itself" >&2
  exit 2
fi
mkdir -p "$directory"
status=0

row() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 code=0 started=$SECONDS
  local left=$((budgets[$part] - SECONDS))
  shift 2
  timeout --kill-after=5 "$((seconds < left ? seconds : left > 1 ? left : 1))" "$@" >"$directory/$name.log" 2>&1 || code=$?
  ((code == 0)) || status=1
  echo "$name: $((SECONDS - started)) s, exit status $code" | tee -a "$directory/session.log"
}

table() { # NAME SECONDS MODULE FLAGS...
  local name=$1 seconds=$2 module=$3
  shift 3
  row "$name" "$seconds" "$python" -m "benchmarks.$module" --device "$device" --output "$directory/$name.md" "$@"
}

if [[ $device == cuda ]]; then
  reasons=clocks_event_reasons.active # older drivers have the other name
  [[ $(nvidia-smi --help-query-gpu) == *"$reasons"* ]] || reasons=clocks_throttle_reasons.active
  fields=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,$reasons
  nvidia-smi --query-gpu="$fields" --format=csv -l 1 >>"$directory/clocks.csv" &
  trap 'kill $! 2>/dev/null || true' EXIT
fi
case $part in
headline)
  table throughput_650m 110 gpu_throughput --sizes 650M --modes 4-packs
  row workers 40 "$python" -m pytest -q -rs -p no:cacheprovider tests/gpu/test_workers.py
  table attention_650m 130 gpu_throughput --sizes 650M --modes flash4,cudnn,flash2 --row_seconds 60
  ;;
decide)
  table prove 140 prove
  table graphs_650m 65 gpu_throughput --sizes 650M --modes cuda-graphs
  ;;
rest) # int8 has no row: nothing here trains in it
  table fp8_650m 65 gpu_throughput --sizes 650M --modes scaled-mm,te-fp8 --row_seconds 45
  table fsdp2_3b 65 gpu_throughput --sizes 3B --modes torch-compiled --fsdp2 --steps 4 --warmup 2
  table muon_650m 50 gpu_throughput --sizes 650M --modes muon
  ;;
cpu)
  table throughput 150 gpu_throughput --sizes tiny --tokens 1024 --steps 2 --warmup 1 --modes torch,te,peer
  table fsdp2 60 gpu_throughput --sizes tiny --tokens 1024 --steps 1 --warmup 1 --modes torch --fsdp2
  table kernels 60 gpu_kernels --sizes tiny --tokens 128
  row tests 90 "$python" -m pytest -q -rs -p no:cacheprovider tests/gpu
  ;;
esac
exit "$status"
