#!/usr/bin/env bash
# pyfastx 2.3.1: Fasta("x.fasta") writes an index x.fasta.fxi at the first use and trusts it for ever: neither size nor time of
# the FASTA file is compared. After the file is replaced (a new release, a filtered set) under the same name, old names get
# residues from other proteins, new records are missing, and nothing is said. pyfaidx 0.9.2.2 makes its index anew.
# Seen 2026-11-28, Python 3.11:
#   the file: {'z': 'WWWWWWWWWWWWWWWW', 'a': 'CCCCCC', 'b': 'DDDDDD', 'c': 'EEE'}
#   pyfastx:  {'a': 'WWWWWW', 'b': 'WWWWWW'}
#   pyfaidx:  {'z': 'WWWWWWWWWWWWWWWW', 'a': 'CCCCCC', 'b': 'DDDDDD', 'c': 'EEE'}
# Fails if pyfastx gives the file's records. What helps: delete *.fxi when a file changes.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet pyfastx==2.3.1 pyfaidx==0.9.2.2
cd "$directory"
"$directory/venv/bin/python" - <<'END'
import time
from pathlib import Path

import pyfaidx
import pyfastx

path = Path("x.fasta")
path.write_text(">a\nMKTAYI\n>b\nGGGGGG\n")
for reader in (pyfastx.Fasta("x.fasta"), pyfaidx.Fasta("x.fasta")):
    assert str(reader["b"]) == "GGGGGG"
del reader
time.sleep(1.1)

records = {"z": "W" * 16, "a": "CCCCCC", "b": "DDDDDD", "c": "EEE"}
path.write_text("".join(f">{name}\n{text}\n" for name, text in records.items()))
stale = {record.name: record.seq for record in pyfastx.Fasta("x.fasta")}
fresh = {record.name: str(record) for record in pyfaidx.Fasta("x.fasta")}
Path("x.fasta.fxi").unlink()
assert {record.name: record.seq for record in pyfastx.Fasta("x.fasta")} == records
print(f"the file: {records}\npyfastx:  {stale}\npyfaidx:  {fresh}")
assert fresh == records and stale == {"a": "WWWWWW", "b": "WWWWWW"}
END
