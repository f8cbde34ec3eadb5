# The variables of the templates, with their values for two p5.48xlarge nodes. Copy, edit, then:
#
#   source kubernetes/env_vars.sh
#   kubernetes/render.sh train-ddp-template.yaml | kubectl apply -f -
#
# Variables that are set already are kept. Plain envsubst (`envsubst < kubernetes/train-ddp-template.yaml | kubectl apply -f -`)
# reads only GUIDE and the guide's eleven: AWS_REGION ACCOUNT REGISTRY DOCKER_IMAGE_NAME TAG TARGET_PATH OUTPUT_DIR MODEL NUM_NODES
# GPU_PER_NODE EFA_PER_NODE; for all else a template has the value written in it.
# shellcheck shell=bash

# The image, as build.sh and push.sh have it.
export DOCKER_IMAGE_NAME=${DOCKER_IMAGE_NAME:-esm}
export TAG=${TAG:-aws}
export AWS_REGION=${AWS_REGION:-us-east-1}
if [ -z "${IMAGE_URI:-}${REGISTRY:-}${ACCOUNT:-}" ]; then
  ACCOUNT=$(aws sts get-caller-identity --query Account --output text) || {
    echo "error: ACCOUNT is not set and the aws command cannot tell it: export ACCOUNT=..., REGISTRY=... or IMAGE_URI=..." >&2
    return 2
  }
fi
export ACCOUNT=${ACCOUNT:-}
export REGISTRY=${REGISTRY:-${ACCOUNT:+${ACCOUNT}.dkr.ecr.${AWS_REGION}.amazonaws.com/}} # ends with a slash
# What the pods run. By digest, whatever becomes of the tag: export IMAGE_URI=$(./push.sh)
export IMAGE_URI=${IMAGE_URI:-${REGISTRY}${DOCKER_IMAGE_NAME}:${TAG}}

# Directories on the claim fsx-claim, which is mounted at /fsx-shared: data, and results of training.
export TARGET_PATH=${TARGET_PATH:-/fsx-shared/esm}
export OUTPUT_DIR=${OUTPUT_DIR:-/fsx-shared}

# For train-clm-template.yaml a decoder: llama2_{7b,13b,70b}, llama3_1_{8b,70b}, llama3_2_{1b,3b}, mathstral_7b, mistral_8x7b.
export MODEL=${MODEL:-facebook/esm2_t36_3B_UR50D}
# Weights to start from, on the claim (final_model/ of another run) or on the Hub; nothing: random ones.
export INIT_FROM=${INIT_FROM:-}

# The training job's name and the namespace of all: two jobs of one name in a namespace are one job, and to apply the second
# changes the first while it runs. Data jobs are named for what they do.
if [ -z "${JOB_NAME:-}" ] || [ "$JOB_NAME" = "${JOB_NAME_OF_ENV_VARS:-}" ]; then
  case $MODEL in facebook/*) JOB_NAME=esm2 ;; *) JOB_NAME=clm ;; esac
  JOB_NAME_OF_ENV_VARS=$JOB_NAME
fi
export JOB_NAME JOB_NAME_OF_ENV_VARS NAMESPACE=${NAMESPACE:-default}

# Nodes, and what each has. EFA devices: p4d 4, p5 32, p5en 16, p6-b200 8, g5.8xlarge 1. 0 where there are none.
export NUM_NODES=${NUM_NODES:-2}
export GPU_PER_NODE=${GPU_PER_NODE:-8}
export EFA_PER_NODE=${EFA_PER_NODE:-32}
# Memory request of a training pod: while a checkpoint is written, it holds a copy of weights and optimiser state, 12
# bytes a parameter over all pods; 16 GiB for the rest.
if [ -z "${MEMORY:-}" ] || [ "$MEMORY" = "${MEMORY_OF_ENV_VARS:-}" ]; then
  case $MODEL in
    *_650M_*) MEMORY=8 ;;
    *_3B_* | *3_2_3b) MEMORY=36 ;;
    *_15B_* | *_13b) MEMORY=182 ;;
    *_7b | *_8b) MEMORY=96 ;;
    *_8x7b) MEMORY=560 ;;
    *_70b) MEMORY=847 ;;
    *) MEMORY=16 ;;
  esac
  MEMORY=$((16 + (MEMORY + NUM_NODES - 1) / NUM_NODES))Gi
  MEMORY_OF_ENV_VARS=$MEMORY
fi
export MEMORY MEMORY_OF_ENV_VARS
# Huge pages, which EFA needs and nodes without it do not have.
if [ "$EFA_PER_NODE" = 0 ]; then HUGEPAGES=${HUGEPAGES:-0}; fi
export HUGEPAGES=${HUGEPAGES:-5120Mi}

# Context parallelism: ranks that share a pack, for train-ddp-cp-template.yaml. Must divide NUM_NODES x GPU_PER_NODE.
export CP_SIZE=${CP_SIZE:-2}

# The text that train-clm-template.yaml trains on, and what cuts it: `model` is the tokenizer that MODEL was published with.
export TEXT_FLAGS=${TEXT_FLAGS:---dataset=allenai/c4 --dataset_config_name=en --tokenizer=model}

# Pods of prepare-shards-template.yaml, which prepare the data together.
export SHARDS=${SHARDS:-16}

# 1: the guide's run of 100,000 proteins with the 8M model, whatever MODEL says, with results where the guide looks.
export GUIDE=${GUIDE:-0}

# Further flags of the scripts; they win over those of the templates.
# (No line breaks: they would break the manifest's line, too.)
export DOWNLOAD_FLAGS=${DOWNLOAD_FLAGS:-} PREPROCESS_FLAGS=${PREPROCESS_FLAGS:-} TRAIN_FLAGS=${TRAIN_FLAGS:-}
DOWNLOAD_FLAGS=${DOWNLOAD_FLAGS//$'\n'/ }
PREPROCESS_FLAGS=${PREPROCESS_FLAGS//$'\n'/ }
TRAIN_FLAGS=${TRAIN_FLAGS//$'\n'/ }

# Distinguishes this run from others of the same name: new each time this file is sourced, unless set already.
# Keep it when you apply the manifest of a running job again.
if [ -z "${RUN_ID:-}" ] || [ "$RUN_ID" = "${RUN_ID_OF_ENV_VARS:-}" ]; then
  RUN_ID=$(date -u +%Y%m%d-%H%M%S)
  RUN_ID_OF_ENV_VARS=$RUN_ID
fi
export RUN_ID RUN_ID_OF_ENV_VARS
