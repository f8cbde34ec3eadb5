# The settings of the jobs. Each can be given in the environment instead, for one submission or for good:
#   MODEL=facebook/esm2_t36_3B_UR50D sbatch slurm/train_fsdp.sh
# shellcheck shell=bash disable=SC2034

# Where data and results go: a directory on a filesystem that all nodes share. No default; for decoders the repository.
: "${TARGET_PATH:=}"
# The model: facebook/esm2_t{6_8M,12_35M,30_150M,33_650M,36_3B,48_15B}_UR50D; for train_clm.sh a decoder: llama2_{7b,13b,70b},
# llama3_1_{8b,70b}, llama3_2_{1b,3b}, mathstral_7b, mistral_8x7b, a directory or a name on the Hub. Default: INIT_FROM's.
: "${MODEL:=${INIT_FROM:-}}"
# Weights to start from: a directory (final_model/ of another run) or a name on the Hub. Default: random ones.
: "${INIT_FROM:=}"
# 1: the guides' short run of ESM-2: 100,000 proteins with the 8M model, whatever MODEL says (configs/guide_*.yaml).
: "${GUIDE:=}"
# Proteins to train on, as slurm/preprocess.sh writes them. Set it to nothing to pass --dataset instead.
: "${DATASET_DIR=${TARGET_PATH:+$TARGET_PATH/processed/arrow}}"
# train_clm.sh's own: text to train on, read in place: a dataset on the Hub, or files; `en` is C4's English. Set it to
# nothing to pass --dataset_dir instead.
: "${DATASET=allenai/c4}"
if [ "$DATASET" = allenai/c4 ]; then : "${DATASET_CONFIG_NAME:=en}"; fi
: "${DATASET_CONFIG_NAME:=}"
# What cuts the text: a name on the Hub, a directory, or `bytes`. Default: the one that a named MODEL was published with.
: "${TOKENIZER:=}"
# Checkpoints, metrics and final_model/. Default: $TARGET_PATH/out-ddp, out-ddp-cp, out-fsdp, out-mfsdp or out-clm/MODEL.
# Another model needs another one.
: "${OUTPUT_DIR:=}"

# Ranks a node. Default: the GPUs that the job requested; without a request, all that Slurm has there (sinfo's %G); where it
# manages none, those that `nvidia-smi -L` lists on the first node. Set it on CPUs.
: "${NPROC_PER_NODE:=}"
# Survive lost nodes: submit an array of one-node jobs, of which at least so many train: MIN_NODES=1 sbatch --array=0-3 --nodes=1
# (docs/slurm.md). Empty: the nodes of one job, which is requeued if it loses one.
: "${MIN_NODES:=}"
# GPUs of a node, if a job without --gpus-per-node is to use fewer than all.
: "${GPUS_PER_NODE:=}"
# Ranks that share a pack, neighbours; train_ddp_cp.sh's own. It divides the ranks of the job.
: "${CP_SIZE:=2}"

# A container image for pyxis: a file that enroot.sh wrote, or REGISTRY#IMAGE:TAG. Default: what enroot.sh has written for
# this TARGET_PATH and DOCKER_IMAGE_NAME, if it is there. Empty: the .venv of create_venv.sh.
: "${DOCKER_IMAGE_NAME:=esm}"
if [ -n "$TARGET_PATH" ] && [ -f "$TARGET_PATH/$DOCKER_IMAGE_NAME.sqsh" ]; then
  : "${CONTAINER_IMAGE=$TARGET_PATH/$DOCKER_IMAGE_NAME.sqsh}"
fi
: "${CONTAINER_IMAGE:=}"
# Mounted in it, besides the repository and TARGET_PATH: SRC:DST, comma-separated.
: "${CONTAINER_MOUNTS:=}"

# efa on instances with Elastic Fabric Adapters (p4d, p5, g5.8xlarge, ...); empty elsewhere.
: "${FI_PROVIDER:=}"
: "${NCCL_DEBUG:=WARN}"
# Interfaces that NCCL must not use, for its first connections or without EFA; on one node: the only one that it needs.
if [ "${SLURM_JOB_NUM_NODES:-}" = 1 ] && [ -z "$MIN_NODES" ]; then : "${NCCL_SOCKET_IFNAME:=lo}"; fi
: "${NCCL_SOCKET_IFNAME:=^docker,lo,veth}"

# Before training, extras.preflight looks at every node: error or warn, what stops the job; or off.
: "${PREFLIGHT:=error}"
# Further flags of it; they win: --gpus_per_node=0, --max_clock_skew=5, ...
: "${PREFLIGHT_FLAGS:=}"
# Seconds that the other ranks and nodes have to end once the first has: more than a save takes.
: "${GRACE_SECONDS:=120}"
# A job that is stopped (walltime, preemption) puts itself back into the queue at most so many times.
: "${MAX_REQUEUES:=100}"
# How often a job that wants to go back into the queue asks a controller that does not answer, and with how many seconds
# between: five minutes.
: "${CONTROLLER_TRIES:=20}"
: "${CONTROLLER_PAUSE:=15}"
