#!/usr/bin/env bash
# transformers 5.17.0: EsmTokenizer cuts a text at letters that it knows; what is between two of them becomes one <unk>. A run
# of J, of stops, or of lower case (soft-masked repeats are) is one token, and a whole protein in lower case is <cls> <unk>
# <eos>: embeddings of length 1, without a warning. Residue i of the protein is then not token i + 1. Unknown letters one at a
# time keep their place.
# Seen 2026-11-28, Python 3.11, ESM-2's 33 tokens:
#   MKJT 4 residues, 4 tokens   MKJJJT 6, 4   MKaaaaT 7, 4   mktayi 6, 1   MK**T 5, 4
# Fails if MKJJJT has 6 tokens. What helps: upper case, and X for every letter that is none of the vocabulary.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet transformers==5.17.0
cd "$directory"
"$directory/venv/bin/python" - 2>/dev/null <<'END'
from pathlib import Path

from transformers import EsmTokenizer

tokens = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"
Path("vocab.txt").write_text("\n".join(tokens.split()))
tokenizer = EsmTokenizer("vocab.txt")
counts = {text: len(tokenizer(text)["input_ids"]) - 2 for text in ("MKJT", "MKJJJT", "MKaaaaT", "mktayi", "MK**T")}
words = [f"{text} {len(text)}, {count}" for text, count in counts.items()]
print(words[0].replace(",", " residues,") + " tokens   " + "   ".join(words[1:]))
assert list(counts.values()) == [4, 4, 4, 1, 4]
END
