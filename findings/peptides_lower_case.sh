#!/usr/bin/env bash
# peptides 0.5.0: Peptide("mkwvtf...") takes lower case. Its hydrophobicity is that of the upper-case text; aliphatic_index and
# instability_index look at the letters as given and are others, so that a table of features of soft-masked proteins is right in
# some of its columns. A letter that it does not know (*) counts nothing but lengthens the protein: means are too small. No
# warning.
# Seen 2026-11-28, Python 3.11:
#   MKWVTFISLL aliphatic 146.0 instability 4.36 hydrophobicity 1.47
#   mkwvtfisll aliphatic 0.0 instability 9.00 hydrophobicity 1.47
#   MKWVTFISLL* aliphatic 132.7 instability 4.87 hydrophobicity 1.34
# Fails if the aliphatic index of lower case is that of upper case. What helps: .upper().strip("*") before.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet peptides==0.5.0
"$directory/venv/bin/python" - <<'END'
import peptides

values = []
for text in ("MKWVTFISLL", "mkwvtfisll", "MKWVTFISLL*"):
    peptide = peptides.Peptide(text)
    values.append([peptide.aliphatic_index(), peptide.instability_index(), peptide.hydrophobicity()])
    print("{} aliphatic {:.1f} instability {:.2f} hydrophobicity {:.2f}".format(text, *values[-1]))
upper, lower, stopped = values
assert upper[2] == lower[2] and lower[0] == 0 and abs(lower[1] - upper[1]) > 1 and stopped[0] < upper[0]
END
