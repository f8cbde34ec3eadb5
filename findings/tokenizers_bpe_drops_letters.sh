#!/usr/bin/env bash
# tokenizers 0.23.3: a BPE model without unk_token drops letters that its vocabulary lacks: no error, no token, and the offsets
# are those of the text without them, so that they point at other residues than the tokens'. WordLevel raises an error of the
# same text. With a vocabulary of the 20 residues a protein loses U, X, B, Z, O, J and lower case, and all residues behind them
# have other positions than in the FASTA file.
# Seen 2026-11-28, Python 3.11:
#   MKUTXA: BPE ['M', 'K', 'T', 'A'] offsets [(0, 1), (1, 2), (2, 3), (3, 4)]   WordLevel: an error
# Fails if BPE gives six tokens or an error. What helps: unk_token, with fuse_unk=False.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet tokenizers==0.23.3
"$directory/venv/bin/python" - <<'END'
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

vocabulary = {residue: number for number, residue in enumerate("ACDEFGHIKLMNPQRSTVWY")}
found = Tokenizer(models.BPE(vocab=vocabulary, merges=[])).encode("MKUTXA")

words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
try:
    other = words.encode("MKUTXA").tokens
except Exception:
    other = "an error"
print(f"MKUTXA: BPE {found.tokens} offsets {found.offsets}   WordLevel: {other}")
assert found.tokens == list("MKTA") and found.offsets[2] == (2, 3) and other == "an error"
END
