"""What a causal run reads: tokens that 1.tokenize_text.py prepared (`--dataset_dir`), or text as it is (`--dataset`).

Documents are tokenised, each ended by the tokenizer's end-of-text token, laid end to end and cut into contexts of
`max_seq_length` tokens; what a context has no room for begins the next one: no padding, nothing lost. A pack is
`per_device_train_batch_size` contexts; a step takes G of them (`packs_per_step`), as in the batch plan for proteins.

The trainer asks as it asks common.batches.training_data: identity, total_steps, finished, check_packs, order(G) (for a
TrainLoader, with `common.batches.causal.causal_batches` as its collator), held_out(split), epochs, num_examples, end.

How the task uses this, on all ranks together:

    tokenizer = open_tokenizer(flags.tokenizer, world)           # common.batches.tokenizer
    check_vocabulary(tokenizer, config.vocab_size)               # common.files.text_tokenizers: UserError
    data = open_text(flags, world, evaluates=True, tokenizer=tokenizer)
    TrainLoader(data.order(G), causal_batches(flags, world.mesh), world.mesh, step, position, ...)
    store = data.held_out("validation"); held_out_contexts(flags, store, causal_batches(flags, world.mesh), world)
    tokenizer.save(directory)                                    # opens with AutoTokenizer, beside an export

A batch: input_ids int64 [T]; labels int64 [T], shifted already: labels[t] is token t + 1, -100 where nothing follows
in the same sequence; cu_seqlens int32 [B + 1] (of contexts, with --document_masks of the documents' pieces in them);
max_seqlen int; and `Counts`: num_masked = labels that are not -100, num_tokens = T, sum_squared_lengths of the
sequences that attention runs on, num_sequences = contexts, num_unknown = 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.batches.loader import Collator, Order
from common.batches.text_flags import TextFlags
from common.files.text_tokenizers import Tokenizer
from common.ranks.world import World


class TextData:
    """The interface; see above."""

    identity: dict
    num_examples: int | None
    end: object

    def total_steps(self, packs_per_step: int, step: int, position: dict) -> int: ...
    def finished(self, step: int, position: dict) -> bool: ...
    def epochs(self, sequences: int) -> float: ...
    def check_packs(self, saved: int, packs_per_step: int) -> None: ...
    def order(self, packs_per_step: int) -> Order: ...
    def held_out(self, split: str): ...


def open_text(flags: TextFlags, world: World, evaluates: bool, tokenizer: Tokenizer) -> TextData:
    """The data of a run; all ranks call together. UserError if they cannot be trained, or evaluated, on."""
    raise NotImplementedError


def held_out_contexts(flags: TextFlags, store, collator: Collator, world: World) -> Iterator:
    """This rank's batches of a held-out store."""
    raise NotImplementedError
