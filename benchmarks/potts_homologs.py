r"""Effects of mutations in Potts families that a model has never seen, alone and behind homologs.

python -m benchmarks.potts_homologs make OUT --families 8000 --members 16
python -m benchmarks.potts_homologs score --model out/final_model [--families 40] [--homologs 0 1 4 8 16]

`make` writes proteins.fasta and clusters.tsv as benchmarks.planted_families does, of families of
extras/prepare/synthetic_structures.py: each site takes one of two residues of its family, by couplings to other sites.
`score` makes further families. In a member of each it scores all single mutants (masked marginals). The table has the
area under the ROC curve of allowed mutants, the other residue of a site, among all; and, of the allowed ones, the
Spearman correlation with the effect in the family by its couplings, log p(mutant) - log p(wild type). And the area
for pairs of coupled sites among all pairs: by what a mutation at one changes in the logits of the two residues of the
other; beside it by the correlation of the two sites in the same homologs and the protein, which is what these tell
without a model.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.flags import Flags, Missing, flag, parse_arguments
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.mutation_scores import RESIDUES as SCORED
from extras.after.inference.mutation_scores import single_mutants
from extras.prepare.synthetic_structures import COUPLED, RESIDUES, STRAND, STRANDS, PottsFamily, letters

FORBIDDEN = -np.inf  # effect of a residue that a site never has


@dataclass
class MakeArguments(Flags):
    families: int = flag(8000, "Families.")
    members: int = flag(16, "Members of each.")
    strand: int = flag(STRAND, "Residues of each of the eight strands; only those of a row are coupled.")
    seed: int = flag(1, "For other families.")


@dataclass
class ScoreArguments(Flags):
    model: str | None = flag(None, "A model that reads sets.")
    families: int = flag(40, "Families, none of which `make` makes by another seed.")
    strand: int = flag(STRAND, "As above.")
    homologs: list[int] | None = flag(None, "Members that stand before the protein. Default: 0 1 4 8 16.")
    seed: int = flag(1_000_003, "For other families.")
    output: str | None = flag(None, "A file for the table.")

    @property
    def shown(self) -> list[int]:
        return self.homologs or [0, 1, 4, 8, 16]

    def missing(self) -> Iterator[Missing]:
        if not self.model:
            yield Missing("--model", "what is measured", "out/final_model")


def write(directory: Path, args: MakeArguments) -> None:
    generator = np.random.default_rng(args.seed)
    directory.mkdir(parents=True)
    with open(directory / "proteins.fasta", "w") as fasta, open(directory / "clusters.tsv", "w") as table:
        table.write("ur50_id\tur90_id\n")
        for number in range(args.families):
            for member, residues in enumerate(
                PottsFamily.make(generator, args.strand).members(args.members, generator)
            ):
                fasta.write(f">P{number}M{member}\n{letters(residues)}\n")
                table.write(f"P{number}\tP{number}M{member}\n")


def effects(family: PottsFamily, residues: np.ndarray) -> np.ndarray:
    """log p(mutant) - log p(wild type) of all single mutants, float64 [L, 20] in the order of SCORED; 0 for the wild
    type. residues: indices into RESIDUES of synthetic_structures, [L]."""
    second = (family.sites[:, 1] == residues).astype(int)
    spins = 2 * second - 1
    table = np.full((len(residues), 20), FORBIDDEN)
    columns = {letter: n for n, letter in enumerate(SCORED)}
    of_place: dict[int, list[tuple[int, float]]] = {}
    for (a, b), coupling in COUPLED.items():
        of_place.setdefault(a, []).append((b, coupling))
        of_place.setdefault(b, []).append((a, coupling))
    for row in family.rows:
        for place, site in enumerate(row):
            field = sum(coupling * spins[row[other]] for other, coupling in of_place[place])
            other = family.sites[site, 1 - second[site]]
            table[site, columns[letters(np.array([other]))]] = -2 * field * spins[site]
            table[site, columns[letters(residues[site : site + 1])]] = 0.0
    return table


def model_couplings(encoder: Encoder, family: PottsFamily, protein: np.ndarray, context: Any) -> np.ndarray:
    """[L, L]: how much the other residue of a site changes the model's log-odds of another site's two residues."""
    mutants = np.tile(protein, (len(protein) + 1, 1))  # the last is the protein itself
    of_all = np.arange(len(protein))
    mutants[of_all, of_all] = family.sites.sum(1) - protein
    alphabet = encoder.alphabet
    logits = encoder.logits([alphabet.encode(letters(each)) for each in mutants], context=context)
    residues = torch.stack(logits)[:, alphabet.num_head : alphabet.num_head + len(protein)]
    ids = torch.from_numpy(alphabet.byte_to_id[np.frombuffer(RESIDUES.encode(), np.uint8)][family.sites].astype(int))
    first, second = residues.gather(2, ids.expand(len(mutants), -1, -1)).double().numpy().transpose(2, 0, 1)
    odds = first - second
    changed = abs(odds[:-1] - odds[-1])
    return changed + changed.T


def observed_couplings(family: PottsFamily, members: np.ndarray) -> np.ndarray:
    """[L, L]: |correlation| of which residue two sites have in the members [n, L]; 0 where one has no choice."""
    second = (members == family.sites[:, 1]) - (members == family.sites[:, 1]).mean(0)
    spread = np.sqrt((second**2).sum(0))
    return abs(second.T @ second) / np.maximum(np.outer(spread, spread), np.finfo(float).tiny)


def area_of_pairs(family: PottsFamily, strengths: np.ndarray) -> float:
    """The area under the ROC curve of coupled pairs of sites. strengths: [L, L]."""
    coupled = np.zeros(strengths.shape, bool)
    for a, b in COUPLED:
        coupled[family.rows[:, a], family.rows[:, b]] = coupled[family.rows[:, b], family.rows[:, a]] = True
    pairs = np.triu_indices(len(coupled), 1)
    return float(roc_auc_score(coupled[pairs], strengths[pairs]))


def measure(encoder: Encoder, args: ScoreArguments, number: int) -> list[list[float]]:
    """Of each family behind so many members: areas under the curve of mutants, Spearman's correlations, and areas of
    pairs by the model and by the members."""
    generator, found = np.random.default_rng(args.seed), []
    most = max(32, *args.shown)
    for _ in range(args.families):
        family = PottsFamily.make(generator, args.strand)
        *before, protein = family.members(most + 1, generator)
        context = None
        if number:
            context = encoder.read([letters(each).encode() for each in before[:number]])
        text = letters(protein).encode()
        (scored,) = single_mutants(encoder, [text], True, context_of=context and (lambda _, read=context: read))
        truth = effects(family, protein)
        is_mutant = np.array([[letter != chr(wild) for letter in SCORED] for wild in text])
        possible = is_mutant & np.isfinite(truth)
        shown = np.array([*before[:number], protein])
        found.append(
            (
                float(roc_auc_score(possible[is_mutant], scored[is_mutant])),
                float(spearmanr(scored[possible], truth[possible]).statistic),
                area_of_pairs(family, model_couplings(encoder, family, protein, context)),
                area_of_pairs(family, observed_couplings(family, shown)),
            )
        )
    return [list(column) for column in zip(*found, strict=True)]


def cell(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"


def score(args: ScoreArguments) -> None:
    encoder = Encoder(EncoderFlags(model_name_or_path=args.model, use_cpu=True))
    lines = [
        f"{args.families} Potts families of {STRANDS * args.strand} residues that no training saw; a member of each, "
        "all single mutants; mean ± standard error over families. By chance 0.5 and 0.",
        "",
        "| homologs shown | area under the curve of allowed mutants | Spearman's correlation among these "
        "| area of coupled pairs, by the model | by the homologs' own correlations |",
        "|--:|--:|--:|--:|--:|",
    ]
    for number in args.shown:
        with torch.inference_mode():
            measured = measure(encoder, args, number)
        lines.append(f"| {number} | {' | '.join(map(cell, measured))} |")
        say(lines[-1])
    publish("\n".join([*lines, "", *where_measured("benchmarks.potts_homologs", "torch")]), args.output)


def main() -> None:
    action, *words = sys.argv[1:] or [""]
    if action == "make" and words and not words[0].startswith("-"):
        if Path(words[0]).exists():
            raise UserError(f"{words[0]}: exists: choose another name")
        write(Path(words[0]), parse_arguments(__doc__, MakeArguments, argv=words[1:]))
    elif action == "score":
        score(parse_arguments(__doc__, ScoreArguments, argv=words))
    else:
        raise UserError("give `make DIRECTORY` or `score --model DIRECTORY`")


if __name__ == "__main__":
    run(main)
