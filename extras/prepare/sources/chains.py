"""Several chains in a record: what a model sees between them, for training and for what comes after.

In text a chain ends at `:`, in prepared data at id 31 of ESM-2's alphabet. A *separator* is one token there, a
*linker* 25 glycines, as ESMFold has them (Lin et al. 2023). All chains of a record attend to each other, and positions
run on.
A linker is part of a record's length. Its tokens are never masked and never predicted, and the residues asked are
those of the separator: the hash of a mask counts a chain end as one token, whatever stands there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.data.collators import IGNORE, Batch
from common.data.crops import Pack
from common.data.token_store import TokenStore
from common.files.safe_files import shorten
from common.models.esm2.alphabet import CHAIN_END as STORED_END
from common.models.family import Family
from common.shape_buckets import predicted_positions

CHAIN_END = ":"
LINKER = 25  # residues
BETWEEN = ("separator", "linker")
SEPARATORS = ("|", "<null_1>")  # tokens that may stand between chains; ESM C has the former in the latter's place
# Where linkers lie, an id carries the number of its chain above these bits: a crop then says where it begins.
CHAIN_BITS = 16


@dataclass(frozen=True, kw_only=True)
class ChainAlphabet(Alphabet):
    """An alphabet that reads `:`. chain_end: id of the separator; between: "separator" or "linker"."""

    chain_end: int
    between: str

    @property
    def chains(self) -> str:
        return self.between

    @property
    def has_linkers(self) -> bool:
        return self.between == "linker"

    @property
    def break_length(self) -> int:
        """Tokens between two chains."""
        return LINKER if self.has_linkers else 1

    @property
    def glycine(self) -> int:
        return int(self.byte_to_id[ord("G")])

    @cached_property
    def byte_to_id(self) -> np.ndarray:
        table = Alphabet.byte_to_id.func(self)
        table[ord(CHAIN_END)] = self.chain_end
        return table

    @cached_property
    def stored_to_id(self) -> np.ndarray:
        table = Alphabet.stored_to_id.func(self)
        table[STORED_END] = self.chain_end
        return table

    def plain(self, ids: np.ndarray) -> np.ndarray:
        return ids & ((1 << CHAIN_BITS) - 1) if self.has_linkers else ids

    def encode(self, sequence: str | bytes) -> np.ndarray:
        """As a model sees it: uint8, with the linkers' glycines."""
        ids = super().encode(sequence)
        if not self.has_linkers:
            return ids
        is_end = ids == self.chain_end
        return np.repeat(np.where(is_end, np.uint8(self.glycine), ids), np.where(is_end, LINKER, 1))

    def places(self, text: bytes) -> np.ndarray:
        is_end = np.frombuffer(text, np.uint8) == ord(CHAIN_END)
        return super().places(text) + (self.break_length - 1) * (np.cumsum(is_end) - is_end)

    def room(self, text: bytes, tokens: int) -> int:
        """UserError if linkers leave too little."""
        left = super().room(text, tokens) - (self.break_length - 1) * text.count(CHAIN_END.encode())
        if left < LINKER:
            raise UserError(
                f"--max_seq_length {tokens}: too short for the linkers of a record of {text.count(b':') + 1} chains: "
                "raise it"
            )
        return left

    def encode_many(self, characters: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As stores give records: with linkers, those of `linked`."""
        ids, offsets = super().encode_many(characters, offsets)
        return self.linked(ids, offsets) if self.has_linkers else (ids, offsets)

    def linked(self, ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Records of one token between chains, int [T] and offsets int64 [n + 1], with `LINKER` of that token: uint32
        ids, with the number of the chain above `CHAIN_BITS`."""
        is_end = ids == self.chain_end
        ends = np.append(0, np.cumsum(is_end))
        chain = ends[:-1] - np.repeat(ends[offsets[:-1]], np.diff(offsets))
        repeats = np.where(is_end, LINKER, 1)
        numbered = ids.astype(np.uint32) | (chain.astype(np.uint32) << np.uint32(CHAIN_BITS))
        return np.repeat(numbered, repeats), np.append(0, np.cumsum(repeats))[offsets]


def chain_tokens(family: Family, between: str) -> ChainAlphabet:
    """The family's alphabet, for records of several chains. between: of `BETWEEN`.

    UserError for anything else, and for a family without a token to put between them.
    """
    if between not in BETWEEN:
        raise UserError(f"config.json: chains is {shorten(between)}, expected {' or '.join(BETWEEN)}")
    tokens = family.tokens
    separators = [name for name in SEPARATORS if isinstance(tokens, Alphabet) and name in tokens.letters]
    if family.reads_sets or not separators:
        raise UserError(f"--chains: {family.title or family.task} reads one chain a record: make a record of each")
    assert isinstance(tokens, Alphabet)
    given = {each.name: getattr(tokens, each.name) for each in fields(tokens)}
    return ChainAlphabet(**given, chain_end=tokens.letters.index(separators[0]), between=between)


class LinkedStore(TokenStore):
    """A `TokenStore` whose records have linkers. Counting those of a record reads it once, and takes 4 bytes."""

    def __init__(self, path: str | Path, tokens: ChainAlphabet, max_records: int | None = None):
        super().__init__(path, tokens, max_records)
        self.alphabet = tokens
        self._ends = np.full(len(self), -1, np.int32)  # of chains but the last; -1 where not yet known

    def lengths(self, records: np.ndarray) -> np.ndarray:
        records = np.asarray(records, np.int64)
        stored = super().lengths(records)  # raises for a record that is not there
        unknown = np.unique(records[self._ends[records] < 0])
        if len(unknown):
            ids, offsets = self._stored(unknown)
            ends = np.append(0, np.cumsum(ids == self.alphabet.chain_end))
            self._ends[unknown] = np.diff(ends[offsets])
        return stored + (LINKER - 1) * self._ends[records].astype(np.int64)

    def gather(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `TokenStore.gather`; ids of `ChainAlphabet.linked`."""
        ids, offsets = self.alphabet.linked(*self._stored(np.asarray(records, np.int64)))
        begins = offsets[:-1] + starts
        assert np.all((starts >= 0) & (begins + lengths <= offsets[1:])), "crop outside its record"
        pieces = [ids[a : a + n] for a, n in zip(begins.tolist(), lengths.tolist(), strict=True)]
        return np.concatenate(pieces or [ids[:0]]), np.append(0, np.cumsum(lengths))

    def _stored(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whole records, with one token between chains."""
        return super().gather(records, np.zeros_like(records), super().lengths(records))


class LinkedBatches:
    """Batches of a `collator` of masked language modelling, with linkers where records have them.

    The collator masks packs with one token between chains; then come the glycines. So the residues asked do not depend
    on what stands there.
    """

    def __init__(self, collator: Any, tokens: ChainAlphabet):
        self.collator, self.tokens = collator, tokens
        self.rates = collator.rates

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """ids: of `ChainAlphabet.linked`."""
        plain, chain = self.tokens.plain(ids), ids.astype(np.uint32) >> np.uint32(CHAIN_BITS)
        is_end, bounds = plain == self.tokens.chain_end, np.append(0, np.cumsum(pack.lengths))
        first = is_end.copy()  # of each linker
        first[1:] &= ~(is_end[:-1] & (chain[:-1] == chain[1:]))
        first[bounds[:-1]] = is_end[bounds[:-1]]
        kept = first | ~is_end
        batch = self.collator(_as_stored(pack, chain, is_end, kept), plain[kept].astype(np.uint8), step)
        if not len(ids):
            return batch
        places = torch.from_numpy(np.flatnonzero(kept))
        for name, filler in (("input_ids", self.tokens.glycine), ("labels", IGNORE), ("weights", 0)):
            if name in batch:
                batch[name] = batch[name].new_full((len(ids),), filler).index_copy_(0, places, batch[name])
        batch["input_ids"][torch.from_numpy(is_end)] = self.tokens.glycine
        return batch | {
            "predicted": predicted_positions(batch["labels"]),
            "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
            "max_seqlen": int(pack.lengths.max()),
            "num_tokens": len(ids),
            "sum_squared_lengths": int((pack.lengths**2).sum()),
        }


def _as_stored(pack: Pack, chain: np.ndarray, is_end: np.ndarray, kept: np.ndarray) -> Pack:
    """The pack whose crops have one token a linker and begin where they do in the stored records.

    chain: of each token int [T]; is_end: whether it is a linker's, kept: whether it stays, bool [T]. Of a crop, where
    it begins follows from its first residue, before which lie `chain` linkers of its record.
    """
    bounds, before = np.append(0, np.cumsum(pack.lengths)), np.append(0, np.cumsum(kept))
    others = np.append(np.flatnonzero(~is_end), len(is_end))
    found = others[np.searchsorted(others, bounds[:-1])]
    starts = pack.starts.copy()
    here = np.flatnonzero(found < bounds[1:])  # the others lie within a linker
    first = found[here]
    in_record = pack.starts[here] + first - bounds[here] - (LINKER - 1) * chain[first].astype(np.int64)
    starts[here] = in_record - (before[first] - before[bounds[here]])
    return replace(pack, starts=starts, lengths=np.diff(before[bounds]))
