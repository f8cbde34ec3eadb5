# Functions of the job scripts, which source this file from the repository's root before anything else.
#
#   launch ARGS...               run torchrun's ARGS on all nodes of the job
#   train SCRIPT ARGS...         the same for ESM-2's pretraining, with MODEL, INIT_FROM, DATASET_DIR, OUTPUT_DIR; requeues
#   pretrain SCRIPT ARGS...      what is the same for any model: preflight, training with ARGS alone, starting again
#   on_one_node ARGS...          run python ARGS on the first node
#
# Run without Slurm on a login node, a job script checks its settings and paths, so that an error does not wait in the queue.
# shellcheck shell=bash
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;; esac

fail() { echo "error: $*" >&2; exit 2; }

# shellcheck source=slurm/env.sh
. slurm/env.sh

# Collect all missing settings and report them in one line, so that a user does not queue once for each.
missing=()
lacks() { missing+=("$*"); }
all_there() {
  local all
  [ "${#missing[@]}" -gt 0 ] || return 0
  all=$(printf '; %s' "${missing[@]}")
  fail "${all:2}"
}

if [ -z "$TARGET_PATH" ]; then
  lacks "TARGET_PATH is not set: a directory on the nodes' shared filesystem (see slurm/env.sh)"
else
  mkdir -p "$TARGET_PATH" 2>/dev/null || lacks "TARGET_PATH=$TARGET_PATH: cannot be made on $(hostname)"
fi

PREEMPTED=75 # exit status of a run that was stopped by a signal and has saved (common/distributed/stopping.py)
restarts=${SLURM_RESTART_COUNT:-0}
log_dir=logs/${SLURM_JOB_NAME:-}_${SLURM_JOB_ID:-}/$restarts

# ---- what every step gets: a venv on the shared filesystem, or a container with the same directories in it ------------

steps=(srun --label --export=ALL --cpu-bind=none --wait="$GRACE_SECONDS")
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then steps+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
if [ -n "$CONTAINER_IMAGE" ]; then
  [[ $CONTAINER_IMAGE != /* || -f $CONTAINER_IMAGE ]] || lacks "CONTAINER_IMAGE=$CONTAINER_IMAGE: no such file: run ./enroot.sh"
  [[ $(srun --help) == *--container-image* ]] ||
    lacks "CONTAINER_IMAGE=$CONTAINER_IMAGE, but this Slurm has no pyxis: set it to nothing for a venv"
  echo "Steps run in the container $CONTAINER_IMAGE"
  mounts=$PWD:$PWD
  [ "$TARGET_PATH" = "$PWD" ] || mounts+=,$TARGET_PATH:$TARGET_PATH
  mounts+=${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
  steps+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
  steps+=(--no-container-remap-root)
  python=python
else
  python=$PWD/.venv/bin/python
  [ -x "$python" ] || lacks "no .venv in $PWD: run . slurm/create_venv.sh, or set CONTAINER_IMAGE"
fi

export NPROC_PER_NODE MIN_NODES NCCL_DEBUG NCCL_SOCKET_IFNAME PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# When a collective hangs, each rank writes its latest collectives beside its logs (flight recorder).
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-20000} TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_FR_DUMP_TEMP_FILE=$PWD/$log_dir/nccl_trace_rank_
if [ -n "$FI_PROVIDER" ]; then export FI_PROVIDER; else unset FI_PROVIDER; fi
if [ "${FI_PROVIDER:-}" = efa ]; then export FI_EFA_USE_HUGE_PAGE=${FI_EFA_USE_HUGE_PAGE:-0}; fi

# ---- signals -----------------------------------------------------------------------------------------------------------

# sbatch --signal=B:USR1@S signals this script alone, S seconds before the walltime ends: forward it to the ranks. SIGTERM
# (scancel, the walltime itself, a preemption) Slurm sends to them as well: this script only waits for their status.
stop="" step=""
stop_soon() {
  stop=USR1
  echo "$(date +%T) SIGUSR1: the job's time is nearly over: signalling the run to save and stop"
  [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null || true
}
trap stop_soon USR1
trap 'stop=${stop:-TERM}' TERM

# run COMMAND...: returns its exit status even if signals arrive meanwhile; 75 if one arrived before it started.
run() {
  local status=0
  [ -z "$stop" ] || return "$PREEMPTED"
  "$@" &
  step=$!
  wait "$step" || status=$?
  while kill -0 "$step" 2>/dev/null; do # a trap has ended the wait, not the command
    status=0
    wait "$step" || status=$?
  done
  step=""
  # srun itself died of the signal
  if [ -n "$stop" ] && [ "$status" -eq $((128 + $(kill -l "$stop"))) ]; then status=$PREEMPTED; fi
  return "$status"
}

# ---- steps -------------------------------------------------------------------------------------------------------------

# is_mounted PATH     is it below the destination of a mount?
is_mounted() {
  local path=$1 all mount
  [[ $path = /* ]] || path=$PWD/$path
  path=$(realpath -ms "$path")/
  IFS=, read -ra all <<<"$mounts"
  for mount in "${all[@]}"; do
    mount=${mount#*:} # SRC:DST, SRC:DST:FLAGS, or SRC for both
    mount=$(realpath -ms "${mount%%:*}")
    [[ $path != "${mount%/}"/* ]] || return 0
  done
  return 1
}

# Do the paths of these flags reach the container? Results must; other paths may lie in the image, if not on this node.
check_mounts() {
  local word flag="" value
  [ -n "$CONTAINER_IMAGE" ] || return 0
  for word; do
    value=$word
    case $word in
      --*=*) flag=${word%%=*} value=${word#*=} ;;
      --*) flag=$word; continue ;;
    esac
    if [[ $value != */* ]] || is_mounted "$value"; then continue; fi
    case $flag in
      --output_dir | --checkpoint_dir | --log_dir) ;;
      *) [[ $value = /* && -e $value ]] || continue ;;
    esac
    lacks "$flag=$value: not mounted in the container: choose a path below TARGET_PATH or $PWD, or add its directory to" \
      "CONTAINER_MOUNTS"
  done
}

# Outside of a job: checks the settings and the paths of these flags, then says how to go on.
outside_of_a_job() {
  [ -z "${SLURM_JOB_ID:-}" ] || return 0
  check_mounts "$@"
  all_there
  echo "This is no Slurm job. Its settings are good: submit it with sbatch [--nodes=N] slurm/$(basename "$0")"
  exit 0
}

on_one_node() {
  outside_of_a_job "$@"
  check_mounts "$@"
  all_there
  run "${steps[@]}" --nodes=1 --ntasks=1 "$python" "$@"
}

# With MIN_NODES the tasks of an array are the nodes of a run, each a job that Slurm requeues alone. The rendezvous is on the
# first task's node: that task writes the address and the id to a file, which the others read at each start.
# shellcheck disable=SC2153 # Slurm sets SLURM_ARRAY_TASK_MIN
meet() {
  local file=logs/${SLURM_JOB_NAME}_$SLURM_ARRAY_JOB_ID.rendezvous first=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_MIN state
  if [ "$SLURM_ARRAY_TASK_ID" = "$SLURM_ARRAY_TASK_MIN" ]; then
    mkdir -p logs
    (umask 077 && echo "$endpoint $PET_RDZV_ID" >"$file.new" && mv "$file.new" "$file")
    return
  fi
  while [ -z "$stop" ]; do
    state=$(squeue --noheader --jobs="$first" --format=%T 2>&1 || true)
    if [[ -z $state || $state == *"Invalid job id"* ]]; then echo "$(date +%T) the first task, $first, has ended"; exit 0; fi
    if [ "$state" = RUNNING ] && read -r endpoint PET_RDZV_ID 2>/dev/null <"$file"; then return; fi
    sleep 5
  done
}

launch() {
  local nodes=$SLURM_JOB_NUM_NODES endpoint hyperpod=() elastic=()
  if [ -d /opt/sagemaker_cluster ]; then hyperpod=(--auto-resume=1); fi
  # The rendezvous of several nodes runs on the first node, where this script runs; each start has its own. It is
  # unauthenticated, so its port and id are random and cannot be guessed from the network. The id is passed in the
  # environment, which only the owner can read. On one node nothing listens on the network (extras/launch/rendezvous.py).
  endpoint=$(hostname):$((10000 + (RANDOM * 32768 + RANDOM) % 20000))
  PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  if [ -n "$MIN_NODES" ] && [ "$1" != -m ]; then # the preflight looks at each task's own node
    meet
    elastic=(--nnodes="$MIN_NODES:$SLURM_ARRAY_TASK_COUNT" --max_restarts=100 --rdzv_conf=last_call_timeout=10)
  fi
  export PET_RDZV_ID
  run "${steps[@]}" ${hyperpod[@]+"${hyperpod[@]}"} --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    slurm/node.sh "$python" "$log_dir" --nnodes="$nodes" --shutdown_timeout="$GRACE_SECONDS" \
    --rdzv_backend=c10d --rdzv_endpoint="$endpoint" ${elastic[@]+"${elastic[@]}"} "$@"
}

# GPUs in GRES as Slurm writes them: gpu:8, gpu:a100:4(S:0,1),gpu:1g.10gb:2,nic:4, gres:gpu:2, (null).
gpus_in() {
  local entries entry count total=0
  IFS=, read -ra entries <<<"$1" # at the comma in (S:0,1), too: what follows it names no GPU
  for entry in ${entries[@]+"${entries[@]}"}; do
    entry=${entry#gres[:/]}
    entry=${entry%%(*}
    [[ $entry =~ ^gpu([:=]|$) ]] || continue
    count=${entry##*[:=]}
    [[ $count =~ ^[0-9]+$ ]] || count=1 # a name alone: --gres=gpu, --gres=gpu:a100
    total=$((total + count))
  done
  echo "$total"
}

# Ranks per node if NPROC_PER_NODE is not set: the GPUs that the job requested from Slurm; else, as jobs are exclusive,
# all that the nodes have (sinfo's %G), or GPUS_PER_NODE of them, which the steps request; else, if Slurm manages none,
# GPUS_PER_NODE, or those of the driver. gpus_per_node: how many the preflight has to find; empty: as many as there are ranks.
gpus_per_node=""
count_gpus() {
  local job counts own=${GPUS_PER_NODE##*:} # of h200:8
  [ -z "$NPROC_PER_NODE" ] || return 0
  job=$(scontrol --oneliner show job "$SLURM_JOB_ID" || true)
  if [[ $job =~ \ TresPer[A-Za-z]+=[^\ ]*gpu ]]; then
    # Without this number a job whose nodes have all lost their driver would train on their CPUs.
    if [[ $job =~ \ TresPerNode=([^\ ]*gpu[^\ ]*) ]]; then gpus_per_node=$(gpus_in "${BASH_REMATCH[1]}"); fi
    return
  fi
  if [ -n "$own" ] && ! [[ $own =~ ^[1-9][0-9]*$ ]]; then
    lacks "GPUS_PER_NODE=$GPUS_PER_NODE: a number, or nothing: all GPUs that a node has"
    return
  fi
  counts=$(sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --format=%G | while read -r gres; do gpus_in "$gres"; done || true)
  counts=$(sort -nu <<<"$counts" | paste -sd ' ')
  gpus_per_node=${own:-$counts}
  if [ "${counts:-0}" != 0 ]; then
    if [[ $job =~ \ OverSubscribe=([A-Z]+) && ${BASH_REMATCH[1]} != NO ]]; then
      lacks "this job is not exclusive and has requested no GPUs: submit with --exclusive or --gpus-per-node=N," \
        "or set NPROC_PER_NODE to train on CPUs (see slurm/env.sh)"
    elif [[ $gpus_per_node == *\ * ]]; then
      lacks "the nodes of this job have different numbers of GPUs (${counts// /, }): submit with --gpus-per-node=N"
    elif [ "$gpus_per_node" -gt "${counts%% *}" ]; then
      lacks "GPUS_PER_NODE=$GPUS_PER_NODE, but a node of this job has ${counts%% *} GPUs by sinfo: set it to nothing, to use all"
    fi
    steps+=(--gpus-per-node="${GPUS_PER_NODE:-$counts}")
    return
  fi
  if [ -z "$own" ]; then
    gpus_per_node=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    echo "Slurm manages no GPUs here; nvidia-smi -L lists $gpus_per_node on $(hostname)"
    [ "$gpus_per_node" -gt 0 ] || lacks "no GPUs on $(hostname): set NPROC_PER_NODE to train on CPUs (see slurm/env.sh)"
  fi
  NPROC_PER_NODE=$gpus_per_node
}

# Does the last --cp_size of these flags divide the job's ranks? Where their number is known to the steps alone
# (--gres=gpu:8), the ranks themselves say that it does not.
check_cp_size() {
  local each=${NPROC_PER_NODE:-$gpus_per_node} ranks size
  [[ " $*" =~ .*\ --cp_size[=\ ]([^\ ]*) ]] || return 0
  size=${BASH_REMATCH[1]}
  [[ $size =~ ^[1-9][0-9]*$ ]] || { lacks "--cp_size $size: a number of ranks, at least 1 (CP_SIZE)"; return; }
  [[ $each =~ ^[1-9][0-9]*$ ]] || return 0
  ranks=$((SLURM_JOB_NUM_NODES * each))
  [ $((ranks % size)) -eq 0 ] ||
    lacks "--cp_size $size does not divide this job's $ranks ranks (nodes: $SLURM_JOB_NUM_NODES, ranks a node: $each)"
  # Only a warning: results are the same, and with one GPU per node or packs too long for a node it is the only way.
  [ $((each % size)) -eq 0 ] ||
    echo "warning: --cp_size $size on $each ranks a node: keys cross the network in every layer" >&2
}

check_array() {
  [ -z "$MIN_NODES" ] || { [[ $MIN_NODES =~ ^[1-9][0-9]*$ && $SLURM_JOB_NUM_NODES = 1 ]] &&
    [ "$MIN_NODES" -le "${SLURM_ARRAY_TASK_COUNT:-0}" ]; } ||
    lacks "MIN_NODES=$MIN_NODES: submit an array of at least as many jobs of one node: sbatch --array=0-3 --nodes=1"
}

# Of ESM-2's training jobs, after those of configs/sizes/; kubernetes/train-*-template.yaml have the same.
defaults=(--bf16 --do_eval --num_train_epochs=1 --save_total_limit=3 --save_minutes=30 --dataloader_num_workers=2)

# batch: flags for the global batch of MODEL's size (docs/sizes.md). GPUs of less than 80 GB, and CPUs, get small packs.
size_flags() {
  local memory
  batch=("configs/sizes/$(basename "$MODEL").yaml")
  [ -f "${batch[0]}" ] || batch=(configs/sizes/other.yaml)
  memory=$(nvidia-smi -i 0 --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null || true)
  [ "$memory" -ge 75000 ] 2>/dev/null || batch+=(--per_device_train_batch_size=4)
}

train() {
  local script=$1 batch own=()
  shift
  case $GUIDE in # the guides' run, of a model of its own
    1) if [[ $script = *fsdp* ]]; then batch=(configs/guide_fsdp.yaml); else batch=(configs/guide_ddp.yaml); fi ;;
    0 | "")
      [ -n "$MODEL" ] || lacks "MODEL is not set: say facebook/esm2_t33_650M_UR50D (see slurm/env.sh)"
      own=(--config_name="$MODEL")
      ;;
    *) lacks "GUIDE=$GUIDE: 1 for the guides' run, else 0" ;;
  esac
  [ -z "$DATASET_DIR" ] || [ -d "$DATASET_DIR" ] ||
    lacks "DATASET_DIR=$DATASET_DIR: no such directory on $(hostname): run slurm/submit_data.sh first"
  own+=(${INIT_FROM:+--model_name_or_path="$INIT_FROM"})
  own+=(${DATASET_DIR:+--dataset_dir="$DATASET_DIR"} --output_dir="$OUTPUT_DIR")
  outside_of_a_job "${own[@]}" "$@"
  count_gpus
  if [ "$GUIDE" != 1 ]; then
    echo "This job trains $MODEL for an epoch of all proteins. The guides' run of 100,000 proteins with the 8M model, in" \
      "minutes: GUIDE=1 sbatch ..."
    size_flags
    own+=("${defaults[@]}")
  fi
  pretrain "$script" "${batch[@]}" "${own[@]}" "$@"
}

pretrain() {
  local status=0 lost=""
  outside_of_a_job "$@"
  check_array
  check_cp_size "$@"
  check_mounts "$@"
  all_there
  if [ "$PREFLIGHT" != off ]; then
    local checks=(--fail_on="$PREFLIGHT") more=()
    if [[ $gpus_per_node =~ ^[0-9]+$ ]]; then checks+=(--gpus_per_node="$gpus_per_node"); fi
    read -ra more <<<"$PREFLIGHT_FLAGS"
    launch -m extras.preflight "${checks[@]}" ${more[@]+"${more[@]}"} "$@" || status=$?
  fi
  # A run that failed through no fault of the user's (a rank out of memory, a failed collective, a node that was away)
  # is started again: here if all nodes are free, else from the queue. The third start in a row without a new checkpoint
  # ends with 2 (extras/launch/restarts.py).
  while [ "$status" -eq 0 ]; do
    launch "$@" || status=$?
    case $status in
      0 | 2 | "$PREEMPTED") break ;;
    esac
    nodes_are_free || { lost=yes; break; }
    echo "$(date +%T) the run ended with $status and all nodes are there: starting it again in this job"
    status=0
  done
  case $status in
    0 | 2) ;;
    "$PREEMPTED") requeue "stopped by a signal, checkpoint saved" ;;
    *) if [ -n "$lost" ] || ! nodes_are_free; then requeue "a node does not answer, or has lost its step"; fi ;;
  esac
  exit "$status"
}

# Can all nodes take a step again? Not a dead one, which Slurm takes minutes to notice, nor one that was away for seconds:
# for Slurm it is still busy with the step that it has lost.
nodes_are_free() {
  timeout "$GRACE_SECONDS" srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true
}

# Put this job back into the queue: same number, same script, same arguments.
requeue() {
  local state="" try job=$SLURM_JOB_ID
  # The number of one task of an array is the array's: to requeue that would requeue all tasks.
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # The controller may be down for a moment, or restarting: retry a failed query.
  for ((try = 1; try <= CONTROLLER_TRIES; try++)); do
    state=$(squeue --noheader --jobs="$job" --format="%T %r") && break
    echo "$(date +%T) squeue does not answer ($try of $CONTROLLER_TRIES)" >&2
    sleep "$CONTROLLER_PAUSE"
  done
  # After scancel the job is COMPLETING without a reason, and a requeue would start it again; likewise when Slurm
  # has noticed a dead node and requeues it itself. After the walltime the reason is TimeLimit.
  case $state in
    RUNNING* | *TimeLimit) ;;
    *) echo "$(date +%T) not requeueing job $job: Slurm says $state"; return ;;
  esac
  if [ "$restarts" -ge "$MAX_REQUEUES" ]; then fail "not requeued: $restarts times is MAX_REQUEUES"; fi
  echo "$(date +%T) requeueing job $job: $1"
  for ((try = 1; try <= CONTROLLER_TRIES; try++)); do
    if scontrol requeue "$job"; then return; fi
    sleep "$CONTROLLER_PAUSE"
  done
  fail "not requeued: scontrol requeue $job has failed $CONTROLLER_TRIES times: submit the same command again"
}
