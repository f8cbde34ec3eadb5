#!/usr/bin/env bash
# One node's share of a job: torchrun, with a rank for each GPU. common.sh has srun run this on every node.
#
#   slurm/node.sh PYTHON LOG_DIRECTORY ARGUMENTS_OF_TORCHRUN...
set -euo pipefail
python=$1 logs=$2/$SLURMD_NODENAME
shift 2
# Of the step, not of the job: an exclusive job holds all GPUs of its nodes, also when it asked for fewer.
ranks=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
  [ "$SLURM_PROCID" != 0 ] ||
    echo "error: this job has no GPUs: submit with --gpus-per-node=N, or set NPROC_PER_NODE (see slurm/env.sh)" >&2
  exit 2
fi
# The tasks of such an array are one job, to the record of starts and to --overwrite_output_dir.
[ -z "${MIN_NODES:-}" ] || export SLURM_JOB_ID=$SLURM_ARRAY_JOB_ID
mkdir -p "$logs"
chmod go= "$logs" # torchrun names directories in it for the rendezvous (PET_RDZV_ID), which is a secret
exec "$python" -m extras.launch --nproc_per_node="$ranks" --log_dir="$logs" --tee=3 "$@"
