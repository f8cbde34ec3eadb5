#!/usr/bin/env bash
# Submit step 1 in N shards, an array of jobs, and the job that merges them when all have succeeded. Prints its number:
#
#   data=$(slurm/submit_shards.sh N [flags of 1.tokenize_uniref_csv.py])
#   sbatch --dependency=afterok:$data --kill-on-invalid-dep=yes --nodes=4 slurm/train_fsdp.sh
#
# From $TARGET_PATH/csv to $TARGET_PATH/processed/arrow, with the bytes that slurm/preprocess.sh writes. Options of sbatch go
# into its variables: SBATCH_PARTITION=cpu slurm/submit_shards.sh 16. Run it again after a failure: complete shards stay.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' slurm/submit_shards.sh; exit 0 ;; esac

fail() { echo "error: $*" >&2; exit 2; }

[[ ${1:-} =~ ^[1-9][0-9]{0,5}$ ]] || fail "usage: slurm/submit_shards.sh N [flags of step 1]: N is a number of shards"
command -v sbatch >/dev/null || fail "no sbatch here: run this on the cluster's head or login node"
[ -n "${TARGET_PATH:-}" ] || fail "TARGET_PATH is not set: a directory on the nodes' shared filesystem (see slurm/env.sh)"
export SHARDS=$1
shift
first=$(sbatch --parsable --array="0-$((SHARDS - 1))" slurm/prepare_array.sh "$@")
# Without --kill-on-invalid-dep it would wait for ever for a shard that has failed.
second=$(sbatch --parsable --dependency="afterok:${first%%;*}" --kill-on-invalid-dep=yes slurm/preprocess.sh "$@" --merge="$SHARDS")
echo "jobs $first ($SHARDS shards) and $second (their merge, after them)" >&2
echo "${second%%;*}"
