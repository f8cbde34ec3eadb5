#!/usr/bin/env bash
# ProDy 2.6.1: parsePDB keeps, by default, atoms without a letter of place and those of place A. Where a residue's places are B
# and C alone (authors remove A, or letter a chain's groups through) the whole residue is gone, without a word: the sequence is
# shorter, and contacts join residues that are no neighbours. gemmi 0.7.5 keeps it.
# Seen 2026-11-28, Python 3.11:
#   ProDy AGK numbers [1, 2, 4]   gemmi AGSK
# Fails if ProDy has residue 3. What helps: altloc="all", and a choice between the places.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet prody==2.6.1 gemmi==0.7.5
cd "$directory"
"$directory/venv/bin/python" - <<'END'
from pathlib import Path

import gemmi
import prody

lines = []
RESIDUES = [(1, "ALA", " ", 1), (2, "GLY", " ", 1), (3, "SER", "B", 0.6), (3, "SER", "C", 0.4), (4, "LYS", " ", 1)]
for number, name, place, share in RESIDUES:
    for step, atom in enumerate(("N", "CA", "C", "O")):
        end = f"{3.8 * number + 1.2 * step:8.3f}{step % 2:8.3f}{0:8.3f}{share:6.2f}{20:6.2f}{atom[0]:>12}"
        lines.append(f"ATOM  {len(lines) + 1:5d}  {atom:<3s}{place}{name} A{number:4d}    {end}")
Path("x.pdb").write_text("\n".join([*lines, "TER", "END", ""]))

prody.confProDy(verbosity="none")
alpha = prody.parsePDB("x.pdb").ca
whole = gemmi.read_structure("x.pdb")
whole.setup_entities()
sequence = whole[0]["A"].get_polymer().make_one_letter_sequence()
print(f"ProDy {alpha.getSequence()} numbers {alpha.getResnums().tolist()}   gemmi {sequence}")
assert prody.parsePDB("x.pdb", altloc="all").ca.getSequence() == "AGSSK"
assert alpha.getSequence() == "AGK" and sequence == "AGSK"
END
