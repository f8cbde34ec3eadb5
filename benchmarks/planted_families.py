r"""Generate families of proteins that only their relatives can explain, and the least loss that these allow.

python -m benchmarks.planted_families OUT --families 20000 --members 9 --shortest 48 --longest 64 --divergence 0.2
python 1.tokenize_uniref_csv.py --source OUT/proteins.fasta --cluster_table OUT/clusters.tsv --output_dir OUT/processed

A family's ancestor has independent, uniform letters; a member keeps each with probability 1 - divergence, and has a
uniform letter else. So a residue alone is worth ln 20 nats, whatever stands around it, and what a model knows beyond
that comes from other members.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
DRAWS = 200_000  # sites, for the least loss: its standard error is below 0.004 nats


@dataclass
class Arguments(Flags):
    families: int = flag(1000, "Families.")
    members: int = flag(9, "Members of each.")
    shortest: int = flag(48, "Residues of the shortest ancestor.")
    longest: int = flag(48, "Residues of the longest.")
    divergence: float = flag(0.2, "Probability that a residue is drawn anew.")
    indels: float = flag(0.0, "Probability that a residue is deleted or followed by a new one.")
    seed: int = flag(42, "For other families.")


def make_family(
    length: int, members: int, divergence: float, indels: float, generator: np.random.Generator
) -> list[np.ndarray]:
    """Letters (0 to 19) of each member, int64 [its length]."""
    shape = members, length
    is_new = generator.random(shape) < divergence
    family = np.where(is_new, generator.integers(20, size=shape), generator.integers(20, size=length))
    return [with_indels(member, indels, generator) for member in family] if indels else list(family)


def with_indels(residues: np.ndarray, rate: float, generator: np.random.Generator) -> np.ndarray:
    """Residues int64 [n], of which each is deleted, or followed by a new one, with half the probability `rate`."""
    events = generator.random(len(residues))
    kept = np.repeat(residues, np.where(events < rate / 2, 0, np.where(events < rate, 2, 1)))
    sources = np.repeat(np.arange(len(residues)), np.where(events < rate / 2, 0, np.where(events < rate, 2, 1)))
    is_new = np.append(False, sources[1:] == sources[:-1])[: len(kept)]
    kept[is_new] = generator.integers(20, size=int(is_new.sum()))
    return kept


def least_loss(divergence: float, relatives: int, seed: int = 0, sites: int = DRAWS) -> float:
    """The loss in nats of the best prediction of a member's residue from those of so many relatives at its site.

    By Bayes: p(ancestor | relatives) is the product of p(relative | ancestor), normalised, and the prediction is the
    mean of p(residue | ancestor) under it. A mean over sites that are drawn.
    """
    drawn = make_family(sites, relatives + 1, divergence, 0.0, np.random.default_rng(seed))
    kept, other = 1 - divergence + divergence / 20, divergence / 20
    counts = np.zeros((sites, 20))
    for relative in drawn[:-1]:
        counts[np.arange(sites), relative] += 1
    log_posterior = counts * np.log(kept / other)
    posterior = np.exp(log_posterior - log_posterior.max(1, keepdims=True))
    posterior /= posterior.sum(1, keepdims=True)
    predicted = posterior * (kept - other) + other
    return float(-np.log(predicted[np.arange(sites), drawn[-1]]).mean())


def write_families(directory: Path, args: Arguments) -> None:
    generator = np.random.default_rng(args.seed)
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    directory.mkdir(parents=True)
    with open(directory / "proteins.fasta", "w") as fasta, open(directory / "clusters.tsv", "w") as table:
        table.write("ur50_id\tur90_id\n")
        for family in range(args.families):
            length = int(generator.integers(args.shortest, args.longest + 1))
            members = make_family(length, args.members, args.divergence, args.indels, generator)
            for number, member in enumerate(members):
                fasta.write(f">F{family}M{number}\n{letters[member].tobytes().decode()}\n")
                table.write(f"F{family}\tF{family}M{number}\n")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("--"):
        raise UserError(
            "give the directory to make first: python -m benchmarks.planted_families OUT [--families N ...]"
        )
    directory, *flags = sys.argv[1:]
    if Path(directory).exists():
        raise UserError(f"{directory}: exists: choose another name")
    write_families(Path(directory), parse_arguments(__doc__, Arguments, argv=flags))


if __name__ == "__main__":
    run(main)
