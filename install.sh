#!/usr/bin/env bash
# Make .venv and install the pinned requirements; a second run is instant.
#
#   ./install.sh          what training needs
#   ./install.sh --dev    what the tests and linters need, too
#
# PYTHON=/path/to/python3.12 chooses the interpreter. Where there is no NVIDIA GPU, torch comes as a CPU build: the
# default one for Linux brings gigabytes of CUDA libraries. TORCH_BUILD=cuda or cpu says which (a cluster's login node
# has no GPU, but its nodes do).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "error: $*" >&2; exit 2; }

requirements=(requirements.txt)
case "${1:-}" in
  "") ;;
  --dev) requirements+=(requirements-dev.txt) ;;
  *) fail "unknown argument $1: usage: ./install.sh [--dev]" ;;
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

# Done already, with these very files?
version=$("$python" -c 'import platform; print(platform.python_version(), platform.machine())')
wanted="$version $build $(cat install.sh constraints.txt "${requirements[@]}" | cksum)"
stamp=".venv/installed-${#requirements[@]}"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

echo "Installing into .venv with Python $version"
if ! supported .venv/bin/python || [ "$(.venv/bin/python -c 'import platform; print(platform.python_version())')" != "${version% *}" ]; then
  rm -rf .venv
  "$python" -m venv .venv || fail "python -m venv failed: on Debian and Ubuntu, apt-get install python3-venv"
fi
rm -f "$stamp"
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

torch=$(grep '^torch==' requirements.txt)
installed=$(.venv/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null || true)
if [ "$build" = cuda ]; then
  # To pip the CPU build would do.
  if [ "$installed" = "${torch}+cpu" ]; then pip uninstall --quiet --yes torch; fi
else
  cpu=${torch}+cpu
  if [ "$installed" != "$cpu" ]; then
    echo "No NVIDIA GPU here: installing the CPU build of torch"
    # From wherever this machine's pip is set up to look, else from PyTorch's own index.
    pip install --quiet "$cpu" -c constraints.txt 2>/dev/null ||
      pip install --quiet --retries 1 --timeout 20 "$cpu" -c constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu ||
      echo "warning: no CPU build of torch to be had; falling back to the default build (several GB)" >&2
  fi
fi

files=()
for file in "${requirements[@]}"; do files+=(-r "$file"); done
pip install --quiet "${files[@]}" -c constraints.txt || fail "pip could not install ${requirements[*]}: see above"
echo "$wanted" >"$stamp"
# Whoever has the tests' packages has training's.
[ "${#requirements[@]}" = 1 ] || ./install.sh
