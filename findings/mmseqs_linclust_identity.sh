#!/usr/bin/env bash
# MMseqs2 14-7e284 (Debian's mmseqs2 14-7e284+ds-1+b2): easy-linclust --min-seq-id is held against an identity that is estimated
# from the score for a column, at most 1. Sequences rich in residues with high scores (C, W, H, Y, F, P) reach it with
# differences: at 1.0 sequences of 95 % identity are put in one cluster, and a set "without redundancy above 99 %" lacks
# proteins. easy-cluster counts residues.
# Seen 2026-11-28, 1 thread: 20 pairs of 100 residues from CWHYFPGMDN, each pair with 5 differences; pairs in one cluster, -c
# 0.8:
#   easy-linclust --min-seq-id 1.0: 20   0.99: 20   1.0 with --alignment-mode 3: 0   easy-cluster 1.0: 0
# Fails if easy-linclust at 1.0 joins fewer than 10 pairs. What helps: --alignment-mode 3.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
apt-get download -qq mmseqs2=14-7e284+ds-1+b2 2>/dev/null
dpkg-deb -x mmseqs2_*.deb .
python3 - <<'END'
import random

draw = random.Random(5)
with open("x.fasta", "w") as file:
    for number in range(20):
        one = draw.choices("CWHYFPGMDN", k=100)
        other = list(one)
        for place in draw.sample(range(100), 5):
            other[place] = draw.choice([residue for residue in "ACDEFGHIKLMNPQRSTVWY" if residue != one[place]])
        file.write(f">{number}_one\n{''.join(one)}\n>{number}_other\n{''.join(other)}\n")
END
joined() { # command, identity, further arguments: pairs in one cluster
    usr/bin/mmseqs "$1" x.fasta found work --min-seq-id "$2" -c 0.8 --threads 1 "${@:3}" >log
    rm -rf work
    awk '$1 != $2' found_cluster.tsv | wc -l
}
linear=$(joined easy-linclust 1.0) near=$(joined easy-linclust 0.99)
counted=$(joined easy-linclust 1.0 --alignment-mode 3) all=$(joined easy-cluster 1.0)
echo "easy-linclust --min-seq-id 1.0: $linear   0.99: $near   1.0 with --alignment-mode 3: $counted   easy-cluster 1.0: $all"
[[ $linear -ge 10 && $counted -eq 0 && $all -eq 0 ]] || exit 1
