#!/usr/bin/env bash
# Pretrain MODEL, a decoder, with FSDP2 on streamed text: nothing to prepare. Variables: slurm/env.sh.
#
#   MODEL=llama3_1_8b sbatch slurm/train_clm.sh [--max_steps 1000 or any flag of train_fsdp2.py]
#SBATCH --job-name=clm
#SBATCH --nodes=4
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
# shellcheck source=slurm/clm.sh
. slurm/clm.sh

OUTPUT_DIR=${OUTPUT_DIR:-$TARGET_PATH/out-clm/${MODEL##*/}}
TRAINING_ARGS=(
  --model="$MODEL" --output_dir="$OUTPUT_DIR"
  ${DATASET:+--dataset="$DATASET"} ${DATASET_CONFIG_NAME:+--dataset_config_name="$DATASET_CONFIG_NAME"}
  --tokenizer="${TOKENIZER:-model}"
  --sharding_strategy=full --save_total_limit=3 --save_minutes=30 --dataloader_num_workers=2
)
train_clm "${TRAINING_ARGS[@]}" "$@"
