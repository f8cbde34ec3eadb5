#!/usr/bin/env bash
# duckdb 2.0.1: reading CSV guesses types, and T and F are booleans. A table of one site of a deep mutational scan, whose wild
# type is threonine (T) or phenylalanine (F) in all rows, gets a column of true or false; written again, it has "true" in place
# of T. Sites of tyrosine are text: of files a site, read one by one, some columns have another type. pandas 3.1.1 and pyarrow
# 26.0.1 read text.
# Seen 2026-11-28, Python 3.11:
#   duckdb: T BOOLEAN [True, True]   F BOOLEAN [False, False]   Y VARCHAR ['Y', 'Y']   written again: true,A,0.5
#   pandas: ['T', 'T']   pyarrow: ['T', 'T']
# Fails if duckdb reads T as text. What helps: all_varchar=true, or types={'wildtype': 'VARCHAR'}.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet duckdb==2.0.1 pandas==3.1.1 pyarrow==26.0.1
cd "$directory"
"$directory/venv/bin/python" - <<'END'
from pathlib import Path

import duckdb
import pandas
import pyarrow.csv

words = []
for residue in "TFY":
    Path(f"{residue}.csv").write_text(f"wildtype,mutant,score\n{residue},A,0.5\n{residue},V,-1.5\n")
    table = duckdb.sql(f"select wildtype from '{residue}.csv'")
    words.append(f"{residue} {table.types[0]} {[value for (value,) in table.fetchall()]}")
duckdb.sql("copy (from 'T.csv') to 'again.csv'")
again = Path("again.csv").read_text().splitlines()[1]
given = duckdb.sql("select wildtype from read_csv('T.csv', types={'wildtype': 'VARCHAR'})").fetchall()
others = [pandas.read_csv("T.csv").wildtype.tolist(), pyarrow.csv.read_csv("T.csv")["wildtype"].to_pylist()]
print(f"duckdb: {'   '.join(words)}   written again: {again}")
print(f"pandas: {others[0]}   pyarrow: {others[1]}")
assert words[0] == "T BOOLEAN [True, True]" and again == "true,A,0.5" and others == [["T", "T"]] * 2
assert given == [("T",), ("T",)]
END
