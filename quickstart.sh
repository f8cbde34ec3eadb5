#!/usr/bin/env bash
# The main job on a fresh machine: install, get proteins, prepare them, train the 8M ESM-2 on them, evaluate on held-out
# proteins, export the model for transformers, draw the curves, and print the result. If interrupted, start it again: it
# resumes.
#
#   ./quickstart.sh                          a generated sample of proteins, some of known structure: it ends in a contact map
#   ./quickstart.sh --fasta my.fasta[.gz]    your own proteins
#   ./quickstart.sh --dataset DIR            parquet, Arrow, CSV, TSV, JSON lines or FASTA; or a Hub dataset (OWNER/NAME)
#   ./quickstart.sh --source URL             proteins from the web, say UniRef50 (13.6 GB)
#   ./quickstart.sh --text my.txt            a small Llama on a text instead, which ends in a sample of what it writes
#   ./quickstart.sh --fasta my.fasta --generate   and new proteins by the trained model at the end
#   ./quickstart.sh --steps 2000             train for longer (default: what takes a minute or two here; ends there)
#   ./quickstart.sh --output DIR             where it all goes (default: quickstart/<name of the proteins>)
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
script=$PWD/quickstart.sh

fail() { echo "error: $*" >&2; exit 2; }
from_here() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; } # paths are the caller's
say() {
  printf '\n== %s\n' "$*"
  quiet
  said=$* began=$SECONDS
  tick & ticking=$!
}
quiet() { if [ -n "$ticking" ]; then kill "$ticking" 2>/dev/null && wait "$ticking" 2>/dev/null; ticking=""; fi || true; }
# A line every ten seconds, whatever runs; on a terminal in place of a progress bar, which is drawn again below it.
tick() {
  local clear=""
  [ ! -t 1 ] || clear=$'\r\033[K'
  while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    echo "${clear}   ${said%% (*}: $((SECONDS - began)) s so far"
  done
}
ticking="" said="" began=0
trap quiet EXIT

source_="" dataset="" text="" output="" generate="" budget=()
while [ $# -gt 0 ]; do
  case "$1" in
    --fasta | --dataset | --source | --text | --steps | --output) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --fasta) source_=$(from_here "$2"); [ -f "$source_" ] || fail "--fasta $2: no such file"; shift 2 ;;
    --dataset)
      dataset=$2
      if [ -e "$(from_here "$2")" ]; then
        dataset=$(from_here "$2")
      else
        [[ "$2" =~ ^[A-Za-z0-9_][^/]*/[^/]+$ ]] || fail "--dataset $2: no such file or directory, and no OWNER/NAME of the Hub"
        export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-0}"
      fi
      shift 2 ;;
    --source) source_=$2; shift 2 ;;
    --text) text=$(from_here "$2"); [ -f "$text" ] || fail "--text $2: no such file"; shift 2 ;;
    --steps) [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "--steps $2: a number of steps"; budget=(--max_steps "$2" --stop_after_minutes 0); shift 2 ;;
    --generate) generate=yes; shift ;;
    --output) output=$(from_here "$2"); shift 2 ;;
    -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' "$script"; exit 0 ;;
    *) fail "unknown argument $1 (see ./quickstart.sh --help)" ;;
  esac
done
[ -z "$source_$dataset" ] || [ -z "$text" ] || fail "--text: proteins and a text need a run each"
[ -z "$source_" ] || [ -z "$dataset" ] || fail "--dataset and --fasta or --source: give one of them"
[ -z "$generate" ] || [ -z "$text" ] || fail "--generate: of proteins; --text ends in a sample anyway"
name=$(basename "${text:-${dataset:-${source_:-sample}}}")
output=${output:-quickstart/${name%%.*}}
mkdir -p "$output"
[ -n "${HF_HUB_OFFLINE:-}" ] || export HF_HUB_OFFLINE=1  # everything needed is here

say "1/5 Installing"
./install.sh
python=.venv/bin/python

launch=("$python")
gpus=$($python -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -le 1 ] || launch=("$python" -m extras.launch --standalone --nproc_per_node="$gpus")

if [ -n "$text" ]; then
  say "2/5 Tokens: a byte each; training and validation documents"
  $python 1.tokenize_text.py --dataset "$text" --output_dir "$output/processed" --validation_size 0.05

  say "3/5 Training (and evaluating before, during and after)"
  # On a CPU without bf16 instructions fp32 is faster.
  bf16=$($python -c 'import torch
from extras.plan.quickstart_tuning import likely_precisions
print(likely_precisions(torch.device("cuda" if torch.cuda.is_available() else "cpu"))[0] == "bf16")')
  "${launch[@]}" train_ddp.py --model_type llama_v3 --hidden_width 256 --num_layers 4 --num_heads 4 \
    --intermediate_size 1024 --vocab_size 259 --max_context_width 256 --train_batch_size 8 --bf16 "$bf16" \
    --optim muon --learning_rate 2e-3 --dataset_dir "$output/processed/text" --output_dir "$output/model" \
    --max_steps 240 --logging_steps 10 --save_steps 20 --save_total_limit 2 --do_eval --eval_on_start \
    --eval_steps 0.5 --stop_after_minutes 2 --save_final_model True "${budget[@]}"

  say "4/5 Result"
  $python -m extras.report "$output/model"

  say "5/5 What it writes"
  $python generate.py --model_name_or_path "$output/model" --prompt "The "
  quiet
  cat <<EOF

Next:  more of it      .venv/bin/python generate.py --model_name_or_path $output/model
       train longer    the same command with --steps 2000 (it resumes from here)
       larger models, other tokenizers, many GPUs: docs/decoders.md
EOF
  exit 0
fi

say "2/5 Proteins"
structures="" contacts=() seconds=90 minutes=2
if [ -z "$source_$dataset" ]; then
  source_=$output/sample.fasta.gz structures=$output/structures seconds=120 minutes=2.5
  contacts=(--eval_contacts "$structures")
  [ -f "$source_" ] ||
    $python -m extras.prepare.sample "$source_" --num_proteins 1000 --repeats 6000 --structures "$structures"
fi
input=(--source "$dataset")  # training shuffles: no step 0
if [ -z "$dataset" ]; then
  $python 0.download_data.py --source "$source_" --output_dir "$output"
  input=(--input_dir "$output/csv")
fi

say "3/5 Tokens: training, validation and test splits"
$python 1.tokenize_uniref_csv.py "${input[@]}" --output_dir "$output/processed" \
  --validation_size 0.05 --test_size 0.05

say "4/5 Training (and evaluating before, during and after)"
masks=(--mlm_probability 0.25)
[ -z "$generate" ] || masks=(--objective mdlm)  # generation begins at masks alone
run=$output/run.json  # kept once written: a restart resumes with the same settings
[ -f "$run" ] || $python -m extras.plan.quickstart_tuning --flags_file "$run" --seconds $seconds \
  --config_name facebook/esm2_t6_8M_UR50D --dataset_dir "$output/processed/arrow" --output_dir "$output/model" \
  --max_seq_length 512 --tokens_per_pack 4096 --optim muon --learning_rate 2e-3 "${masks[@]}" --logging_steps 10 \
  --save_steps 20 --save_total_limit 2 --do_eval --eval_on_start --eval_steps 0.5 --max_eval_samples 500 \
  --stop_after_minutes $minutes --save_final_model True "${contacts[@]}"
"${launch[@]}" train_ddp.py "$run" "${budget[@]}"

say "5/5 Result"
$python -m extras.report "$output/model"
if [ -d "$structures" ] && [ -d "$output/model/final_model" ]; then
  # Of chains that were not trained on; predicted above the diagonal, true below.
  $python contacts.py --model_name_or_path "$output/model/final_model" --structures "$structures" \
    --output_dir "$output/contacts" --maps 3 --overwrite
  printf 'maps    %s\n' "$output"/contacts/*.png
fi
if [ -n "$generate" ] && [ -d "$output/model/final_model" ]; then
  say "New proteins: 20, of lengths as in training"
  $python generate.py --model_name_or_path "$output/model/final_model" --length_from "$output/processed/arrow" \
    --num_samples 20 --steps 50 --output "$output/generated.fasta" --overwrite
  $python -m extras.after.generation.known "$output/generated.fasta" "$output/processed/arrow"
  printf 'written      %s\n' "$output/generated.fasta"
fi
quiet
cat <<EOF

Next:  use the model   embeddings, contact maps, mutations, fine-tuning: docs/after.md
       train longer    the same command with --steps 2000 (it resumes from here)
       your proteins   ./quickstart.sh --fasta my_proteins.fasta
       larger models, UniRef, many GPUs: README.md
EOF
