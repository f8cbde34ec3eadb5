#!/usr/bin/env bash
# One shard of step 1, of as many as the array has tasks: $TARGET_PATH/csv to $TARGET_PATH/processed/shards. For data that
# one node does not prepare in time; slurm/submit_shards.sh submits the array and the job that merges the shards.
#
#   sbatch --array=0-15 slurm/prepare_array.sh [--validation_size 50000 or any flag of 1.tokenize_uniref_csv.py]
#   SHARDS=16 sbatch --array=3 slurm/prepare_array.sh [the same flags]      some of 16 shards again
#
# A task that is killed (preemption, a node that is lost, memory) starts again and resumes. One that ends with 2 does not.
#SBATCH --job-name=esm2-shard
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x_%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
# sbatch runs a copy of this file: the repository is where it was submitted, or that was its slurm/.
[ -f slurm/common.sh ] || [ ! -f ../slurm/common.sh ] || cd ..
[ -f slurm/common.sh ] || { echo "error: no repository in $PWD: submit from there, or with --chdir" >&2; exit 2; }
# shellcheck source=slurm/common.sh
. slurm/common.sh

shards=${SHARDS:-${SLURM_ARRAY_TASK_COUNT:-}}
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
  lacks "no array: submit with --array=0-15 for 16 shards, or by slurm/submit_shards.sh 16"
elif [ -n "$shards" ] && ! [[ $shards =~ ^[1-9][0-9]*$ && ${SLURM_ARRAY_TASK_ID:-0} -lt $shards ]]; then
  lacks "task ${SLURM_ARRAY_TASK_ID:-0} of $shards shards: number the tasks from 0; SHARDS says how many shards there are" \
    "if this array is not all of them"
fi
status=0
on_one_node 1.tokenize_uniref_csv.py --input_dir="$TARGET_PATH/csv" --output_dir="$TARGET_PATH/processed" \
  --preprocessing_num_workers="${SLURM_CPUS_PER_TASK:-1}" "$@" --shard="${SLURM_ARRAY_TASK_ID:-0}/${shards:-1}" || status=$?
# 75: by a signal to this script, whose step was waiting
if [ "$status" -gt 127 ] || [ "$status" -eq "$PREEMPTED" ]; then requeue "shard ${SLURM_ARRAY_TASK_ID:-0} was killed ($status)"; fi
exit "$status"
