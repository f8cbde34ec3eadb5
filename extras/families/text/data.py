"""The data of a causal run: tokens that 1.tokenize_text.py wrote (`--dataset_dir`), or text as it is (`--dataset`).

Documents are tokenised, each followed by the tokenizer's end-of-text token, concatenated and cut into contexts of
`max_seq_length` tokens without padding. A pack is `per_device_train_batch_size` contexts; a step takes G packs
(`packs_per_step`), as for proteins. The interface is common.data.training_data.TrainingData.

A batch has the labels already shifted: labels[t] is token t + 1, -100 at the end of a sequence. cu_seqlens are the
bounds of contexts, with --document_masks of the documents' pieces in them; num_sequences counts contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path

from common.cli import UserError
from common.data.collators import Collator
from common.data.loader import Order, PlannedOrder, evaluation_batches
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import EVAL_SEED, PlannedData
from common.distributed.world import World
from extras.families.decoders.residues import RESIDUES
from extras.families.text.contexts import ContextPlan
from extras.families.text.flags import TextFlags
from extras.families.text.store import TextMemory, TextStore, open_text_split, tokenize_files
from extras.families.text.streams import WINDOW_BYTES, WINDOW_DOCUMENTS, plan_text_streams
from extras.families.text.tokenizers import Tokenizer
from extras.prepare.sources.find_files import Source, check_same_files, open_source, with_contents
from extras.prepare.sources.formats import PROTEINS, documents
from extras.prepare.sources.hub import REMOTE
from extras.prepare.sources.record_counts import count_records
from extras.prepare.sources.sequence_files import check_columns
from extras.prepare.sources.streamed_data import StreamedData
from extras.prepare.sources.streams import StreamedOrder

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 1 << 18  # from the beginning of a source, to estimate the number of tokens
COUNTED_BYTES = 32 << 20  # of a local source: the tokens of smaller ones are counted exactly


class PreparedText(PlannedData):
    """The splits of a --dataset_dir, in the order of a plan of contexts."""

    def __init__(self, flags: TextFlags, tokenizer: Tokenizer):
        self.flags, self.tokenizer = flags, tokenizer
        self.store = open_text_split(flags.dataset_dir, flags.train_split, tokenizer)
        self.identity = {"dataset": self.store.fingerprint} | _packing(flags, tokenizer)
        size = (flags.seed, flags.max_seq_length, flags.per_device_train_batch_size)
        self.plan = ContextPlan(self.store, *size)
        self.num_examples, self.max_steps = self.plan.num_contexts, flags.max_steps
        self.end = None if flags.max_steps > 0 else self.plan.position_at(flags.num_train_epochs)

    def order(self, packs_per_step: PacksPerStep) -> Order:
        return PlannedOrder(self.store, self.plan, packs_per_step, self.end)

    def held_out(self, split: str) -> TextStore | None:
        """The store of --val_split; None without one, and for other splits than "validation"."""
        name = self.flags.val_split
        if split != "validation" or not (Path(self.flags.dataset_dir) / name).is_dir():
            return None
        return open_text_split(self.flags.dataset_dir, name, self.tokenizer)


class StreamedText(StreamedData):
    """Text of a source, in the order of its streams. tokens: estimated number in an epoch."""

    def __init__(self, flags: TextFlags, source: Source, tokenizer: Tokenizer, tokens: float):
        super().__init__(flags)
        self.source, self.tokenizer, self.tokens = source, tokenizer, tokens
        self.identity = {
            "dataset": source.identity(flags.train_split),
            "windows": [WINDOW_BYTES, WINDOW_DOCUMENTS],
        } | _packing(flags, tokenizer)
        self._held_out: dict[str, TextMemory | None] = {}

    def epochs(self, sequences: int) -> float:
        return sequences * self.flags.max_seq_length / self.tokens

    def order(self, packs_per_step: PacksPerStep) -> Order:
        flags = self.flags
        plan = plan_text_streams(
            self.source.splits[flags.train_split],
            packs_per_step.most,
            seed=flags.seed,
            context=flags.max_seq_length,
            contexts_per_pack=flags.per_device_train_batch_size,
            tokenizer=self.tokenizer,
        )
        counts = (self.source.name, len(plan.units), plan.num_streams)
        logger.info("Streaming %s: files or row groups: %d, streams: %d", *counts)
        return StreamedOrder(plan, packs_per_step)

    def held_out(self, split: str) -> TextMemory | None:
        """The beginning of --val_split; None where there is none, and for any other split than "validation"."""
        if split not in self._held_out:
            files = self.source.splits.get(self.flags.val_split) if split == "validation" else None
            most = self.flags.held_out_contexts * self.flags.max_seq_length
            store = TextMemory.read(files, self.tokenizer, most) if files else None
            self._held_out[split] = store if store is not None and store.num_tokens else None
        return self._held_out[split]


TextData = PreparedText | StreamedText


def open_text(flags: TextFlags, world: World, evaluates: bool, tokenizer: Tokenizer) -> TextData:
    """The data of a run; collective. UserError if they cannot be trained on or, with `evaluates`, evaluated on.

    One rank finds the files of a --dataset for all: the Hub limits the rate of requests.
    """
    source, tokens = None, 0.0
    with world.on_main_rank() as is_main:
        if is_main and flags.dataset:
            source = _find(flags)
            tokens = _estimate_tokens(source.splits[flags.train_split], tokenizer)
            source = with_contents(source, flags.train_split)
    source, tokens = world.broadcast_object((source and source.to_json(), tokens))
    source = source and Source.from_json(source)
    with world.raise_together():
        if source and world.local_rank == 0:
            check_same_files(source)
        data = PreparedText(flags, tokenizer) if source is None else StreamedText(flags, source, tokenizer, tokens)
        if evaluates and data.held_out("validation") is None:
            raise UserError(_no_held_out(flags))
    return data


def _no_held_out(flags: TextFlags) -> str:
    """The error for a run without text to evaluate on."""
    where = f"--dataset {flags.dataset}" if flags.dataset else f"--dataset_dir {flags.dataset_dir}"
    ways = "give --val_split, or drop --do_eval"
    if flags.dataset:
        ways = (
            "hold documents out with 1.tokenize_text.py (--validation_size) and train on its output (--dataset_dir), "
            "or give a directory with a file named validation.*, or another --val_split, or drop --do_eval"
        )
    return f"{where}: no text in a split {flags.val_split}: {ways}"


def held_out_contexts(
    flags: TextFlags, store: TextStore | TextMemory, collator: Collator, world: World
) -> tuple[Generator, int]:
    """(this rank's batches of the first contexts of a held-out store, the same ones for any number of ranks; the
    number of contexts)."""
    size = (flags.max_seq_length, flags.per_device_eval_batch_size)
    plan = ContextPlan(store, EVAL_SEED, *size, shuffle=False, most_contexts=flags.held_out_contexts)
    batches = evaluation_batches(store, plan, collator, world.mesh, **flags.loading(world))
    return batches, plan.num_contexts


def _packing(flags: TextFlags, tokenizer: Tokenizer) -> dict:
    """The part of the identity that does not depend on the text."""
    return {
        "tokenizer": tokenizer.identity,
        "seed": flags.seed,
        "max_seq_length": flags.max_seq_length,
        "per_device_train_batch_size": flags.per_device_train_batch_size,
    }


def _find(flags: TextFlags) -> Source:
    """The files of --dataset. A file of the wrong kind is an error before anything is written."""
    try:
        source = open_source(
            flags.dataset,
            flags.streaming,
            content=documents(flags.text_column, flags.max_record_length),
            configuration=flags.dataset_config_name,
            train=flags.train_split,
        )
    except UserError as error:
        if not _has_fasta(flags.dataset):
            raise
        raise UserError(f"{error}; for proteins add --tokenizer {RESIDUES}") from None
    for split in (flags.train_split, flags.val_split):
        check_columns(source.splits.get(split, ()))
    return source


def _has_fasta(dataset: str) -> bool:
    """Whether --dataset, or a file in it, has the name of a FASTA file."""
    path = Path(dataset).expanduser()
    names = [path.name, *(file.name for file in path.iterdir())] if path.is_dir() else [path.name]
    return any(PROTEINS.format_of(name) == "fasta" for name in names)


def _estimate_tokens(files: tuple, tokenizer: Tokenizer) -> float:
    """Tokens of some files. Exact for local files of up to COUNTED_BYTES in all, decompressed; else the number of
    records times the mean length of the first ones."""
    sample = TextMemory.read(files, tokenizer, SAMPLE_TOKENS)
    if not len(sample):
        raise UserError(f"{files[0].path}: no document in the files to train on")
    if sample.num_tokens < SAMPLE_TOKENS:
        return sample.num_tokens  # all of them
    counted = _count_tokens(files, tokenizer)
    return count_records(files) * sample.num_tokens / len(sample) if counted is None else counted


def _count_tokens(files: tuple, tokenizer: Tokenizer) -> int | None:
    """Tokens of local files; None for more than COUNTED_BYTES, and for remote files."""
    if any(file.path.startswith(REMOTE) for file in files) or sum(file.size for file in files) > COUNTED_BYTES:
        return None
    tokens = size = 0
    for texts, ids, _ in tokenize_files(files, tokenizer):
        tokens, size = tokens + len(ids), size + texts.nbytes
        if size > COUNTED_BYTES:  # of compressed files
            return None
    return tokens
