"""Tokenizers: the built-in byte-level one, and any that transformers' AutoTokenizer opens; and pieces of documents.

A tokenizer's `identity` is a hash of everything that decides its ids. Token stores and checkpoints keep it, so that
data of one tokenizer are never continued with another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from common.cli import UserError, one_line
from common.distributed.world import World
from extras.families.decoders.residues import RESIDUES, ResidueTokenizer
from extras.prepare.sources.hub import HUB_NAME, Retries, offline, uncached_advice, unreachable_advice


class Pieces(NamedTuple):
    """A range of tokens of concatenated documents, as pieces of documents.

    Piece i is tokens [starts[i], starts[i] + lengths[i]) of document records[i]; int64 [n] each, no length 0.
    """

    records: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def between(cls, records: np.ndarray, bounds: np.ndarray, begin: int, end: int) -> Pieces:
        """The pieces of tokens [begin, end), where document records[i] (int64 [m]) has [bounds[i], bounds[i + 1])."""
        first = int(np.searchsorted(bounds, begin, side="right")) - 1
        last = int(np.searchsorted(bounds, end, side="left"))
        edges = np.clip(bounds[first : last + 1], begin, end)
        lengths = np.diff(edges)
        pieces = (records[first:last], edges[:-1] - bounds[first:last], lengths)
        return cls(*(array[lengths > 0] for array in pieces))

    @classmethod
    def concat(cls, parts: list[Pieces]) -> Pieces:
        empty = cls(*[np.zeros(0, np.int64)] * 3)
        return cls(*map(np.concatenate, zip(empty, *parts, strict=True)))

    def cut(self, context: int) -> Pieces:
        """Split pieces at multiples of `context` tokens."""
        ends = np.cumsum(self.lengths)
        total = int(ends[-1]) if len(ends) else 0
        begins = np.union1d(ends - self.lengths, np.arange(0, total, context))
        piece = np.searchsorted(ends, begins, side="right")
        starts = self.starts[piece] + begins - (ends - self.lengths)[piece]
        return Pieces(self.records[piece], starts, np.diff(np.append(begins, total)))


BYTES = "bytes"
# Files of a repository that AutoTokenizer may need: no weights.
TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "config.json")
IDENTITY_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")  # parts of tokenizer.json


class Tokenizer(Protocol):
    """vocab_size: ids lie below it; eos_id: of the token that ends a document; dtype: the smallest that holds them."""

    name: str
    identity: str
    vocab_size: int
    eos_id: int

    @property
    def dtype(self) -> np.dtype: ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, `dtype` [n], without special tokens."""

    def save(self, directory: Path) -> None:
        """Write the files that AutoTokenizer reads."""


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The dtype of token stores: two bytes a token if possible."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """One token a byte of UTF-8, ids 0 to 255, then <bos>, <eos> and <pad>. No download, no unknown characters."""

    name = identity = BYTES
    SPECIAL = ("<bos>", "<eos>", "<pad>")
    vocab_size = 256 + len(SPECIAL)
    eos_id = 257
    dtype = smallest_dtype(vocab_size)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def save(self, directory: Path) -> None:
        # GPT-2's byte-level alphabet without a merge: every byte has a printable character and stays a token.
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {character: number for number, character in enumerate(_printable_bytes())}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        bos, eos, pad = self.SPECIAL
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
        ).save_pretrained(directory)


def _printable_bytes() -> list[str]:
    """The character of each byte in byte-level BPE (Radford et al. 2019): itself if printable, else the next one from
    256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


class PretrainedTokenizer:
    """transformers' tokenizer of a directory. name: how the user called it."""

    def __init__(self, directory: Path, name: str):
        # Workers and ranks share the cores, and a thread pool would not survive a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer

        where = f"--tokenizer {name}"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), use_fast=True, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # many types: a missing or damaged file, or another package that it needs
            raise UserError(f"{where}: not a tokenizer that transformers can open ({one_line(error)[:200]})") from None
        self._tokenizer.init_kwargs.pop("auto_map", None)  # names code, and would be saved again
        if self._tokenizer.eos_token_id is None:
            raise UserError(
                f"{where}: it has no end-of-text token, which separates documents: set eos_token in its "
                "tokenizer_config.json"
            )
        self.name, self.eos_id = name, int(self._tokenizer.eos_token_id)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        self.identity = self._identity(vocabulary)

    def _identity(self, vocabulary: dict[str, int]) -> str:
        parts = [self.eos_id, sorted(vocabulary.items())]
        if self._fast is not None:
            whole = json.loads(self._fast.to_str())
            parts += [whole.get(part) for part in IDENTITY_PARTS]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def dtype(self) -> np.dtype:
        return smallest_dtype(self.vocab_size)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._fast is not None:
            encoded = [one.ids for one in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        else:
            encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [np.array(ids, self.dtype) for ids in encoded]

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(name: str, revision: str | None = None) -> tuple[Tokenizer, str | None]:
    """The tokenizer called `name` (`bytes`, `residues`, a directory, a Hub name), and its commit on the Hub.

    revision: that commit, if another process has downloaded it: the local cache is then used without a request.
    UserError for a tokenizer that is missing, damaged, gated, or without an end-of-text token.
    """
    if name == BYTES:
        return ByteTokenizer(), None
    if name == RESIDUES:
        return ResidueTokenizer(), None
    path = Path(name).expanduser()
    if path.is_dir():
        return PretrainedTokenizer(path, name), None
    if not HUB_NAME.fullmatch(name) or path.exists():
        raise UserError(
            f"--tokenizer {name}: neither `{BYTES}`, `{RESIDUES}`, a directory of a tokenizer, nor a name on the Hub "
            "(owner/name)"
        )
    directory = _fetch(name, revision)
    # The cache keeps each commit in a directory of its name.
    return PretrainedTokenizer(directory, name), directory.name


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """UserError if the tokenizer has ids outside the model's vocabulary."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"--tokenizer {tokenizer.name}: its {tokenizer.vocab_size:,} tokens do not fit into the model's "
            f"vocabulary of {vocab_size:,}: give the model's own tokenizer, or --vocab_size {tokenizer.vocab_size}"
        )


def _fetch(name: str, revision: str | None) -> Path:
    """The directory of a repository's tokenizer in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    where = f"--tokenizer {name}"
    asked = {"allow_patterns": list(TOKENIZER_FILES), "revision": revision}
    if revision is not None:
        try:
            return Path(snapshot_download(name, local_files_only=True, **asked))
        except LocalEntryNotFoundError:
            pass  # a node with a cache of its own
    retries = Retries(where, name, "tokenizer")
    while True:
        try:
            return Path(snapshot_download(name, local_files_only=offline(), **asked))
        except GatedRepoError:
            raise UserError(
                f"{where}: its owner asks for an agreement: accept the terms on its page of the Hub, and set HF_TOKEN "
                "to a token of that account"
            ) from None
        except RepositoryNotFoundError:
            raise UserError(
                f"{where}: no such directory, and no such model on the Hub, or it is private: set HF_TOKEN"
            ) from None
        except LocalEntryNotFoundError as error:
            if isinstance(cause := error.__cause__, HfHubHTTPError):
                retries.wait_after(cause)
                continue
            raise UserError(f"{where}: {uncached_advice(name, 'tokenizer')}") from None
        except HfHubHTTPError as error:
            retries.wait_after(error)
        except OSError as error:
            raise UserError(f"{where}: {unreachable_advice(name, error, 'tokenizer')}") from None


def tokenize(tokenizer: Tokenizer, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The ids of documents (string or binary), each followed by the end-of-text token, end to end: [T] of the
    tokenizer's dtype; and their offsets int64 [n + 1]. Empty documents are skipped."""
    documents = tokenizer.encode(texts.cast(pa.string()).to_pylist())
    end = np.array([tokenizer.eos_id], tokenizer.dtype)
    sizes = np.array([len(ids) + 1 if len(ids) else 0 for ids in documents], np.int64)
    parts = [part for ids in documents if len(ids) for part in (ids, end)]
    return np.concatenate(parts or [end[:0]]), np.append(0, np.cumsum(sizes))


def open_tokenizer(name: str, world: World) -> Tokenizer:
    """The tokenizer called `name` (see `load_tokenizer`), the same on every rank; collective.

    One rank asks the Hub, which limits the rate of requests; the others open the same commit.
    """
    opened, revision = None, None
    with world.on_main_rank() as is_main:
        if is_main:
            opened, revision = load_tokenizer(name)
    revision = world.broadcast_object(revision)
    with world.raise_together():
        tokenizer = opened or load_tokenizer(name, revision)[0]
    world.assert_same({"tokenizer": tokenizer.identity})
    return tokenizer
