"""Proteins and a table of their clusters for step 1, from alignments or from the results of a search.

    python -m extras.prepare.homologs --output families --a3m msas/
    python -m extras.prepare.homologs --output families --hits hits.m8 --fasta database.fasta
    python 1.tokenize_uniref_csv.py --input_dir families/proteins.fasta --cluster_table families/clusters.tsv ...

Each alignment (A3M, A2M or aligned FASTA) is a cluster, named as the file; its first record is the query. Gaps are
removed, insertions kept. Of a table of hits, as MMseqs2, DIAMOND and BLAST write it, each query and its targets are a
cluster, the proteins being those of the database. The input is held in memory.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.cli import UserError, run
from common.files.safe_files import replace_flushed
from common.flags import Flags, Missing, flag, parse_arguments
from extras.prepare.cluster_splits import COLUMNS
from extras.prepare.sources.compression import check_duplicates, strip_compression
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.hits import accession, read_hits
from extras.prepare.sources.residues import ANNOTATIONS, Cleaner

logger = logging.getLogger(__name__)
ALIGNMENTS = (".a3m", ".a2m", ".afa", ".aln", ".fasta", ".fa", ".fas")  # ends of names, of a directory's files
GAPS, LOWER = b"-.", bytes(range(ord("a"), ord("z") + 1))
PROTEINS, TABLE = "proteins.fasta", "clusters.tsv"


@dataclass
class Arguments(Flags):
    output: str | None = flag(None, f"directory to make, with {PROTEINS} and {TABLE}")
    a3m: list[str] | None = flag(None, "alignments, plain or compressed, or directories of them")
    hits: str | None = flag(None, "table of hits, tab-separated: query and target are its first columns, or named")
    fasta: str | None = flag(None, "with --hits: the proteins, queries among them")
    shared: Literal["refuse", "first"] = flag(
        "refuse", "of a protein in two clusters: stop, or leave it to the first", choices=("refuse", "first")
    )

    def missing(self) -> Iterator[Missing]:
        if not self.output:
            yield Missing("--output", "the directory to make", "families")
        if not self.a3m and not self.hits:
            yield Missing("--a3m", "alignments; or --hits and --fasta", "msas/")
        if bool(self.hits) != bool(self.fasta):
            name, what = ("--fasta", "the proteins of --hits") if self.hits else ("--hits", "the hits in --fasta")
            yield Missing(name, what, "database.fasta" if self.hits else "hits.m8")

    def check(self) -> None:
        if self.a3m and self.hits:
            raise UserError("--a3m and --hits exclude each other: prepare each into a directory of its own")


@dataclass
class Families:
    """members: {cluster: names of its proteins, the query first}; proteins: (name, residues) to write, in order."""

    first_keeps: bool
    members: dict[str, dict[str, None]] = field(default_factory=dict)
    proteins: list[tuple[str, bytes]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _owner: dict[str, str] = field(default_factory=dict)

    def add(self, cluster: str, name: str) -> bool:
        """Whether the cluster gets this protein. UserError if another one has it, unless the first keeps it."""
        owner = self._owner.setdefault(name, cluster)
        if owner != cluster and not self.first_keeps:
            raise UserError(
                f"{name}: is in two clusters, {owner} and {cluster}: give --shared first to leave it to the first, or "
                "remove it from one"
            )
        self.counts["shared"] += owner != cluster
        if owner == cluster:
            self.members.setdefault(cluster, {})[name] = None
        return owner == cluster


# ---- alignments ----


def alignments(given: list[str]) -> list[Path]:
    """The files, and those of the directories whose names are those of alignments. UserError if there is none."""
    paths: list[Path] = []
    for place in map(Path, given):
        if not place.is_dir():
            paths.append(place)
            continue
        files = sorted(path for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
        named = [path for path in files if strip_compression(path.name.lower()).endswith(ALIGNMENTS)]
        if not named:
            raise UserError(f"--a3m {place}: no alignment in it ({', '.join(ALIGNMENTS)})")
        if len(named) < len(files):
            logger.warning("%s: %s files with other names are left out", place, f"{len(files) - len(named):,}")
        paths += named
    check_duplicates("--a3m", paths)
    return paths


def read_alignment(path: Path) -> list[tuple[str, bytes]]:
    """(id, row) of each protein, the query first; annotations are left out. UserError for rows that do not fit."""
    cleaner = Cleaner(str(path), gaps="keep")  # of the letters; the case tells insertions from matches
    rows = [(name.decode(), row) for name, row in read_fasta(path, cleaner=cleaner) if name not in ANNOTATIONS]
    if not rows:
        raise UserError(f"{path}: no query: an alignment's first record is a protein")
    lengths = {len(row) for _, row in rows}
    columns = [len(row.translate(None, LOWER + b".")) for _, row in rows]
    for number, (name, row) in enumerate(rows):
        if len(lengths) > 1 and columns[number] != columns[0]:
            raise UserError(
                f"{path}: record {number + 1:,}, {name}: {columns[number]:,} columns, but the query has "
                f"{columns[0]:,}: not an alignment"
            )
        if not row.translate(None, GAPS):
            raise UserError(f"{path}: record {number + 1:,}, {name}: gaps alone: remove it")
    return rows


def add_alignments(families: Families, paths: list[Path]) -> None:
    """Each file as a cluster. A query whose id an earlier one of other residues has, as some tools name all of them,
    is called by its file."""
    queries: dict[str, tuple[str, bytes]] = {}
    for path in paths:
        cluster = "_".join(Path(strip_compression(path.name)).stem.split())
        if not cluster.isprintable():
            raise UserError(f"{str(path)!r}: its name, that of its cluster, is not UTF-8 or not printable: rename it")
        if cluster in families.members:
            raise UserError(f"{path}: a second file called {cluster}: clusters have their names: rename one")
        seen = set()
        for number, (name, row) in enumerate(read_alignment(path)):
            residues = row.translate(None, GAPS).upper()
            if number == 0 and queries.setdefault(name, (cluster, residues))[1] != residues:
                families.counts["renamed"] += 1
                name = cluster
            if (name, residues) in seen:
                families.counts["repeated"] += 1
                continue
            seen.add((name, residues))
            if families.add(cluster, name):
                families.proteins.append((name, residues))


# ---- hits ----


def add_hits(families: Families, hits: Path, fasta: Path) -> None:
    """Each query and its targets as a cluster, in the order of the table, by their accessions."""
    clusters: dict[str, dict[str, None]] = {}
    for _, (query, target) in read_hits(hits, "--hits", ("query", "target")):
        clusters.setdefault(query, {query: None})[target] = None
    if not clusters:
        raise UserError(f"--hits {hits}: no hit in it")
    wanted = {name for names in clusters.values() for name in names}
    found: dict[str, bytes] = {}
    for raw, residues in read_fasta(fasta, cleaner=Cleaner(str(fasta), gaps="refuse")):
        name = accession(raw.decode())
        if name in wanted and found.setdefault(name, residues) != residues:
            raise UserError(f"--fasta {fasta}: {name}: twice, with other residues: rename one")
    for query, names in clusters.items():
        for name in names:
            if name not in found:
                what = "query" if name == query else "target"
                raise UserError(f"--fasta {fasta}: the {what} {name} of {hits} is missing: give queries and database")
            if families.add(query, name):
                families.proteins.append((name, found[name].upper()))


# ---- output ----


def write(families: Families, output: Path) -> None:
    """Both files, complete or not at all. UserError for a directory that is there already."""
    try:
        output.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"--output {output}: is there already: choose another name, or remove it") from None
    try:
        with replace_flushed(output / TABLE) as table, replace_flushed(output / PROTEINS) as proteins:
            rows = (f"{cluster}\t{name}\n" for cluster, names in families.members.items() for name in names)
            with open(table, "w") as file:
                file.write("\t".join(COLUMNS) + "\n")
                file.writelines(rows)
            with open(proteins, "wb") as fasta:
                fasta.writelines(b">%s\n%s\n" % (name.encode(), residues) for name, residues in families.proteins)
    except BaseException:
        shutil.rmtree(output)
        raise


def main() -> None:
    args = parse_arguments(__doc__, Arguments, program="python -m extras.prepare.homologs")
    output = Path(str(args.output))
    if output.exists():
        raise UserError(f"--output {output}: is there already: choose another name, or remove it")
    families = Families(args.shared == "first")
    if args.a3m:
        add_alignments(families, alignments(args.a3m))
    else:
        add_hits(families, Path(str(args.hits)), Path(str(args.fasta)))
    write(families, output)
    sizes = Counter(min(len(names), 4) for names in families.members.values())
    counts = [len(families.proteins), len(families.members), sizes[1], sizes[4]]
    counts += [families.counts[name] for name in ("repeated", "shared", "renamed")]
    logger.info(
        "%s: %s proteins in %s clusters, %s of one and %s of four and more; %s repeats of a record; %s left to the "
        "first cluster that has them; %s queries called by their files",
        *(output, *(f"{count:,}" for count in counts)),
    )


if __name__ == "__main__":
    run(main)
