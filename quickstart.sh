#!/usr/bin/env bash
# The main job on a fresh machine: install, get proteins, prepare them, train the 8M ESM-2 on them, evaluate on held-out
# proteins, export the model for transformers, draw the curves, and print the result. If interrupted, start it again: it
# resumes.
#
#   ./quickstart.sh                          a generated sample of protein families
#   ./quickstart.sh --fasta my.fasta[.gz]    your own proteins
#   ./quickstart.sh --source URL             proteins from the web, say UniRef50 (13.6 GB)
#   ./quickstart.sh --steps 2000             train for longer (default: what takes a minute or two here)
#   ./quickstart.sh --output DIR             where it all goes (default: quickstart/<name of the proteins>)
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
script=$PWD/quickstart.sh

fail() { echo "error: $*" >&2; exit 2; }
from_here() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; } # paths are the caller's
say() { printf '\n== %s\n' "$*"; }

source_="" output="" longer=()
while [ $# -gt 0 ]; do
  case "$1" in
    --fasta | --source | --steps | --output) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --fasta) source_=$(from_here "$2"); [ -f "$source_" ] || fail "--fasta $2: no such file"; shift 2 ;;
    --source) source_=$2; shift 2 ;;
    --steps) [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "--steps $2: a number of steps"; longer=(--max_steps "$2"); shift 2 ;;
    --output) output=$(from_here "$2"); shift 2 ;;
    -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' "$script"; exit 0 ;;
    *) fail "unknown argument $1 (see ./quickstart.sh --help)" ;;
  esac
done
name=$(basename "${source_:-sample}")
output=${output:-quickstart/${name%%.*}}
mkdir -p "$output"
[ -n "${HF_HUB_OFFLINE:-}" ] || export HF_HUB_OFFLINE=1  # everything needed is here

say "1/5 Installing"
./install.sh
python=.venv/bin/python

say "2/5 Proteins"
if [ -z "$source_" ]; then
  source_=$output/sample.fasta.gz
  [ -f "$source_" ] || $python -m extras.prepare.sample "$source_"
fi
$python 0.download_data.py --source "$source_" --output_dir "$output"

say "3/5 Tokens: training, validation and test splits"
$python 1.tokenize_uniref_csv.py --input_dir "$output/csv" --output_dir "$output/processed" \
  --validation_size 0.05 --test_size 0.05

say "4/5 Training (and evaluating before, during and after)"
launch=("$python")
gpus=$($python -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -le 1 ] || launch=("$python" -m extras.launch --standalone --nproc_per_node="$gpus")
run=$output/run.json  # kept once written: a restart resumes with the same settings
[ -f "$run" ] || $python -m extras.quickstart_tuning --flags_file "$run" --seconds 90 \
  --config_name facebook/esm2_t6_8M_UR50D --dataset_dir "$output/processed/arrow" --output_dir "$output/model" \
  --max_seq_length 512 --tokens_per_pack 4096 --optim muon --learning_rate 2e-3 --mlm_probability 0.25 --logging_steps 10 \
  --save_steps 20 --save_total_limit 2 --do_eval --eval_on_start --eval_steps 0.5 --max_eval_samples 500
"${launch[@]}" train_ddp.py "$run" "${longer[@]}"

say "5/5 Result"
$python -m extras.report "$output/model"
cat <<EOF

Next:  train longer    the same command with --steps 2000 (it resumes from here)
       your proteins   ./quickstart.sh --fasta my_proteins.fasta
       larger models, UniRef, many GPUs: README.md
EOF
