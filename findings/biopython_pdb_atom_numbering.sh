#!/usr/bin/env bash
# biopython 1.88: SeqIO's "pdb-atom" puts an X for every number that is skipped. Numberings that follow a family (Kabat and
# Chothia of antibodies, chymotrypsin's of proteases) skip numbers where nothing is missing: ten residues that are all joined
# become a sequence of 31 with 21 X. gemmi 0.7.5 gives the ten.
# Seen 2026-11-28, Python 3.11:
#   biopython SASGXXXKWXXXXXXXXXXXXXXXXXXYPNG (31)   gemmi SASGKWYPNG (10)
# Fails if biopython gives another number of X. What helps: the residues' own names, chain by chain.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet biopython==1.88 gemmi==0.7.5
cd "$directory"
"$directory/venv/bin/python" - 2>/dev/null <<'END'
from pathlib import Path

import gemmi
from Bio import SeqIO

residues = "25 SER, 26 ALA, 27 SER, 28 GLY, 32 LYS, 33 TRP, 52 TYR, 52A PRO, 52B ASN, 53 GLY".split(", ")
lines = []
for step, (number, name) in enumerate(residue.split() for residue in residues):
    place = number if number[-1].isalpha() else number + " "
    for atom, x, y in (("N", 0, 0), ("CA", 1.46, 0), ("C", 2.0, 1.4), ("O", 1.2, 2.3)):
        end = f"{3.3 * step + x:8.3f}{y:8.3f}{0:8.3f}{1:6.2f}{20:6.2f}{atom[0]:>12}"
        lines.append(f"ATOM  {len(lines) + 1:5d}  {atom:<4s}{name} A{place:>5}   {end}")
Path("x.pdb").write_text("\n".join([*lines, "TER", "END", ""]))

[record] = SeqIO.parse("x.pdb", "pdb-atom")
structure = gemmi.read_structure("x.pdb")
structure.setup_entities()
sequence = structure[0]["A"].get_polymer().make_one_letter_sequence()
print(f"biopython {record.seq} ({len(record)})   gemmi {sequence} ({len(sequence)})")
assert record.seq.count("X") == 21 and record.seq.replace("X", "") == sequence == "SASGKWYPNG"
END
