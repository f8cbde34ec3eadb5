#!/usr/bin/env bash
# webdataset 1.0.2: a file's key ends at the first dot of its name. Accessions with a version have a dot (NP_000537.3): two
# versions, or isoforms, of one protein that follow each other become one sample, whose fields are named "2.seq" and "3.seq".
# TarWriter writes such keys without a word, so that writing and reading three proteins gives two.
# Seen 2026-11-28, Python 3.11:
#   written: NP_000537.2 NP_000537.3 NP_000538.1
#   read:    {'NP_000537': ['2.seq', '3.seq'], 'NP_000538': ['1.seq']}
# Fails if three samples are read. What helps: keys without dots, the accession as a field.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet webdataset==1.0.2 numpy==2.4.6
cd "$directory"
"$directory/venv/bin/python" - <<'END'
import webdataset

names = ["NP_000537.2", "NP_000537.3", "NP_000538.1"]
with webdataset.TarWriter("x.tar") as file:
    for number, name in enumerate(names):
        file.write({"__key__": name, "seq": "MKT" + "AGV"[number]})
samples = {}
for sample in webdataset.WebDataset("x.tar", shardshuffle=False):
    samples[sample["__key__"]] = sorted(field for field in sample if not field.startswith("__"))
print(f"written: {' '.join(names)}\nread:    {samples}")
assert samples == {"NP_000537": ["2.seq", "3.seq"], "NP_000538": ["1.seq"]}
END
