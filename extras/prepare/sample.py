"""Generate a protein sample: families of related sequences, to try the whole pipeline without a download.

    python -m extras.prepare.sample OUT.fasta[.gz] --num_proteins 4000 --seed 42
    python -m extras.prepare.sample OUT.fasta[.gz] --repeats 6000 --structures DIR
    python -m extras.prepare.sample OUT.fasta[.gz] --potts_families 8 --structures DIR
    python train_ddp.py --dataset sample ...     the same proteins, made in the run's own directory

An ancestor is a mosaic: segments drawn from a small library of motifs, shared by all families as protein domains are,
joined by linkers drawn from the family's own residue composition. A member is its ancestor after substitutions,
insertions and deletions. A model can learn three things beyond residue frequencies: the protein's composition, its
motifs, and the family itself, as a random split holds out some members of each.

--repeats and --potts_families add proteins whose contacts are known (extras/prepare/synthetic_structures.py);
--structures writes coordinates of further ones.
"""

import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments
from extras.prepare.synthetic_structures import (
    BACKGROUND,
    COIL_STRUCTURES,
    POTTS_MEMBERS,
    POTTS_STRUCTURES,
    RESIDUES,
    coil_structures,
    make_coils,
    make_potts,
    potts_structures,
)

SAMPLE = "sample"  # value of --dataset
HELD_OUT_EVERY = 20  # proteins: some of every family
# BLOSUM62 in half-bits (Henikoff & Henikoff 1992, PNAS 89:10915), order of RESIDUES, lower triangle.
BLOSUM62 = """
 4
-1  5
-2  0  6
-2 -2  1  6
 0 -3 -3 -3  9
-1  1  0  0 -3  5
-1  0  0  2 -4  2  5
 0 -2  0 -1 -3 -2 -2  6
-2  0  1 -1 -3  0  0 -2  8
-1 -3 -3 -3 -1 -3 -3 -4 -3  4
-1 -2 -3 -4 -1 -2 -3 -4 -3  2  4
-1  2  0 -1 -3  1  1 -2 -1 -3 -2  5
-1 -1 -2 -3 -1  0 -2 -3 -2  1  2 -1  5
-2 -3 -3 -3 -2 -3 -3 -3 -1  0  0 -3  0  6
-1 -2 -2 -1 -3 -1 -1 -2 -2 -3 -3 -1 -2 -4  7
 1 -1  1  0 -1  0  0  0 -1 -2 -2  0 -1 -2 -1  4
 0 -1  0 -1 -1 -1 -1 -2 -2 -1 -1 -1 -1 -2 -1  1  5
-3 -3 -4 -4 -2 -2 -3 -2 -2 -3 -2 -3 -1  1 -4 -3 -2 11
-2 -2 -2 -3 -2 -1 -2 -3  2 -1 -1 -2 -1  3 -3 -2 -2  2  7
 0 -3 -3 -3 -1 -2 -2 -3 -3  3  1 -2  1 -1 -2 -2  0 -3 -1  4
"""
LENGTH_MEDIAN, LENGTH_SIGMA = 270, 0.55  # log-normal, near UniRef50's
LENGTH_MIN, LENGTH_MAX = 40, 1500
MOTIF_LENGTHS = (12, 24)
MOTIF_SHARE = 0.4  # of an ancestor's residues
MOTIFS_PER_FAMILY = 4  # of the library; they recur along the ancestor, as in repeat proteins
# Dirichlet: larger is closer to the background. Linkers are as biased as low-complexity regions of proteins: a model
# that trains for a minute has something to learn beyond residue frequencies.
COMPOSITION_STRENGTH = 3.0
INDELS_PER_SUBSTITUTION = 0.1  # half insertions, half deletions
INDEL_MEAN_LENGTH = 3.0  # geometric


def blosum62() -> np.ndarray:
    """Scores in half-bits, float64 [20, 20], in the order of RESIDUES."""
    scores = np.zeros((20, 20))
    for i, row in enumerate(BLOSUM62.split("\n")[1:-1]):
        scores[i, : i + 1] = scores[: i + 1, i] = [int(score) for score in row.split()]
    return scores


def substitution_probabilities() -> np.ndarray:
    """P(b | a, substituted), [20, 20]: p_b 2^(S_ab / 2) for b != a, as a score is 2 log2 of the odds of the pair."""
    probabilities = BACKGROUND * 2.0 ** (blosum62() / 2)
    np.fill_diagonal(probabilities, 0.0)
    return probabilities / probabilities.sum(axis=1, keepdims=True)


def make_motifs(count: int, generator: np.random.Generator) -> list[np.ndarray]:
    """The shared library; residues are indices into RESIDUES."""
    lengths = generator.integers(MOTIF_LENGTHS[0], MOTIF_LENGTHS[1] + 1, size=count)
    return [generator.choice(20, size=length, p=BACKGROUND) for length in lengths]


def make_ancestor(length: int, motifs: list[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """Residue indices [length]: motifs and linkers in turn."""
    composition = generator.dirichlet(COMPOSITION_STRENGTH * BACKGROUND)
    chosen = generator.permutation(len(motifs))[:MOTIFS_PER_FAMILY]
    mean_linker = np.mean([len(motif) for motif in motifs]) * (1 - MOTIF_SHARE) / MOTIF_SHARE
    pieces, total = [], 0
    while total < length:
        linker = generator.choice(20, size=generator.poisson(mean_linker), p=composition)
        motif = motifs[generator.choice(chosen)]
        pieces += [linker, motif]
        total += len(linker) + len(motif)
    return np.concatenate(pieces)[:length]


def evolve(
    ancestor: np.ndarray, divergence: float, substitution_cdf: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """A descendant: `divergence` is the share of residues substituted; indels come at a tenth of that rate."""
    residues = ancestor.copy()
    changed = np.flatnonzero(generator.random(len(residues)) < divergence)
    draws = generator.random((len(changed), 1))
    residues[changed] = np.minimum((draws > substitution_cdf[residues[changed]]).sum(axis=1), 19)
    events = generator.poisson(INDELS_PER_SUBSTITUTION * divergence * len(residues))
    for is_insertion in generator.random(events) < 0.5:
        size = int(generator.geometric(1 / INDEL_MEAN_LENGTH))
        place = int(generator.integers(len(residues)))
        if is_insertion:
            residues = np.insert(residues, place, generator.choice(20, size=size, p=BACKGROUND))
        elif len(residues) - size >= LENGTH_MIN:
            residues = np.delete(residues, slice(place, place + size))
    return residues[:LENGTH_MAX]


def make_proteins(
    num_proteins: int, families: int, motifs: int, divergence: tuple[float, float], seed: int
) -> Iterator[tuple[str, str]]:
    """(header, sequence) of each protein; families by falling length of their ancestors, as UniRef is sorted."""
    generator = np.random.default_rng(seed)
    library = make_motifs(motifs, generator)
    lengths = []
    while len(lengths) < families:
        length = round(generator.lognormal(np.log(LENGTH_MEDIAN), LENGTH_SIGMA))
        if LENGTH_MIN <= length <= LENGTH_MAX:
            lengths.append(length)
    substitution_cdf = substitution_probabilities().cumsum(axis=1)
    letters = np.frombuffer(RESIDUES.encode(), np.uint8)
    for family, length in enumerate(sorted(lengths, reverse=True)):
        ancestor = make_ancestor(length, library, generator)
        for member in range(num_proteins // families + (family < num_proteins % families)):
            distance = generator.uniform(*divergence)
            residues = evolve(ancestor, distance, substitution_cdf, generator)
            header = f"SAMPLE_F{family:04d}_M{member:03d} generated divergence={distance:.2f}"
            yield header, letters[residues].tobytes().decode()


@dataclass
class Arguments(Flags):
    num_proteins: int = flag(4000, "sequences to write")
    families: int = flag(40, "families they belong to, of equal size")
    motifs: int = flag(12, "motifs in the library that all ancestors are made from")
    min_divergence: float = flag(0.10, "smallest share of substituted residues in a member")
    max_divergence: float = flag(0.40, "largest share of substituted residues in a member")
    repeats: int = flag(0, "coils to add")
    potts_families: int = flag(0, f"families of a Potts model to add, of {POTTS_MEMBERS:,} sequences each")
    seed: int = flag(42, "the same seed gives the same file")

    def proteins(self) -> Iterator[tuple[str, str]]:
        if self.num_proteins < 1 or self.families < 1 or self.motifs < 1:
            raise UserError("--num_proteins, --families and --motifs must be at least 1")
        if self.repeats < 0 or self.potts_families < 0:
            raise UserError("--repeats and --potts_families must be at least 0")
        divergence = (self.min_divergence, self.max_divergence)
        if not 0 <= divergence[0] <= divergence[1] <= 1:
            raise UserError(f"divergence {divergence[0]:g} to {divergence[1]:g}: give 0 <= min <= max <= 1")
        families = make_proteins(self.num_proteins, self.families, self.motifs, divergence, self.seed)
        return chain(families, make_coils(self.repeats, self.seed), make_potts(self.potts_families, self.seed))


@dataclass
class WithStructures(Arguments):
    structures: str | None = flag(
        None,
        f"directory for PDB files: of {COIL_STRUCTURES} further coils, of {POTTS_STRUCTURES} further members of each "
        "Potts family",
    )

    def check(self) -> None:
        if self.structures and not self.repeats and not self.potts_families:
            raise UserError("--structures: needs --repeats or --potts_families, whose contacts are known")


def write_structures(directory: Path, structures: Iterable[tuple[str, str]]) -> None:
    """structures: (name, text of a PDB file) of each."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in structures:
        (directory / f"{name}.pdb").write_text(text)


def write_sample(path: Path | str, **options) -> None:
    """Write a FASTA file (gzipped if its name ends in .gz); the same options (of Arguments) give the same bytes."""
    _write(Path(path), Arguments(**options).proteins())


def make_sample(directory: Path) -> Path:
    """The default proteins as a --dataset directory, with a twentieth held out; an existing one is reused."""
    train, held_out = directory / "train.fasta", directory / "validation.fasta"
    if not train.exists():  # it is written last
        proteins = list(Arguments().proteins())
        directory.mkdir(parents=True, exist_ok=True)
        _write(held_out, proteins[::HELD_OUT_EVERY])
        _write(train, [protein for number, protein in enumerate(proteins) if number % HELD_OUT_EVERY])
    return directory


def _write(path: Path, proteins: Iterable[tuple[str, str]]) -> None:
    lines = []
    for header, sequence in proteins:
        lines.append(f">{header}")
        lines += [sequence[i : i + 60] for i in range(0, len(sequence), 60)]
    content = ("\n".join(lines) + "\n").encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help"):
        raise UserError(
            "give the file to write first: python -m extras.prepare.sample OUT.fasta[.gz] [--num_proteins N ...]"
        )
    path, *flags = sys.argv[1:]
    args = parse_arguments(__doc__, WithStructures, argv=[path] if path in ("-h", "--help") else flags)
    _write(Path(path), args.proteins())
    if args.structures:
        coils = coil_structures(COIL_STRUCTURES if args.repeats else 0, args.seed)
        write_structures(Path(args.structures), chain(coils, potts_structures(args.potts_families, args.seed)))


if __name__ == "__main__":
    run(main)
