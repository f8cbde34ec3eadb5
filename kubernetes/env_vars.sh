# The variables of the templates, with their values for two p5.48xlarge nodes. Copy, edit, then:
#
#   source kubernetes/env_vars.sh
#   kubernetes/render.sh train-ddp-template.yaml | kubectl apply -f -
#
# What the environment has already is kept.
# shellcheck shell=bash

# The image, as build.sh and push.sh have it.
export DOCKER_IMAGE_NAME=${DOCKER_IMAGE_NAME:-esm}
export TAG=${TAG:-aws}
export AWS_REGION=${AWS_REGION:-us-east-1}
export ACCOUNT=${ACCOUNT:-$(aws sts get-caller-identity --query Account --output text)}
export REGISTRY=${REGISTRY:-${ACCOUNT}.dkr.ecr.${AWS_REGION}.amazonaws.com/} # ends with a slash

# Directories on the claim fsx-claim, which is mounted at /fsx-shared: data, and results of training.
export TARGET_PATH=${TARGET_PATH:-/fsx-shared/esm}
export OUTPUT_DIR=${OUTPUT_DIR:-/fsx-shared}

export MODEL=${MODEL:-facebook/esm2_t36_3B_UR50D}

# Nodes, and what each has. EFA devices: p4d 4, p5 32, p5en 16, p6-b200 8, g5.8xlarge 1. 0 where there are none.
export NUM_NODES=${NUM_NODES:-2}
export GPU_PER_NODE=${GPU_PER_NODE:-8}
export EFA_PER_NODE=${EFA_PER_NODE:-32}

# Further flags of the scripts; they win over those of the templates. The guides' short first run:
#   export TRAIN_FLAGS="--max_train_samples=100000"
export DOWNLOAD_FLAGS=${DOWNLOAD_FLAGS:-}
export PREPROCESS_FLAGS=${PREPROCESS_FLAGS:-}
export TRAIN_FLAGS=${TRAIN_FLAGS:-}

# Tells this run from others of the same name. Keep it when you apply the manifest of a running job again.
export RUN_ID=${RUN_ID:-$(date -u +%Y%m%d-%H%M%S)}
