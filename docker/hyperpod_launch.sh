#!/usr/bin/env bash
# The command of a HyperPodPyTorchJob's pods, in the place of `python3 -m extras.launch`: hyperpod-launch train_ddp.py ...
#
# hyperpodrun reads nodes, processes and the run's name from PET_* variables, as torchrun does. It watches the standard
# output of each node's first rank, so that the log lines have to be on it.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;; esac
export NNODES="${NNODES:-${PET_NNODES:-1}}" # the agent's rendezvous reads it
# Time to save for ranks that are stopped; the agent's default is SIGKILL.
exec hyperpodrun --shutdown-signal=SIGTERM --shutdown-timeout="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}" \
  --tee=3 --log_dir=/tmp/hyperpod --no_python /bin/bash -c 'exec python3 -u "$@" 2>&1' rank "$@"
