"""Contacts of the sample's coils or Potts families without a trained model: what stands beside those of a trained one.

    python -m extras.prepare.sample coils.fasta --num_proteins 40 --repeats 8000 --structures structures
    python -m benchmarks.contact_baselines --structures structures

Fitted and evaluated on the chains that --eval_contacts takes. A coil repeats itself, so one sequence may give its
contacts away; and a contact head learns from its own chains how contacts depend on distance along the chain.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import say
from common.cli import run
from common.flags import flag, parse_arguments
from common.models.esm2.config import Esm2Config, load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import build_model
from common.models.layers.config_base import override
from extras.after.downstream.contacts import chain_features, fit, mean_precisions, pairs, precisions, split
from extras.after.downstream.stock_model import stock_model
from extras.after.downstream.structures import LONGEST, Chain, read_structures
from extras.prepare.synthetic_structures import COIL_TURN

Scores = Callable[[Chain], np.ndarray]  # [L, L]


@dataclass
class Arguments:
    structures: str = flag("structures", "Directory of the sample's coils.")
    config_overrides: str = flag(
        "num_hidden_layers=4,hidden_size=128,num_attention_heads=8,intermediate_size=512", "The untrained models'."
    )
    seeds: int = flag(6, "Untrained models; the first has seed 42, the default of a run.")


def separations(chain: Chain) -> np.ndarray:
    along = np.arange(len(chain.sequence))
    return np.abs(np.subtract.outer(along, along))


def separation_prior(fitted_on: Sequence[Chain]) -> Scores:
    """The share of pairs in contact at each distance along the chains that a head is fitted on."""
    hits, counts = np.zeros(LONGEST), np.zeros(LONGEST)
    for chain in fitted_on:
        i, j, contact = pairs(chain)
        np.add.at(hits, j - i, contact)
        np.add.at(counts, j - i, 1)
    share = hits / np.maximum(counts, 1)
    return lambda chain: share[separations(chain)]


def same_residue(chain: Chain) -> np.ndarray:
    letters = np.frombuffer(chain.sequence.encode(), np.uint8)
    return (letters[:, None] == letters).astype(float)


def dot_plot(chain: Chain, reach: int) -> np.ndarray:
    """Equal residues among those at most `reach` before or after both."""
    same = np.pad(same_residue(chain), reach)
    length = len(chain.sequence)
    return sum(same[k : k + length, k : k + length] for k in range(2 * reach + 1))


def turn_of(chain: Chain) -> int:
    """The shift, among the turns that the sample makes, at which most residues of the one sequence are equal."""
    same = same_residue(chain)
    return max(range(*COIL_TURN), key=lambda turn: np.diagonal(same, turn).mean())


def by_turn(chain: Chain) -> np.ndarray:
    return -np.abs(separations(chain) - turn_of(chain)).astype(float)


def untrained_model(config: Esm2Config, seed: int) -> Any:
    """A stock EsmForMaskedLM with the weights that a run with this seed begins with."""
    weights = build_model(config, seed).state_dict()
    return stock_model(config, ADAPTER.to_hf(weights.__getitem__, config), torch.device("cpu"))


def fitted(model: Any, fitted_on: Sequence[Chain]) -> Scores:
    """The probabilities of a head fitted on these chains."""
    head = fit(partial(chain_features, model), fitted_on)
    return lambda chain: head.probabilities(chain_features(model, chain))


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    fitted_on, evaluated_on = split(read_structures(args.structures))
    scorers: dict[str, Scores] = {
        "distance along the chain, from the fitted chains": separation_prior(fitted_on),
        "same residue": same_residue,
        "dot plot, 9 residues": lambda chain: dot_plot(chain, 4),
        "dot plot, 17 residues": lambda chain: dot_plot(chain, 8),
        "turn of the one sequence, by autocorrelation": by_turn,
    }
    config = override(load_config("facebook/esm2_t6_8M_UR50D"), args.config_overrides)
    for seed in [42, *range(args.seeds - 1)]:
        scorers[f"untrained model, seed {seed}"] = fitted(untrained_model(config, seed), fitted_on)
    say("| long range | P@L | P@L/2 | P@L/5 |\n|---|--:|--:|--:|")
    for name, scores in scorers.items():
        found = mean_precisions([precisions(chain, scores(chain)) for chain in evaluated_on])
        say(
            f"| {name} | "
            + " | ".join(f"{found[f'long_{top}']:.1%}" for top in ("p_at_l", "p_at_l2", "p_at_l5"))
            + " |"
        )


if __name__ == "__main__":
    run(main)
