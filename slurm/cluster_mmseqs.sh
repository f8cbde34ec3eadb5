#!/usr/bin/env bash
# Cluster $TARGET_PATH/csv with MMseqs2, which must be on PATH there, on one node: to $TARGET_PATH/clusters/table. Resumes when
# started again. Step 1 then splits by its table: --cluster_table=$TARGET_PATH/clusters/table/clusters.parquet
#
#   sbatch --mem=200G slurm/cluster_mmseqs.sh [--identity 0.3 or any flag of python -m extras.prepare.cluster_mmseqs]
#SBATCH --job-name=esm2-cluster
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
# sbatch runs a copy of this file: the repository is where it was submitted, or that was its slurm/.
[ -f slurm/common.sh ] || [ ! -f ../slurm/common.sh ] || cd ..
[ -f slurm/common.sh ] || { echo "error: no repository in $PWD: submit from there, or with --chdir" >&2; exit 2; }
# shellcheck source=slurm/common.sh
. slurm/common.sh

# Of the memory that Slurm gives, in MB, a part for what MMseqs2 does not count.
memory=0
if [ -n "${SLURM_MEM_PER_NODE:-}" ]; then memory=$((SLURM_MEM_PER_NODE * 8 / 10))M; fi
status=0
on_one_node -m extras.prepare.cluster_mmseqs --input_dir="$TARGET_PATH/csv" --output_dir="$TARGET_PATH/clusters" \
  --threads="${SLURM_CPUS_PER_TASK:-1}" --split_memory_limit="$memory" "$@" || status=$?
if [ "$status" -gt 127 ] || [ "$status" -eq "$PREEMPTED" ]; then requeue "the clustering was killed ($status)"; fi
exit "$status"
