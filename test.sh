#!/usr/bin/env bash
# Install what the tests need and run them, with the linters, on a machine with or without a GPU.
#
#   ./test.sh                     everything this machine has the tools for
#   ./test.sh --system-packages   first install, as root, what the tests of Slurm, containers and Kubernetes need
#   ./test.sh -k packing          any arguments of pytest
#   ./test.sh --compat            instead: what opens what, in versions that it installs apart (docs/compatibility.md)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' test.sh; exit 0 ;; esac

if [ "${1:-}" = --system-packages ]; then
  tests/ops/install_packages.sh
  shift
fi
./install.sh --dev
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes: each would compile all of common/ anew

if [ "${1:-}" = --compat ]; then
  exec .venv/bin/python -m benchmarks.compatibility "${@:2}"
fi

if [ $# -eq 0 ]; then
  echo "Linters"
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/lint-imports --no-cache
  .venv/bin/pyrefly check
  .venv/bin/yamllint --strict configs kubernetes monitoring .github .yamllint.yaml .pre-commit-config.yaml CITATION.cff
  # shellcheck disable=SC2046  # file names here have no spaces
  .venv/bin/shellcheck $(git ls-files '*.sh' '*.sbatch' .ci/run 2>/dev/null || ls ./*.sh .ci/run)
  .venv/bin/hadolint Dockerfile Dockerfile.cuda Dockerfile.hyperpod
fi

echo "Tests"
# More than cores: tests of several processes wait for each other a good part of their time.
processes=${TEST_PROCESSES:-$(($(nproc) * 2))}
exec .venv/bin/python -m pytest -n "$processes" --dist worksteal "$@"
