#!/usr/bin/env bash
# Pretrain MODEL with DistributedDataParallel: every GPU holds the whole model. Variables: slurm/env.sh.
#
#   sbatch --nodes=4 slurm/train_ddp.sh [--max_steps 100000 or any flag of train_ddp.py]
#SBATCH --job-name=esm2-ddp
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
# sbatch runs a copy of this file: the repository is where it was submitted, or that was its slurm/.
[ -f slurm/common.sh ] || [ ! -f ../slurm/common.sh ] || cd ..
[ -f slurm/common.sh ] || { echo "error: no repository in $PWD: submit from there, or with --chdir" >&2; exit 2; }
# shellcheck source=slurm/common.sh
. slurm/common.sh

OUTPUT_DIR=${OUTPUT_DIR:-$TARGET_PATH/out-ddp}
train train_ddp.py "$@"
