"""--dataset_mix: a run on several prepared directories, whose shares of the tokens are given weights.

A pack has sequences of one source. The next pack is one of the source that lacks most tokens to its share, as
Megatron-LM blends datasets by samples: with weights w and T tokens so far, of which t of the source, it lacks w T - t.
So no source is ever more than a pack above its share, and none more than a pack for each other source below.

Each source has an order of its own, a batch plan that repeats it in epochs, each in another order. The order of the
mixture is a function of the seed and the position, which has for each source its position and the tokens taken since
the weights changed: whatever the number of ranks and workers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from common.cli import UserError
from common.data import TokenSet
from common.data.alphabet import Alphabet
from common.data.counter_rng import derive_key
from common.data.crops import Pack
from common.data.flags import ProteinFlags
from common.data.loader import Order, ProteinStore, read_tokens
from common.data.packing import Position
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import PlannedData, PreparedData, check_eval_sets
from common.distributed.world import Mesh, World
from common.flags import with_flags
from common.training.log_row import MEAN, Field, Shown, StepRecord
from extras.prepare.overlap import count_in_train, hashes_of
from extras.prepare.sources.find_files import Source
from extras.prepare.sources.mixture_weights import Stages, check_exponent, parse_sources, stages_of
from extras.prepare.sources.streamed_data import SAMPLE_RECORDS, HeldOutFiles, MemoryStore, find_source

logger = logging.getLogger(__name__)
COMPARED_RECORDS = 3_000_000  # of a source that is searched for copies at the start: some seconds


class MixedOrder:
    """The packs of a mixture; rank r takes packs r, r + dp_size, ... of each step's.

    A position maps the number of each source, as a string, to [epoch, window, pack, tokens since the stage began].
    """

    def __init__(self, parts: Sequence[PreparedData], stages: Stages, packs_per_step: PacksPerStep):
        self.parts, self.stages, self.packs_per_step = parts, stages, packs_per_step

    def check_position(self, position: dict[str, list[int]]) -> None:
        for place, part in zip(self._places(position), self.parts, strict=True):
            part.plan.position_after(Position(*place[:3]), 0)

    def _places(self, position: dict[str, list[int]]) -> list[list[int]]:
        """The place of each source; the beginning where the position is {}."""
        places = [position.get(str(number), [0, 0, 0, 0]) for number in range(len(self.parts))]
        if len(position) not in (0, len(places)) or {*map(len, places)} != {4}:
            raise UserError(f"the checkpoint's position is not one of {len(self.parts)} sources: give those it has")
        return places

    def most_workers(self, wanted: int) -> int:
        return wanted

    def own(self, position: dict, mesh: Mesh) -> dict:
        return position

    def steps(self, mesh: Mesh, position: dict, first: int, numbers: Iterable[int], is_mine: Callable[[int], bool]):
        """As `Order.steps`. The epochs are None: those of a mixture count its sequences."""
        where = self._places(position)
        packs = [part.plan.places(Position(*place[:3])) for part, place in zip(self.parts, where, strict=True)]
        for number in numbers:
            step, of_step = first + number, []
            if step in self.stages.firsts:
                where = [[*place[:3], 0] for place in where]
            for _ in range(self.packs_per_step.at(step)):
                source = most_lacking(self.stages.at(step), [place[3] for place in where])
                epoch, window_number, pack, window = next(packs[source])
                tokens = int(window.lengths[window.bounds[pack] : window.bounds[pack + 1]].sum())
                where[source] = [epoch, window_number, pack + 1, where[source][3] + tokens]
                of_step.append((source, window, pack))
            if is_mine(number):
                taken = [self._read(*each) for each in of_step[mesh.dp_rank :: mesh.dp_size]]
                lacking = -(-len(of_step) // mesh.dp_size) - len(taken)
                taken += [(Pack.empty(), np.zeros(0, np.uint8))] * lacking
                yield step, taken, {str(n): place for n, place in enumerate(where)}, None

    def _read(self, source: int, window: Any, number: int) -> tuple[Pack, np.ndarray]:
        """A pack and its tokens. Masks are keyed by epoch and record: an epoch of each source is one of its own."""
        pack = window.pack(number)
        ids = read_tokens(self.parts[source].store, pack)
        return replace(pack, epoch=pack.epoch * len(self.parts) + source, source=source), ids


def most_lacking(weights: Sequence[float], tokens: Sequence[int]) -> int:
    """The source, of those with a weight, whose tokens lack most to its share; the heavier one if two lack as many."""
    total = sum(tokens)
    lacks = [(weight * total - taken, weight) for weight, taken in zip(weights, tokens, strict=True)]
    return max((n for n, weight in enumerate(weights) if weight), key=lacks.__getitem__)


class MixedData(PlannedData):
    """The sources of a --dataset_mix; a held-out set is the validation split of the source of its name.

    read: opens the proteins of a set of --eval_dataset.
    """

    end = None

    def __init__(self, flags: ProteinFlags, tokens: TokenSet, read: Callable[[str], ProteinStore | None]):
        directories, weights = parse_sources(flags)
        check_exponent(flags, weights)
        stages_of(flags, list(directories), weights, [1] * len(directories))  # wrong ones before data are opened
        self.sources, self._read = tuple(directories), read
        alone = partial(with_flags, flags, dataset_mix=None, eval_dataset=None)
        self.parts = [
            PreparedData(alone(dataset_dir=directory, seed=derive_key(flags.seed, number)), tokens)
            for number, directory in enumerate(directories.values())
        ]
        check_same_tokens(dict(zip(self.sources, self.parts, strict=True)))
        sizes = [] if weights else [part.plan.statistics().tokens for part in self.parts]
        self.stages = stages_of(flags, self.sources, weights, sizes)
        self.row_fields = [field for number, name in enumerate(self.sources) for field in fields_of(number, name)]
        held_out = [
            f"{name}={part.directory}"
            for name, part in zip(self.sources, self.parts, strict=True)
            if part.held_out("validation") is not None
        ]
        self.flags = with_flags(flags, eval_dataset=[*(flags.eval_dataset or ()), *held_out] or None)
        self.max_steps, self.num_examples = flags.max_steps, sum(part.num_examples for part in self.parts)
        self.identity = self._identity(flags)

    def _identity(self, flags: ProteinFlags) -> dict:
        contents = [[part.identity["dataset"], part.identity.get("sample_clusters")] for part in self.parts]
        digest = hashlib.sha256(repr(contents).encode()).hexdigest()
        packing = {"seed": flags.seed, "max_seq_length": flags.max_seq_length, **flags.pack_size}
        records = sum(len(part.store) for part in self.parts)
        return {"dataset": f"{digest}-{records}", "dataset_mix": self.stages.line(self.sources), **packing}

    def order(self, packs_per_step: PacksPerStep) -> Order:
        logger.info("Mixture, by tokens: %s", self.stages.line(self.sources))
        for name, part in zip(self.sources, self.parts, strict=True):
            logger.info("  %s: %s, sampling %s", name, part.directory, part.sampling)
        return MixedOrder(self.parts, self.stages, packs_per_step)

    def held_out(self, split: str) -> ProteinStore | None:
        if split in self.sources:
            return self.parts[self.sources.index(split)].held_out("validation")
        return self._read(split) if split in self.flags.eval_sets else None

    def clusters(self, split: str) -> np.ndarray | None:
        return self.parts[self.sources.index(split)].clusters("validation") if split in self.sources else None

    def check_validation(self) -> None:
        """UserError unless there are proteins to evaluate on."""
        if not self.flags.eval_sets:
            raise UserError("--dataset_mix: no source has a validation split: give --eval_dataset, or drop --do_eval")
        if without := [name for name in self.sources if name not in self.flags.eval_sets]:
            logger.info("--dataset_mix: without a validation split, so not evaluated: %s", ", ".join(without))
        check_eval_sets(self, self.flags)

    def sample(self) -> MemoryStore:
        """Proteins of all sources, by the weights of the first stage."""
        weights = self.stages.at(0)
        most = min(len(part.store) / weight for part, weight in zip(self.parts, weights, strict=True) if weight)
        ids, lengths = [], []
        for part, weight in zip(self.parts, weights, strict=True):
            wanted = int(np.ceil(min(most, SAMPLE_RECORDS) * weight))
            records = np.linspace(0, len(part.store) - 1, wanted).astype(np.int64)
            lengths.append(part.store.lengths(records))
            ids.append(part.store.gather(records, np.zeros_like(records), lengths[-1])[0])
        return MemoryStore(np.concatenate(ids), np.append(0, np.cumsum(np.concatenate(lengths))))


def warn_of_copies(parts: dict[str, PreparedData]) -> None:
    """Log how many held-out proteins of each source another source trains on, or how to count them where that takes
    long. A source is read once, whatever the number of sources."""
    directories = {name: part.directory for name, part in parts.items() if (part.directory / "validation").is_dir()}
    hashes = {name: hashes_of(directory, "validation") for name, directory in directories.items()}
    for other, trained in parts.items():
        names = [name for name in hashes if name != other]
        if len(trained.store) > COMPARED_RECORDS:
            for name in names:
                command = f"python -m extras.prepare.overlap {directories[name]} {trained.directory}"
                logger.info("  held-out proteins of %s in %s are not counted: %s", name, other, command)
            continue
        for name, copies in count_in_train({name: hashes[name] for name in names}, trained.directory).items():
            if copies:
                counted = f"{copies:,} of {len(hashes[name]):,} validation proteins of {name}"
                logger.warning("%s are trained on in %s: eval_%s counts them", counted, other, name)


def check_same_tokens(parts: dict[str, PreparedData]) -> None:
    """UserError if a source has other token ids than the model, or begins records with another token."""
    firsts = {}
    for name, part in parts.items():
        records = np.arange(min(64, len(part.store)))
        lengths = part.store.lengths(records)
        ids, offsets = part.store.gather(records, np.zeros_like(records), lengths)
        firsts[name] = set(ids[offsets[:-1][lengths > 0]].tolist())
    one, *others = firsts
    for other in others:
        if firsts[one] and firsts[other] and firsts[one].isdisjoint(firsts[other]):
            raise UserError(
                f"--dataset_mix: records of {one} begin with token id {min(firsts[one])}, those of {other} with "
                f"{min(firsts[other])}: tokenise both alike ({parts[other].directory})"
            )


def fields_of(number: int, name: str) -> list[Field]:
    """What the logged row has of a source."""

    def loss(step: StepRecord) -> float | None:
        total, targets = step.result.by_source[2 * number : 2 * number + 2]
        return None if step.result.skipped or not targets else total / targets

    def share(step: StepRecord) -> float:
        places = step.state.position
        return places[str(number)][3] / max(1, sum(place[3] for place in places.values()))

    key, place = f"loss_{name}", 20 + 2 * number
    return [
        Field(key, "nats per target", "as `loss`", loss, MEAN, log=Shown(place, f"{key}: {{{key}:.4f}}")),
        Field(
            f"token_share_{name}",
            "fraction",
            "of the tokens since the weights changed",
            share,
            log=Shown(place + 1, f"share_{name}: {{token_share_{name}:.3f}}"),
        ),
        Field(f"epoch_{name}", "epochs", "whole ones so far", lambda step: step.state.position[str(number)][0]),
    ]


def open_mixture(flags: ProteinFlags, tokens: TokenSet, world: World, evaluate: bool) -> MixedData:
    """The data of a run with --dataset_mix; collective."""
    source = None
    with world.on_main_rank() as is_main:
        if is_main:
            parse_sources(flags)
            if flags.eval_dataset and not isinstance(tokens, Alphabet):
                raise UserError("--eval_dataset with --dataset_mix: the family gives no alphabet to encode files by")
            source = find_source(flags, alphabet=tokens.declared) if flags.eval_dataset else None
    source = world.broadcast_object(source and source.to_json())
    splits = Source.from_json(source).splits if source else {}
    with world.raise_together():
        data = MixedData(flags, tokens, HeldOutFiles(splits, flags, tokens).read)
        if evaluate:
            data.check_validation()
    with world.on_main_rank() as is_main:
        if is_main and evaluate:
            warn_of_copies(dict(zip(data.sources, data.parts, strict=True)))
    return data
