#!/usr/bin/env bash
# ESM-2 8M from random weights to a stated held-out loss, timed: data, training, evaluation and the leaderboard's row.
# The rules and the table: benchmarks/results/speedrun.md. If interrupted, start it again: it resumes.
#
#   benchmarks/speedrun.sh --fasta proteins.fasta.gz    two CPU cores, half an hour
#   benchmarks/speedrun.sh --gpu [--fasta FILE_OR_URL]  the GPUs of this machine; default: UniRef50 (13.6 GB). Never run yet.
#   ... --output DIR           where it all goes (default: speedrun/cpu or speedrun/gpu)
#   ... --seed N               (default: 42)
#   ... --price_per_hour X     of the machine, for the row
#   ... --held_out any         accept another held-out set than the leaderboard's, for a table of your own
#   ... --max_eval_samples N   judge by the first N held-out proteins, to try it out: another held-out set
#   ... -- --learning_rate X   flags of the train script, to try a change without an edit; they win over those below
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2; exit 2; }
from_here() { case $1 in /* | *://*) echo "$1" ;; *) echo "$here/$1" ;; esac; } # paths are the caller's

form=cpu fasta="" output="" seed=42 held_out="" referee=() changes=() typed="benchmarks/speedrun.sh"
while [ $# -gt 0 ]; do
  case "$1" in
    --fasta | --output | --seed | --price_per_hour | --held_out | --max_eval_samples) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --gpu) form=gpu typed="$typed $1"; shift ;;
    --fasta) fasta=$(from_here "$2"); typed="$typed $1 $(basename "$2")"; shift 2 ;;
    --output) output=$(from_here "$2"); shift 2 ;;
    --seed) seed=$2; typed="$typed $1 $2"; shift 2 ;;
    --price_per_hour | --max_eval_samples) referee+=("$1" "$2"); shift 2 ;;
    --held_out) held_out=$2; shift 2 ;;
    --) shift; changes=("$@"); typed="$typed -- $*"; break ;;
    -h | --help) sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' benchmarks/speedrun.sh; exit 0 ;;
    *) fail "unknown argument $1 (see benchmarks/speedrun.sh --help)" ;;
  esac
done
output=${output:-speedrun/$form}

# ---- the form: data, target, held-out set and recipe. An attempt changes the recipe. ----
if [ "$form" = cpu ]; then
  [ -n "$fasta" ] || fail "--fasta: the FASTA file of the proteins (see benchmarks/results/speedrun.md)"
  split=(--cluster 0.5 --validation_size 400 --test_size 400)
  referee+=(--target 2.84 --held_out "${held_out:-7379f206aeb9}")
  launch=(python)
  recipe=(--bf16 --tokens_per_pack 4096 --max_seq_length 512 --max_steps 1000 --dataloader_num_workers 0)
else
  split=(--validation_size 10000 --test_size 10000) # UniRef50's proteins have at most 50 % in common
  referee+=(--target 2.70 --held_out "${held_out:-any}") # the first entry fixes it
  launch=(torchrun --standalone --nproc_per_node=gpu)
  recipe=(--bf16 --backend torch --tokens_per_pack 65536 --tokens_per_step 524288 --max_seq_length 512 --max_steps 2000)
fi
recipe+=(--optim muon --mlm_probability 0.25 --learning_rate 1e-3)

# ---- not timed: the data ----
python 0.download_data.py --output_dir "$output/data" ${fasta:+--source "$fasta"}
python 1.tokenize_uniref_csv.py --input_dir "$output/data/csv" --output_dir "$output/data/processed" "${split[@]}"

# ---- timed: from the start of this process to its end, final_model included; then evaluated and judged ----
exec python -m benchmarks.speedrun --dataset_dir "$output/data/processed/arrow" --output_dir "$output" \
  --as_typed "$typed" "${referee[@]}" -- "${launch[@]}" train_ddp.py --config_name facebook/esm2_t6_8M_UR50D \
  --seed "$seed" --save_minutes 5 --save_total_limit 1 --disable_tqdm "${recipe[@]}" "${changes[@]}"
