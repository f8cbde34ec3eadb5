#!/usr/bin/env bash
# FASTA (default: UniRef50) to $TARGET_PATH/csv, on one node. Resumes when started again.
#
#   sbatch slurm/download_data.sh [--source my.fasta.gz or any flag of 0.download_data.py]
#SBATCH --job-name=esm2-download
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
# sbatch runs a copy of this file: the repository is where it was submitted, or that was its slurm/.
[ -f slurm/common.sh ] || [ ! -f ../slurm/common.sh ] || cd ..
[ -f slurm/common.sh ] || { echo "error: no repository in $PWD: submit from there, or with --chdir" >&2; exit 2; }
# shellcheck source=slurm/common.sh
. slurm/common.sh

on_one_node 0.download_data.py --output_dir="$TARGET_PATH" "$@"
