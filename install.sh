#!/usr/bin/env bash
# Make .venv and install the pinned requirements; a second run is instant.
#
#   ./install.sh          what training needs
#   ./install.sh --trackers   TensorBoard and W&B, too, for --report_to
#   ./install.sh --finetune   peft, too, for finetune.py
#   ./install.sh --dev    what the tests and linters need, too; Transformer Engine's Python and Triton, which tests run on
#                         a CPU, and mavenn's measured mutations, in folders of their own (.venv/te_on_cpu, .venv/triton,
#                         .venv/mavenn: 1 GB)
#   ./install.sh --gpu    Transformer Engine and flash-attn, too (requirements-gpu.txt): they compile against torch, which
#                         takes long, with CUDA's toolkit. NVIDIA's image has them (docs/containers.md)
#
# Without a network: docs/installing.md.
# PYTHON=/path/to/python3.12 chooses the interpreter. Where there is no NVIDIA GPU, torch comes as a CPU build: the
# default one for Linux brings gigabytes of CUDA libraries. TORCH_BUILD=cuda or cpu says which (a cluster's login node
# has no GPU, but its nodes do).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "error: $*" >&2; exit 2; }

requirements=(requirements.txt)
gpu="" dev=""
case "${1:-}" in
  "") ;;
  --trackers) requirements+=(requirements-trackers.txt) ;;
  --finetune) requirements+=(requirements-finetune.txt) ;;
  --dev)
    dev=yes
    requirements+=(requirements-trackers.txt requirements-finetune.txt requirements-test.txt requirements-dev.txt) ;;
  --gpu) gpu=yes ;;
  -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' install.sh; exit 0 ;;
  *) fail "unknown argument $1: usage: ./install.sh [--trackers | --finetune | --dev | --gpu]" ;;
esac

supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }
python=""
for candidate in "${PYTHON:-}" python3 python3.12 python3.11; do
  if [ -n "$candidate" ] && supported "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "Python 3.11 or 3.12 is needed and none was found; name one with PYTHON=/path/to/python"

build=${TORCH_BUILD:-}
if [ -z "$build" ]; then
  build=cuda
  if [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] && ! nvidia-smi >/dev/null 2>&1; then build=cpu; fi
fi
[[ $build =~ ^(cuda|cpu)$ ]] || fail "TORCH_BUILD=$build: cuda or cpu"

version=$("$python" -c 'import platform; print(platform.python_version(), platform.machine())')
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# Says what is large, and that the end is near: a minute or more without a word looks dead.
pip_install() {
  local line packages
  pip install --progress-bar off "$@" | while IFS= read -r line; do
    if [[ $line =~ (Downloading|Using\ cached)\ ([^ ]*/)?([^ /]+)\.whl\ (\([0-9.]+\ [MG]B\)) ]]; then
      echo "  ${BASH_REMATCH[3]%%-*} ${BASH_REMATCH[4]}"
    elif [[ $line == "Installing collected packages: "* ]]; then
      packages=${line//[^,]/}
      echo "  unpacking $((${#packages} + 1)) packages"
    fi
  done
}
torch=$(grep '^torch==' requirements.txt)

# ---- --gpu: after all the rest ------------------------------------------------------------------------------------------

# Fails, in one line, without anything that compiling needs: it takes an hour to find out by itself. Sets CUDA_HOME.
check_can_compile() {
  local lacking=() nvcc release driver tool all
  if [ "$build" = cpu ]; then
    lacking+=("an NVIDIA GPU with its driver (nvidia-smi; TORCH_BUILD=cuda: for nodes that have one)")
  elif driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) && [ "${driver%%.*}" -lt 580 ]; then
    lacking+=("a driver for CUDA $cuda: 580 or later, not ${driver%%[[:space:]]*}")
  fi
  nvcc=$(PATH=${CUDA_HOME:-$PATH:/usr/local/cuda}/bin command -v nvcc || true)
  release=$([ -z "$nvcc" ] || "$nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
  if [ "$release" = "$cuda" ]; then
    CUDA_HOME=$(cd "$(dirname "$nvcc")/.." && pwd)
    export CUDA_HOME
  else
    lacking+=("the toolkit of CUDA $cuda (nvcc, on PATH or in CUDA_HOME/bin${nvcc:+; $nvcc is of CUDA $release})")
  fi
  for tool in c++ ninja; do
    command -v "$tool" >/dev/null || lacking+=("$tool (on Debian and Ubuntu: apt-get install g++ ninja-build)")
  done
  "$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
    lacking+=("Python.h of $python (on Debian and Ubuntu: apt-get install python3-dev)")
  [ "${#lacking[@]}" -gt 0 ] || return 0
  all=$(printf ', %s' "${lacking[@]}")
  fail "Transformer Engine cannot be compiled here: missing: ${all:2}; or take the image (docs/containers.md)"
}

install_gpu() {
  local cuda headers line of wanted stamp=.venv/installed-gpu
  cuda=$(sed -nE 's/^transformer-engine\[core-cu([0-9]+).*/\1/p' requirements-gpu.txt)
  wanted="$version $torch $(cksum <requirements-gpu.txt)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
  check_can_compile
  TORCH_BUILD=cuda PYTHON=$python ./install.sh
  of=$(.venv/bin/python -c 'import torch; print((torch.version.cuda or "(none: for CPUs)").split(".")[0])')
  [ "$of" = "$cuda" ] || fail "pip gave a $torch for CUDA $of, Transformer Engine needs one for CUDA $cuda: see where pip looks (pip config list)"
  # What was compiled against another torch looks the same to pip, in .venv and in its cache.
  if [ -f "$stamp" ]; then pip uninstall --quiet --yes transformer-engine-torch flash-attn flash-attn-4; fi
  rm -f "$stamp"
  # Where the toolkit is without the headers of CUDA's libraries: those of the packages that torch runs with.
  headers=$(printf ':%s' "$PWD"/.venv/lib/python*/site-packages/nvidia/*/include)
  export CPATH=${CPATH:+$CPATH:}${headers:1}
  echo "Compiling Transformer Engine and flash-attn against $torch, which takes long (MAX_JOBS: files at a time), unless"
  echo "their makers' servers have them for it"
  pip install --quiet -r requirements-build.txt -c constraints.txt
  # One at a time: if a later one fails, those already installed are not compiled again.
  grep -E '^[a-z]' requirements-gpu.txt | while read -r line; do
    pip install --quiet --no-cache-dir --no-build-isolation -c constraints.txt "$line" </dev/null ||
      fail "pip could not install $line: see above"
  done
  if nvidia-smi >/dev/null 2>&1; then
    .venv/bin/python -c 'import flash_attn, transformer_engine.pytorch' || fail "Transformer Engine is installed but does not load: see above"
  fi
  echo "$wanted" >"$stamp"
}

if [ -n "$gpu" ]; then
  install_gpu
  exit
fi

# ---- --dev: packages for GPUs, whose Python is tested on a CPU; tables of measured mutations ------------------------------

# In a folder of their own: in the environment they would look installed. Without them their tests skip.
install_apart() { # FOLDER TESTS WHEELS
  local folder=.venv/$1 tests=$2 wheels=$3
  if [ -f "$folder/installed" ] && [ "$(cat "$folder/installed")" = "$wheels" ]; then return; fi
  rm -rf "$folder"
  # shellcheck disable=SC2086  # one word each
  if pip install --quiet --retries 1 --timeout 20 --no-deps --only-binary :all: --target "$folder" $wheels; then
    echo "$wheels" >"$folder/installed"
  else
    rm -rf "$folder"
    echo "warning: pip could not fetch ${wheels//$'\n'/ }: $tests will skip" >&2
  fi
}

install_for_tests() {
  # Its wheel has no compiled code.
  install_apart te_on_cpu "the tests of tests/te_on_cpu" "$(
    sed -nE 's/^(transformer-engine|nvdlfw-inspect)(\[[^]]*\])?(==[^ ]+).*/\1\3/p' requirements-gpu.txt
    grep '^einops==' constraints.txt
  )"
  # A CUDA build of torch brings its own.
  [ "$build" = cuda ] || install_apart triton "a test of triton_adamw" triton==3.9.0
  # Tables, which are read without importing it: it would bring TensorFlow.
  install_apart mavenn "tests on measured mutations" mavenn==1.1.4
}

# ---- the rest -----------------------------------------------------------------------------------------------------------

# Done already, with these very files?
wanted="$version $build $(cat install.sh constraints.txt "${requirements[@]}" | cksum)"
stamp=".venv/installed-${#requirements[@]}"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  [ -z "$dev" ] || install_for_tests
  exit 0
fi

echo "Installing into .venv with Python $version"
if ! supported .venv/bin/python || [ "$(.venv/bin/python -c 'import platform; print(platform.python_version())')" != "${version% *}" ]; then
  rm -rf .venv
  "$python" -m venv .venv || fail "python -m venv failed: on Debian and Ubuntu, apt-get install python3-venv"
fi
rm -f "$stamp"

installed=$(.venv/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null || true)
if [ "$build" = cuda ]; then
  # To pip the CPU build would do.
  if [ "$installed" = "${torch}+cpu" ]; then pip uninstall --quiet --yes torch; fi
else
  cpu=${torch}+cpu
  if [ "$installed" != "$cpu" ]; then
    echo "No NVIDIA GPU here: installing the CPU build of torch"
    # From wherever this machine's pip is set up to look, else from PyTorch's own index.
    pip_install "$cpu" -c constraints.txt 2>/dev/null ||
      pip_install --retries 1 --timeout 20 "$cpu" -c constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu ||
      echo "warning: no CPU build of torch to be had; falling back to the default build (several GB)" >&2
  fi
fi

files=()
for file in "${requirements[@]}"; do files+=(-r "$file"); done
pip_install "${files[@]}" -c constraints.txt || fail "pip could not install ${requirements[*]}: see above"
echo "$wanted" >"$stamp"
# Whoever has the tests' packages has training's.
[ "${#requirements[@]}" = 1 ] || ./install.sh
[ -z "$dev" ] || install_for_tests
