#!/usr/bin/env bash
# gemmi 0.7.5: two of its functions name a modified residue differently. make_one_letter_sequence() of a chain with coordinates
# writes it as its parent in lower case (selenomethionine m, phosphoserine s), one_letter_code() of the names as X. In an A3M
# file lower case is an insertion, in FASTA often a masked residue: readers of the first take it out: without lower case this
# chain has three residues of five.
# Seen 2026-11-28, Python 3.11:
#   names ALA MSE GLY SEP LYS: the chain AmGsK, the names AXGXK, the chain read as A3M AGK
# Fails if both give the same. What helps: .upper() of the first.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet gemmi==0.7.5
cd "$directory"
"$directory/venv/bin/python" - <<'END'
from pathlib import Path

import gemmi

names = ["ALA", "MSE", "GLY", "SEP", "LYS"]
lines = []
for step, name in enumerate(names):
    for atom, x, y in (("N", 0, 0), ("CA", 1.46, 0), ("C", 2.0, 1.4), ("O", 1.2, 2.3)):
        end = f"{3.3 * step + x:8.3f}{y:8.3f}{0:8.3f}{1:6.2f}{20:6.2f}{atom[0]:>12}"
        kind = "HETATM" if name in ("MSE", "SEP") else "ATOM  "
        lines.append(f"{kind}{len(lines) + 1:5d}  {atom:<4s}{name} A{step + 1:4d}    {end}")
Path("x.pdb").write_text("\n".join([*lines, "TER", "END", ""]))

structure = gemmi.read_structure("x.pdb")
structure.setup_entities()
chain, of_names = structure[0]["A"].get_polymer().make_one_letter_sequence(), gemmi.one_letter_code(names)
columns = "".join(letter for letter in chain if not letter.islower())
print(f"names {' '.join(names)}: the chain {chain}, the names {of_names}, the chain read as A3M {columns}")
assert chain == "AmGsK" and of_names == "AXGXK" and columns == "AGK"
END
