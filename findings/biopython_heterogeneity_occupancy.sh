#!/usr/bin/env bash
# biopython 1.88: of two residues in one place of a structure (serine in 70 % of the molecules, threonine in 30 %) it shows the
# one that the file names last, though its occupancy is the lower: sequence, mutants and coordinates are the minor form's. gemmi
# 0.7.5 and biotite 1.6.0 take serine, so that one file has two sequences.
# Seen 2026-11-28, Python 3.11:
#   biopython THR occupancy 0.3   gemmi SER 0.7   biotite SER 0.7
# Fails if biopython shows serine. What helps: residue.disordered_select(name) by the occupancy of its atoms.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet biopython==1.88 gemmi==0.7.5 biotite==1.6.0 numpy==2.4.6
cd "$directory"
"$directory/venv/bin/python" - <<'END'
from pathlib import Path

import biotite.structure.io.pdb as biotite_pdb
import gemmi
from Bio.PDB import PDBParser

lines = []
for number, (name, place, share, x) in enumerate([("SER", "A", 0.7, 5.0), ("THR", "B", 0.3, 5.2)]):
    for atom in ("N", "CA", "C", "O"):
        x += 1.4
        end = f"{x:8.3f}{0:8.3f}{0:8.3f}{share:6.2f}{20:6.2f}{atom[0]:>12}"
        lines.append(f"ATOM  {len(lines) + 1:5d}  {atom:<3s}{place}{name} A   3    {end}")
Path("x.pdb").write_text("\n".join([*lines, "TER", "END", ""]))

residue = PDBParser(QUIET=True).get_structure("x", "x.pdb")[0]["A"][3]
shown = [(residue.resname, residue["CA"].occupancy)]
structure = gemmi.read_structure("x.pdb")
structure.remove_alternative_conformations()
shown.append((structure[0]["A"][0].name, structure[0]["A"][0]["CA"][0].occ))
atoms = biotite_pdb.PDBFile.read("x.pdb").get_structure(model=1, extra_fields=["occupancy"])
shown.append((str(atoms.res_name[1]), atoms.occupancy[1]))
words = [f"{name} {share:.1f}" for name, share in shown]
print(f"biopython {words[0].replace(' ', ' occupancy ')}   gemmi {words[1]}   biotite {words[2]}")
assert words == ["THR 0.3", "SER 0.7", "SER 0.7"]
END
