#!/usr/bin/env bash
# Submit the two data jobs, the second to start when the first has succeeded. Prints the number of the second:
#
#   data=$(slurm/submit_data.sh [flags of 0.download_data.py] [-- flags of 1.tokenize_uniref_csv.py])
#   sbatch --dependency=afterok:$data --kill-on-invalid-dep=yes --nodes=4 slurm/train_fsdp.sh
#
# Options of sbatch go into its variables: SBATCH_PARTITION=cpu slurm/submit_data.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' slurm/submit_data.sh; exit 0 ;; esac

fail() { echo "error: $*" >&2; exit 2; }

command -v sbatch >/dev/null || fail "no sbatch here: run this on the cluster's head or login node"
[ -n "${TARGET_PATH:-}" ] || fail "TARGET_PATH is not set: a directory on the nodes' shared filesystem (see slurm/env.sh)"
download=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do download+=("$1"); shift; done
[ $# -eq 0 ] || shift
first=$(sbatch --parsable slurm/download_data.sh ${download[@]+"${download[@]}"})
# Without --kill-on-invalid-dep it would wait for ever for a download that has failed.
second=$(sbatch --parsable --dependency="afterok:${first%%;*}" --kill-on-invalid-dep=yes slurm/preprocess.sh "$@")
echo "jobs $first (download) and $second (preprocess, after it)" >&2
echo "${second%%;*}"
