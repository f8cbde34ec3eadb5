#!/usr/bin/env bash
# $TARGET_PATH/csv to $TARGET_PATH/processed/arrow, on one node. Resumes when started again.
#
#   sbatch slurm/preprocess.sh [--validation_size 50000 or any flag of 1.tokenize_uniref_csv.py]
#SBATCH --job-name=esm2-preprocess
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
# sbatch runs a copy of this file: the repository is where it was submitted, or that was its slurm/.
[ -f slurm/common.sh ] || [ ! -f ../slurm/common.sh ] || cd ..
[ -f slurm/common.sh ] || { echo "error: no repository in $PWD: submit from there, or with --chdir" >&2; exit 2; }
# shellcheck source=slurm/common.sh
. slurm/common.sh

on_one_node 1.tokenize_uniref_csv.py --input_dir="$TARGET_PATH/csv" --output_dir="$TARGET_PATH/processed" \
  --preprocessing_num_workers="${SLURM_CPUS_PER_TASK:-1}" "$@"
