# Functions of the decoders' jobs, which source this file from the repository's root; it sources common.sh.
#
# The text is streamed: nothing to prepare. Hub access: HF_TOKEN, for gated tokenizers and more requests an hour.
# shellcheck shell=bash

# Results may lie in the repository, which the nodes share.
: "${TARGET_PATH:=$PWD}"
# One cache for all nodes, and a token that `hf auth login` has kept stays in use.
export HF_TOKEN_PATH=${HF_TOKEN_PATH:-${HF_HOME:-$HOME/.cache/huggingface}/token}
export HF_HOME=${HF_HOME:-$TARGET_PATH/.cache/huggingface}
export HF_HUB_ETAG_TIMEOUT=${HF_HUB_ETAG_TIMEOUT:-60}
# shellcheck source=slurm/common.sh
. slurm/common.sh

# train_clm ARGS...     train_fsdp2.py with ARGS, of which the first names MODEL, and INIT_FROM; requeues the job
train_clm() {
  [ -n "$MODEL" ] || lacks "MODEL is not set: say llama3_1_8b (see slurm/env.sh)"
  local start=("$1" ${INIT_FROM:+--model_name_or_path="$INIT_FROM"})
  outside_of_a_job "${start[@]}" "${@:2}"
  count_gpus
  pretrain train_fsdp2.py "${start[@]}" "${@:2}"
}
