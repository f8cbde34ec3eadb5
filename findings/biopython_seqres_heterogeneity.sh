#!/usr/bin/env bash
# biopython 1.88: SeqIO's "cif-seqres" takes a residue for every row of _pdbx_poly_seq_scheme. At a position with two residues
# (microheterogeneity: a part of the molecules has serine, the others threonine) the table has two rows of one seq_id, so that
# the protein gets a residue too many, and all that follow are shifted. Contacts and labels by position are wrong then. gemmi
# 0.7.5 reads the sequence of the same table's entity with one residue there.
# Seen 2026-11-28, Python 3.11:
#   biopython AGSTKV (6 residues)   gemmi AGSKV (5 residues)   positions in the file: 5
# Fails if biopython gives as many residues as there are positions.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet biopython==1.88 gemmi==0.7.5
cd "$directory"
"$directory/venv/bin/python" - <<'END'
from pathlib import Path

import gemmi
from Bio import SeqIO

residues = [(1, "ALA"), (2, "GLY"), (3, "SER"), (3, "THR"), (4, "LYS"), (5, "VAL")]
fields = "asym_id entity_id seq_id mon_id pdb_seq_num auth_seq_num pdb_mon_id auth_mon_id pdb_strand_id pdb_ins_code hetero"
lines = ["data_1ABC", "loop_", "_entity_poly_seq.entity_id", "_entity_poly_seq.num", "_entity_poly_seq.mon_id"]
lines += [f"1 {number} {name}" for number, name in residues]
lines += ["#", "loop_", *(f"_pdbx_poly_seq_scheme.{field}" for field in fields.split())]
for number, name in residues:
    lines.append(f"A 1 {number} {name} {number} {number} {name} {name} A . {'y' if number == 3 else 'n'}")
lines += ["#", "loop_", "_entity.id", "_entity.type", "1 polymer", "#"]
Path("x.cif").write_text("\n".join(lines) + "\n")

[record] = SeqIO.parse("x.cif", "cif-seqres")
[entity] = gemmi.read_structure("x.cif").entities
sequence = gemmi.one_letter_code([gemmi.Entity.first_mon(name) for name in entity.full_sequence])
one, other = f"{record.seq} ({len(record)} residues)", f"{sequence} ({len(sequence)} residues)"
print(f"biopython {one}   gemmi {other}   positions in the file: {residues[-1][0]}")
assert record.seq == "AGSTKV" and sequence == "AGSKV"
END
