"""Contacts of residues from attention maps, by the logistic regression of Rao et al. 2020, as ESM-2's authors fit it.

Features of a pair of residues: its value in the attention map of each layer and head, symmetrised and corrected by the
average product (APC). An L1 regression of these on true contacts (C-beta closer than 8 angstrom) is fitted on a few
chains, and its weights are those of `EsmForMaskedLM.esm.contact_head`. Rao et al., "Transformer protein language
models are unsupervised structure learners", ICLR 2021.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.cli import UserError
from common.models.esm2.convert import CONTACT_CHAINS
from extras.after.downstream.structures import Chain, read_structures

logger = logging.getLogger(__name__)
FITTED_ON = 20  # chains
LEAST = 3  # chains: two to fit on, one to evaluate on
SEPARATION = 6  # residues along the chain; closer pairs are neither fitted nor evaluated
RANGES = {"short": (6, 12), "medium": (12, 24), "long": (24, 1 << 30)}
TOP = {"p_at_l": 1, "p_at_l2": 2, "p_at_l5": 5}  # precision of the L / n likeliest pairs, of L resolved residues
STRENGTHS = (0.15, 1.5, 15.0, 150.0)  # C; the first is ESM-2's
HEAD = "esm.contact_head.regression"
Features = Callable[[Chain], np.ndarray]  # float32 [L, L, layers x heads], as `attention_features`


@dataclass(frozen=True)
class Head:
    """weight: float32 [layers x heads]; strength: C that it was fitted with; fitted_on: each chain's `identity`, () if
    unknown."""

    weight: np.ndarray
    bias: float
    strength: float
    fitted_on: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Under transformers' names."""
        weight = torch.from_numpy(self.weight.astype(np.float32))[None]
        return {f"{HEAD}.weight": weight, f"{HEAD}.bias": torch.tensor([self.bias], dtype=torch.float32)}

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """features [..., layers x heads] -> float64 [...]."""
        return 1 / (1 + np.exp(-(features.astype(np.float64) @ self.weight.astype(np.float64) + self.bias)))


def head_of(model: Any) -> Head | None:
    """The head that a stock model has; None if it is not fitted."""
    regression = model.esm.contact_head.regression
    weight, bias = regression.weight.detach()[0].float().cpu().numpy(), float(regression.bias.detach()[0])
    recorded = getattr(model.config, CONTACT_CHAINS, None)
    fitted_on = tuple(map(str, recorded)) if isinstance(recorded, list) else ()
    return Head(weight, bias, 0.0, fitted_on) if weight.any() else None


@torch.inference_mode()
def attention_features(model: Any, ids: np.ndarray) -> np.ndarray:
    """float32 [L, L, layers x heads] of a sequence's token ids uint8 [L + 2].

    model: a stock EsmForMaskedLM with eager attention, in eval mode. UserError for NaN or infinity.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    layers = model.esm(tokens, output_attentions=True).attentions
    return corrected(torch.stack([layer[0, :, 1:-1, 1:-1].float() for layer in layers]).flatten(0, 1))


def corrected(maps: Tensor) -> np.ndarray:
    """Attention maps [C, L, L] symmetrised and without the average product: float32 [L, L, C]. UserError for NaN or
    infinity."""
    maps = maps + maps.transpose(1, 2)
    product = maps.sum(2, keepdim=True) * maps.sum(1, keepdim=True)
    maps = maps - product / maps.sum((1, 2), keepdim=True)
    if not maps.isfinite().all():
        raise UserError("the model's attention is NaN or infinite: its training diverged: take an earlier checkpoint")
    return maps.permute(1, 2, 0).cpu().numpy()


def chain_features(model: Any, chain: Chain) -> np.ndarray:
    return attention_features(model, chain.ids)


def pairs(chain: Chain) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(i, j, contact) of the pairs i < j at least `SEPARATION` apart whose distance is known."""
    contacts, known = chain.contacts()
    i, j = np.nonzero(np.triu(known, SEPARATION))
    return i, j, contacts[i, j]


def split(chains: Sequence[Chain]) -> tuple[list[Chain], list[Chain]]:
    """(to fit on, to evaluate on): at most `FITTED_ON`, and at most half; by a hash of the sequence, whatever the file
    names. UserError for less than `LEAST`."""
    if len(chains) < LEAST:
        raise UserError(f"{len(chains)} protein chains: a contact head needs {LEAST} or more: add structures")
    ordered = sorted(chains, key=lambda chain: hashlib.sha256(chain.sequence.encode()).digest())
    fitted = max(2, min(FITTED_ON, len(chains) // 2))
    return ordered[:fitted], ordered[fitted:]


def fit(features_of: Features, chains: Sequence[Chain]) -> Head:
    """The regression, with C = 0.15; where that leaves no weight, as for a model that has barely trained, the first
    larger one of `STRENGTHS` that does. UserError if the chains have no contact."""
    from sklearn.linear_model import LogisticRegression

    features, labels = [], []
    for chain in chains:
        i, j, contact = pairs(chain)
        features.append(features_of(chain)[i, j])
        labels.append(contact)
    x, y = np.concatenate(features), np.concatenate(labels)
    if not 0 < y.sum() < len(y):
        raise UserError(f"{len(chains)} chains without any contact between residues {SEPARATION} or more apart")
    for strength in STRENGTHS:
        regression = LogisticRegression(l1_ratio=1.0, C=strength, solver="liblinear", random_state=0).fit(x, y)
        if regression.coef_.any():
            break
    if strength != STRENGTHS[0]:
        logger.info("Contact head: C %g, as %g leaves no weight", strength, STRENGTHS[0])
    fitted_on = tuple(chain.identity for chain in chains)
    return Head(regression.coef_[0].astype(np.float32), float(regression.intercept_[0]), strength, fitted_on)


def by_score(scores: np.ndarray) -> np.ndarray:
    """Indices of scores [N], highest first; ties, as of a head of zeros, in no order: by chance."""
    shuffled = np.random.default_rng(0).permutation(len(scores))
    return shuffled[np.argsort(-scores[shuffled], kind="stable")]


class Top(NamedTuple):
    """The L likeliest pairs (i, j) within `range`, or all if there are fewer.

    L: resolved residues of the chain, without a structure all; contact: bool, None without a structure; chance: the
    part of the range's pairs in contact.
    """

    range: str
    i: np.ndarray
    j: np.ndarray
    contact: np.ndarray | None
    chance: float


def top_pairs(chain: Chain, scores: np.ndarray) -> Top | None:
    """The L likeliest pairs of the farthest of `RANGES` that has a contact; without a structure, that has L pairs.

    Where none has, those of the farthest that has pairs. None for a chain without pairs. scores: [residues, residues].
    """
    contacts, known = chain.contacts()
    has_structure = bool(known.any())
    length = chain.resolved if has_structure else len(chain.sequence)
    known = known if has_structure else np.ones_like(known)
    tops: list[Top] = []
    for name in reversed(RANGES):
        nearest, beyond = RANGES[name]
        i, j = np.nonzero(np.triu(known, nearest) & ~np.triu(known, beyond))
        if len(i):
            taken, hits = by_score(scores[i, j])[:length], contacts[i, j]
            chosen = Top(name, i[taken], j[taken], hits[taken] if has_structure else None, float(hits.mean()))
            if hits.any() if has_structure else len(i) >= length:
                return chosen
            tops.append(chosen)
    return tops[0] if tops else None


def precisions(chain: Chain, scores: np.ndarray) -> dict[str, float]:
    """{long_p_at_l, ...}: of a range's L / n likeliest pairs, those in contact; long_chance: of all pairs of a range.

    L: residues with coordinates, as ESM's authors count them; where a range has fewer pairs, all are taken. scores:
    [residues, residues], also of those without. A range without pairs is left out.
    """
    i, j, contact = pairs(chain)
    results = {}
    for name, (nearest, beyond) in RANGES.items():
        inside = (j - i >= nearest) & (j - i < beyond)
        if not inside.any():
            continue
        score, hits, apart = (x[inside] for x in (scores[i, j], contact, j - i))
        results[f"{name}_chance"] = float(hits.mean())
        for key, order in (("", by_score(score)), ("nearest_", by_score(-apart))):
            for top, part in TOP.items():
                taken = order[: max(1, chain.resolved // part)]
                if not key or top == "p_at_l":
                    results[f"{name}_{key}{top}"] = float(hits[taken].mean())
    return results


def mean_precisions(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over the chains that have them; of the ranges in which some pair of some chain is in contact."""
    ranges = tuple(name for name in RANGES if any(one.get(f"{name}_chance") for one in each))
    names = dict.fromkeys(name for one in each for name in one if name.startswith(ranges))
    return {name: float(np.mean([one[name] for one in each if name in one])) for name in names}


def standard_errors(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """{long_p_at_l_stderr, ...}: of each of `mean_precisions`, over the chains (never over their pairs, which are not
    independent): the standard deviation between chains over the square root of their number. Of two chains or more."""
    errors = {}
    for name in mean_precisions(each):
        values = [one[name] for one in each if name in one]
        if len(values) > 1:
            errors[f"{name}_stderr"] = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    return errors


class ContactEvaluation:
    """--eval_contacts: fits a head and evaluates it. `head` is the last one."""

    def __init__(self, directory: str, longest: int):
        """longest: tokens of a sequence that the model takes. UserError if too few chains can be read."""
        chains = [chain for chain in read_structures(directory) if len(chain.sequence) + 2 <= longest]
        self.fitted_on, self.evaluated_on = split(chains)
        self.head: Head | None = None
        logger.info(
            "%s: a contact head is fitted on %d chains and evaluated on %d others",
            *(directory, len(self.fitted_on), len(self.evaluated_on)),
        )

    def evaluate(self, model: Any) -> dict[str, float]:
        """`eval_contacts_*` of a stock model with eager attention."""
        features_of = partial(chain_features, model)
        self.head = fit(features_of, self.fitted_on)
        each = [precisions(chain, self.head.probabilities(features_of(chain))) for chain in self.evaluated_on]
        means = mean_precisions(each)
        logger.info("Contacts: %s", summary(each))
        return {f"eval_contacts_{name}": value for name, value in means.items()}


def summary(each: Sequence[dict[str, float]]) -> str:
    """The chains' mean precision in a line: of the farthest range that has a contact. each: of `precisions`."""
    means, errors = mean_precisions(each), standard_errors(each)
    name = next((name for name in ("long", "medium", "short") if f"{name}_p_at_l" in means), None)
    if name is None:
        return "no contact to evaluate"
    chains = sum(f"{name}_p_at_l" in one for one in each)
    error = errors.get(f"{name}_p_at_l_stderr")
    shown = "" if error is None else f" ± {error:.1%}"
    return (
        f"of the L likeliest {name}-range pairs {means[f'{name}_p_at_l']:.1%}{shown} touch (L/5: "
        f"{means[f'{name}_p_at_l5']:.1%}; nearest first {means[f'{name}_nearest_p_at_l']:.1%}, chance "
        f"{means[f'{name}_chance']:.1%}; mean{' ± s.e.' if shown else ''} over {chains} "
        f"chain{'s' if chains > 1 else ''})"
    )
