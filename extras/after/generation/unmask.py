"""Proteins from a masked language model: some or all residues begin as masks, and open step by step.

`ancestral` is the sampler of masked diffusion (Sahoo et al. 2024, arXiv:2406.07524): from t to s a mask opens with
probability (t - s) / t, and its letter is drawn from the model. Without a number of steps, masks open one at a time in
random order. That is exact: no two letters are drawn without knowledge of each other. `confidence` draws a letter for
every mask and keeps the most probable ones (MaskGIT, Chang et al. 2022, arXiv:2202.04200; of proteins, DPLM, Wang et
al. 2024, arXiv:2402.18567). In both, open letters may close again, as in ReMDM (Wang et al. 2025, arXiv:2503.00307):
each with probability at most min(1, (1 - a_s) / a_t), a_t = 1 - t.

A sampler is a coroutine of one protein that asks for logits and gets them, so that proteins at different steps share
a forward pass. What a protein becomes is a function of its key and of the model (extras.after.generation.draws).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from extras.after.generation.draws import CLOSES, LETTER, OPENS, ORDER, TIE, Drawn, Sampling, draw, uniforms


class Request(NamedTuple):
    """Logits that a protein needs. ids: uint8 [tokens]; at: the indices of the tokens [n] in question; alone: whether
    no other protein may be in the batch."""

    ids: np.ndarray
    at: np.ndarray
    alone: bool = False


Asks = Generator[Request, np.ndarray, None]  # it is sent the logits [n, letters that may be drawn]
Compute = Callable[[list[Request]], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Schedule:
    """by_confidence: `confidence`, else `ancestral`; steps: None for one a mask; remask: of ReMDM's bound, 0 to 1."""

    by_confidence: bool = False
    steps: int | None = None
    remask: float = 0.0

    def closing(self, step: int, steps: int) -> float:
        """The probability that an open letter closes in this step, from t = 1 - step / steps."""
        return self.remask * min(1.0, (steps - step - 1) / step) if step else 0.0


class Protein:
    """A protein on its way. ids: uint8 [tokens], changed in place; places: the indices [n] of its masks; letters: the
    token ids that may be drawn, in the order of the logits' columns; key: integers that no other protein has.

    log_p: float64 [n], of each letter when it was drawn last, nats; is_open: bool [n].
    """

    def __init__(self, ids: np.ndarray, places: np.ndarray, mask: int, letters: np.ndarray, key: tuple[int, ...]):
        self.ids, self.places, self.mask, self.letters, self.key = ids.copy(), places, mask, letters, key
        self.log_p = np.zeros(len(places))
        self.is_open = np.zeros(len(places), bool)
        self.ids[places] = mask

    def uniforms(self, purpose: int, step: int, numbers: np.ndarray) -> np.ndarray:
        return uniforms((*self.key, purpose, step), numbers)

    def open(self, numbers: np.ndarray, drawn: Drawn, chosen: np.ndarray | slice = slice(None)) -> None:
        """numbers: indices into `places` that were drawn; chosen: those among them that open."""
        numbers = numbers[chosen]
        self.ids[self.places[numbers]] = self.letters[drawn.letters[chosen]]
        self.log_p[numbers], self.is_open[numbers] = drawn.log_p[chosen], True

    def close(self, numbers: np.ndarray) -> None:
        self.ids[self.places[numbers]] = self.mask
        self.is_open[numbers] = False


def unmask(protein: Protein, schedule: Schedule, how: Sampling) -> Asks:
    """Opens all masks of the protein, in the schedule's order."""
    if schedule.by_confidence:
        return _by_confidence(protein, schedule, how)
    if schedule.steps is None and not schedule.remask:
        return _one_at_a_time(protein, how)
    return _ancestral(protein, schedule, how)


def _one_at_a_time(protein: Protein, how: Sampling) -> Asks:
    everything = np.arange(len(protein.places))
    for step, number in enumerate(np.argsort(protein.uniforms(ORDER, 0, everything), kind="stable")):
        numbers = np.array([number])
        protein.open(numbers, (yield from _drawn(protein, step, numbers, how)))


def _ancestral(protein: Protein, schedule: Schedule, how: Sampling) -> Asks:
    """A mask that opens with probability (t - s) / t in each step opens in any one of them with the same probability.
    Steps in which nothing opens need no logits."""
    everything = np.arange(len(protein.places))
    steps = schedule.steps or len(everything)
    if schedule.remask:
        yield from _closing_again(protein, schedule, how, steps)
        return
    at_step = (protein.uniforms(OPENS, 0, everything) * steps).astype(np.int64)
    for step in np.unique(at_step).tolist():
        numbers = np.flatnonzero(at_step == step)
        protein.open(numbers, (yield from _drawn(protein, step, numbers, how)))


def _closing_again(protein: Protein, schedule: Schedule, how: Sampling, steps: int) -> Asks:
    """The masked share t = 1 - step / steps is kept in the mean: with closings, a mask opens with probability
    (t - s + closing (1 - t)) / t."""
    everything = np.arange(len(protein.places))
    for step in range(steps):
        closing = schedule.closing(step, steps)
        opening = (1 + closing * step) / (steps - step)
        opens = ~protein.is_open & (protein.uniforms(OPENS, step, everything) < opening)
        closes = protein.is_open & (protein.uniforms(CLOSES, step, everything) < closing)
        if opens.any():
            numbers = np.flatnonzero(opens)
            protein.open(numbers, (yield from _drawn(protein, step, numbers, how)))
        protein.close(np.flatnonzero(closes))


def _by_confidence(protein: Protein, schedule: Schedule, how: Sampling) -> Asks:
    """Of n masks at first, n (1 - (step + 1) / steps) are left after a step; letters that close are random ones."""
    count = len(protein.places)
    steps = schedule.steps or count
    for step in range(steps):
        masked, is_open = np.flatnonzero(~protein.is_open), np.flatnonzero(protein.is_open)
        left = count * (steps - step - 1) // steps
        closing = min(int(schedule.closing(step, steps) * len(is_open)), left)
        closes = is_open[np.argsort(protein.uniforms(CLOSES, step, is_open), kind="stable")[:closing]]
        opening = len(masked) + closing - left
        if opening:
            drawn = yield from _drawn(protein, step, masked, how, opening)
            protein.open(masked, drawn, np.argsort(-drawn.log_p, kind="stable")[:opening])
        protein.close(closes)


def _drawn(
    protein: Protein, step: int, numbers: np.ndarray, how: Sampling, opening: int | None = None
) -> Generator[Request, np.ndarray, Drawn]:
    """A letter for each of these masks, which are opened later if they are among the `opening` most probable ones."""
    uniform, at = protein.uniforms(LETTER, step, numbers), protein.places[numbers]
    drawn = draw((yield Request(protein.ids, at)), uniform, how)
    if drawn.is_tie.any() or (opening is not None and _ties(drawn.log_p, opening)):
        drawn = draw((yield Request(protein.ids, at, alone=True)), uniform, how)
    return drawn


def _ties(log_p: np.ndarray, opening: int) -> bool:
    """Whether rounding could change which are the `opening` largest."""
    if opening >= len(log_p):
        return False
    ordered = -np.sort(-log_p)
    return bool(ordered[opening - 1] - ordered[opening] < TIE)


def run_all(
    proteins: Iterable[tuple[Protein, Asks]], compute: Compute, tokens: int, done: Callable[[int], object]
) -> Iterator[Protein]:
    """Every protein once it is complete, in order.

    compute: the logits of these requests; tokens: of the proteins in one call of it, unless one alone has more; done:
    called with the number of letters that were opened, less those that were closed.
    """
    coming = iter(proteins)
    active: list[tuple[int, Protein, Asks, Request]] = []
    finished: dict[int, Protein] = {}
    given = taken = size = 0
    following = next(coming, None)
    while active or following:
        while following and (not active or size + len(following[0].ids) <= tokens):
            protein, asks = following
            following = next(coming, None)
            size += len(protein.ids)
            if (request := next(asks, None)) is None:  # it has no masks
                finished[taken], size = protein, size - len(protein.ids)
            else:
                active.append((taken, protein, asks, request))
            taken += 1
        left = []
        for (number, protein, asks, _), logits in zip(active, _computed(compute, active), strict=True):
            before = int(protein.is_open.sum())
            try:
                left.append((number, protein, asks, asks.send(logits)))
            except StopIteration:
                finished[number], size = protein, size - len(protein.ids)
            done(int(protein.is_open.sum()) - before)
        active = left
        while given in finished:
            yield finished.pop(given)
            given += 1


def _computed(compute: Compute, active: Sequence[tuple[int, Protein, Asks, Request]]) -> list[np.ndarray]:
    requests = [request for *_, request in active]
    together = iter(compute([request for request in requests if not request.alone]))
    return [compute([request])[0] if request.alone else next(together) for request in requests]
