#!/usr/bin/env bash
# ProDy 2.6.1: an mmCIF file names chains and numbers residues twice, by the authors (auth_) and by the archive (label_).
# parseMMCIF takes the chain from label_asym_id and the number from auth_seq_id: a pair that neither naming has. Residue B 10 of
# a paper is A 10 here, and A 10 of the paper may be another protein's. biopython 1.88 gives B 10.
# Seen 2026-11-28, Python 3.11:
#   ProDy A 10   biopython B 10   the file: B 10 by auth_, A 1 by label_
# Fails if ProDy gives a pair of one naming. What helps: unite_chains=True gives B 10.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet prody==2.6.1 biopython==1.88
cd "$directory"
"$directory/venv/bin/python" - <<'END'
from pathlib import Path

import prody
from Bio.PDB import MMCIFParser

fields = """group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id
pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_comp_id auth_asym_id auth_atom_id
pdbx_PDB_model_num""".split()
lines = ["data_1ABC", "loop_", *(f"_atom_site.{field}" for field in fields)]
for number, name in ((1, "ALA"), (2, "GLY"), (3, "SER")):
    for step, atom in enumerate(("N", "CA", "C", "O")):
        place = f"{3.8 * number + 1.2 * step:.3f} {step % 2:.3f} 0.000 1.00 20.00"
        lines.append(f"ATOM {4 * number + step} {atom[0]} {atom} . {name} A 1 {number} ? {place} {number + 9} {name} B {atom} 1")
Path("x.cif").write_text("\n".join([*lines, "#", ""]))

prody.confProDy(verbosity="none")
atoms = prody.parseMMCIF("x.cif")
united = prody.parseMMCIF("x.cif", unite_chains=True)
[chain] = MMCIFParser(QUIET=True).get_structure("x", "x.cif")[0]
pairs = [f"{atoms.getChids()[0]} {atoms.getResnums()[0]}", f"{chain.id} {next(iter(chain)).id[1]}"]
print("ProDy {}   biopython {}   the file: B 10 by auth_, A 1 by label_".format(*pairs))
assert pairs == ["A 10", "B 10"] and f"{united.getChids()[0]} {united.getResnums()[0]}" == "B 10"
END
