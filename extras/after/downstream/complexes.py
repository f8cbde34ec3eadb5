"""Contacts between the chains of a complex, for models that read several chains a record.

The features of a pair of residues are those of extras.after.downstream.contacts, from the attention maps of the whole
record, without what stands between chains. So a head that was fitted on single chains predicts contacts of both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from common.cli import UserError
from common.data.alphabet import Alphabet
from extras.after.downstream.contacts import SEPARATION, Features, Head, by_score, corrected, precisions
from extras.after.downstream.structures import LONGEST, SHORTEST, Chain, readable_chains
from extras.after.inference.chains import CHAIN_END, letters_of, numbers_of, of_chains

BETWEEN = {"between_p_at_l": 1, "between_p_at_l2": 2, "between_p_at_l5": 5}  # of the L / n likeliest pairs
END = CHAIN_END.decode()


@dataclass(frozen=True, eq=False)
class Complex(Chain):
    """text: the chains, A:B; sequence and beta: of their residues, end to end."""

    text: str

    @property
    def numbers(self) -> np.ndarray:
        """The chain of each residue, int64 [L]."""
        return numbers_of(self.text.encode())

    @property
    def chains(self) -> list[Chain]:
        rows = [np.flatnonzero(self.numbers == n) for n in range(self.text.count(END) + 1)]
        parts = zip(self.text.split(END), rows, strict=True)
        return [Chain(f"{self.name}_{letters_of(n)}", text, self.beta[at]) for n, (text, at) in enumerate(parts)]


def joined(name: str, chains: Sequence[Chain]) -> Complex:
    text = END.join(chain.sequence for chain in chains)
    return Complex(name, text.replace(END, ""), np.concatenate([chain.beta for chain in chains]), text)


def read_complexes(directory: str) -> list[Complex]:
    """The structures of a directory that have two protein chains or more, all of them, each text once."""
    found: dict[str, Complex] = {}
    for name, chains in readable_chains(directory):
        usable = [chain for chain in chains if len(chain.sequence) >= SHORTEST and chain.resolved >= SHORTEST]
        if len(usable) > 1 and sum(len(chain.sequence) for chain in usable) <= LONGEST:
            made = joined(name, usable)
            found.setdefault(made.text, made)
    return list(found.values())


@torch.inference_mode()
def complex_features(model: Any, alphabet: Alphabet, chain: Chain) -> np.ndarray:
    """As `contacts.chain_features`: float32 [L, L, layers x heads] of the residues of all chains."""
    text = (chain.text if isinstance(chain, Complex) else chain.sequence).encode()
    places = torch.from_numpy(np.concatenate(of_chains(text, alphabet.places(text)))).to(model.device)
    tokens = torch.from_numpy(alphabet.encode(text).astype(np.int64))[None].to(model.device)
    layers = model.esm(tokens, output_attentions=True).attentions
    return corrected(torch.stack([layer[0][:, places][:, :, places].float() for layer in layers]).flatten(0, 1))


def between(whole: Complex, scores: np.ndarray) -> dict[str, float]:
    """{between_p_at_l, ...}: of the L / n likeliest pairs of residues of two chains, those in contact, and of all such
    pairs (between_chance); means over the pairs of chains that touch. {} where none does.

    L: residues with coordinates of the shorter of the two. scores: [residues, residues].
    """
    contacts, known = whole.contacts()
    numbers, resolved = whole.numbers, np.isfinite(whole.beta).all(1)
    found = []
    for a, b in combinations(range(numbers[-1] + 1), 2):
        i, j = np.nonzero(known & (numbers[:, None] == a) & (numbers[None] == b))
        hits = contacts[i, j]
        if not hits.any():
            continue
        order, length = by_score(scores[i, j]), min(resolved[numbers == n].sum() for n in (a, b))
        top = {name: float(hits[order[: max(1, length // part)]].mean()) for name, part in BETWEEN.items()}
        found.append(top | {"between_chance": float(hits.mean())})
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]} if found else {}


def evaluate_complexes(head: Head, features_of: Features, complexes: Sequence[Complex]) -> list[dict[str, Any]]:
    """A row a complex: `between`, and `precisions` within its chains, means over them, with the others in view."""
    rows = []
    for whole in complexes:
        scores = head.probabilities(features_of(whole))
        within = []
        for n, chain in enumerate(whole.chains):
            at = np.flatnonzero(whole.numbers == n)
            within.append(precisions(chain, scores[np.ix_(at, at)]))
        names = dict.fromkeys(name for each in within for name in each)
        means = {f"within_{name}": float(np.mean([each[name] for each in within if name in each])) for name in names}
        counts = {"chains": len(within), "residues": len(whole.sequence)}
        rows.append({"complex": whole.name} | counts | between(whole, scores) | means)
    return rows


def mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the rows of `evaluate_complexes` over the complexes that have them, with standard errors."""
    results: dict[str, Any] = {"complexes": len(rows)}
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith(("between_", "within_"))):
        values = [row[name] for row in rows if name in row]
        results[name] = float(np.mean(values))
        if len(values) > 1:
            results[f"{name}_stderr"] = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    return results


def likeliest_pairs(numbers: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(i, j) of the L likeliest pairs of the L residues: `SEPARATION` or more apart within a chain, or of two chains.
    numbers: of each residue's chain."""
    apart = np.triu(numbers[:, None] != numbers[None]) | np.triu(np.ones((len(numbers),) * 2, bool), SEPARATION)
    i, j = np.nonzero(apart)
    taken = np.argsort(-probabilities[i, j], kind="stable")[: len(numbers)]
    return i[taken], j[taken]


def likeliest(chain: Chain, probabilities: np.ndarray) -> list[dict[str, Any]]:
    """A row for each of the `likeliest_pairs`. Of a complex with the chains' letters, and numbers in the chain."""
    numbers = chain.numbers if isinstance(chain, Complex) else np.zeros(len(chain.sequence), np.int64)
    first = np.searchsorted(numbers, numbers)  # of each residue's chain
    rows = []
    for a, b in zip(*(places.tolist() for places in likeliest_pairs(numbers, probabilities)), strict=True):
        row: dict[str, Any] = {"i": a + 1 - int(first[a]), "j": b + 1 - int(first[b])}
        row |= {"residue_i": chain.sequence[a], "residue_j": chain.sequence[b]}
        row["probability"] = f"{probabilities[a, b]:.6f}"
        if isinstance(chain, Complex):
            row = {"chain_i": letters_of(numbers[a]), "chain_j": letters_of(numbers[b])} | row
        rows.append(row)
    return rows


def proteins_and_complexes(proteins: dict[str, str], where: str) -> list[Chain]:
    """Without coordinates. UserError for one that is too long."""
    chains: list[Chain] = []
    for name, text in proteins.items():
        residues = len(text) - text.count(END)
        if residues > LONGEST:
            raise UserError(f"{where}: {name[:40]}: {residues:,} residues: at most {LONGEST:,} have a map")
        nowhere = np.full((residues, 3), np.nan, np.float32)
        sequence = text.replace(END, "")
        chains.append(Complex(name, sequence, nowhere, text) if END in text else Chain(name, sequence, nowhere))
    return chains
