#!/usr/bin/env bash
# Make .venv in the repository, on the filesystem that the nodes share, and activate it. A second run is instant.
#
#   . slurm/create_venv.sh                   (sourced: the shell stays as it is, whatever happens, but for the venv)
#   TORCH_BUILD=cpu . slurm/create_venv.sh   for nodes without GPUs; the login node itself needs none either way
#
# On a machine with GPUs Transformer Engine is compiled, too; elsewhere: srun --gpus=1 ./install.sh --gpu, on a node.
#
# PYTHON=/path/to/python3.12 chooses the interpreter, which must be there on the nodes, too.
# shellcheck disable=SC1091  # .venv/bin/activate is not there yet
# The work is done in a shell of its own: settings and exits do not reach the one that sources this.
# (What stands before && is exempt from `set -e`: hence the exits.)
(
  set -uo pipefail
  cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." || exit
  export TORCH_BUILD=${TORCH_BUILD:-cuda}
  ./install.sh || exit
  if [ "$TORCH_BUILD" = cuda ] && nvidia-smi >/dev/null 2>&1; then
    ./install.sh --gpu || echo "warning: .venv is without Transformer Engine: training computes in torch's own kernels" >&2
  fi
) && . "$(dirname "${BASH_SOURCE[0]:-$0}")/../.venv/bin/activate"
