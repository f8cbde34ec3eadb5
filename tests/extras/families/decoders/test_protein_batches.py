"""Batches of protein decoders, held to loops over the letters."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value

from common.data.crops import Pack
from common.data.token_store import TokenStore
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.families.decoders.protein_arguments import ResidueFlags
from extras.families.decoders.protein_batches import ProteinCollator, protein_batches, with_spans
from extras.families.decoders.residues import RESIDUE_TOKENS, encode_direction
from extras.prepare.sources.streamed_data import MemoryStore

LETTERS = RESIDUE_TOKENS.letters
RANDOM = np.random.default_rng(5)
PROTEINS = ["".join(RANDOM.choice(list("ACDEFGHIKLMNPQRSTVWY"), RANDOM.integers(1, 40))) for _ in range(400)]


def batch_of(collator, proteins, records, starts=None, lengths=None, epoch=0, step=0):
    """The batch of crops of proteins."""
    ids = [encode_direction(protein.encode(), reverse=False) for protein in proteins]
    starts = [0] * len(ids) if starts is None else starts
    lengths = [len(one) for one in ids] if lengths is None else lengths
    crops = [one[start : start + length] for one, start, length in zip(ids, starts, lengths, strict=True)]
    pack = Pack(*(np.array(values) for values in (records, starts, lengths)), epoch)
    return collator(pack, np.concatenate(crops), step)


def sequences(batch) -> list[tuple[list[str], list[str | None]]]:
    """The tokens of each sequence, and what is to be predicted at each."""
    bounds = batch["cu_seqlens"].tolist()
    tokens = [LETTERS[i] for i in batch["input_ids"].tolist()]
    labels = [LETTERS[i] if i >= 0 else None for i in batch["labels"].tolist()]
    return [(tokens[a:b], labels[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def unfilled(tokens: list[str]) -> tuple[list[str], list[str | None]]:
    """The protein of a sequence with spans, and the labels it should have: by a loop over its tokens."""
    end = tokens.index("<eos>")
    spans, labels, name = {}, [None] * (end + 1), None
    for n, token in enumerate(tokens[end + 1 :], end + 1):
        if token.startswith("<span_"):
            name = token
            spans[name] = []
        elif token != "<eos_span>":
            spans[name].append(token)
        labels.append(None if token == "<eos_span>" else tokens[n + 1])
    whole = []
    for token in tokens[1 : end + 1]:
        whole += spans.pop(token) if token.startswith("<span_") else [token]
    assert not spans
    return ["<bos>", *whole], labels


def test_plain_batch_is_each_token_then_the_next():
    batch = batch_of(ProteinCollator(seed=1), ["MK", "A"], [4, 9])
    assert sequences(batch) == [
        (["<bos>", "1", "M", "K", "2", "<eos>"], ["1", "M", "K", "2", "<eos>", None]),
        (["<bos>", "1", "A", "2", "<eos>"], ["1", "A", "2", "<eos>", None]),
    ]
    assert [batch[name] for name in ("num_targets", "num_tokens", "num_sequences", "max_seqlen")] == [9, 11, 2, 6]
    assert batch["sum_squared_lengths"] == 36 + 25


def test_half_is_reversed_and_the_rest_is_not():
    batch = batch_of(ProteinCollator(seed=1, both=True), PROTEINS, range(len(PROTEINS)))
    reversed_ones = 0
    for (tokens, labels), protein in zip(sequences(batch), PROTEINS, strict=True):
        backwards = tokens[1] == "2"
        reversed_ones += backwards
        expected = (
            ["<bos>", "2", *protein[::-1], "1", "<eos>"] if backwards else ["<bos>", "1", *protein, "2", "<eos>"]
        )
        assert tokens == expected
        assert labels == [*expected[1:], None]
    assert abs(reversed_ones - 200) < 5 * 10  # five standard errors
    again = batch_of(ProteinCollator(seed=1, both=True), PROTEINS, range(len(PROTEINS)), epoch=1)
    assert not np.array_equal(again["input_ids"], batch["input_ids"])


@pytest.mark.parametrize("both", [False, True])
def test_spans_are_predicted_from_the_rest_and_nothing_else_is(both):
    collator = ProteinCollator(seed=3, both=both, fill_in=0.5)
    batch = batch_of(collator, PROTEINS, range(len(PROTEINS)))
    filled, numbers, targets = 0, set(), 0
    for (tokens, labels), protein in zip(sequences(batch), PROTEINS, strict=True):
        targets += sum(label is not None for label in labels)
        if tokens[0] == "<bos>":
            continue
        assert tokens[0] == "<bos_glm>"
        whole, expected = unfilled(tokens)
        assert labels == expected
        assert "".join(whole[2:-2]) in ([protein, protein[::-1]] if both else [protein])
        assert whole[1] + whole[-2] == ("12" if both is False or whole[1] == "1" else "21")
        filled, numbers = filled + 1, numbers | {tokens.count("<eos_span>")}
    assert abs(filled - 200) < 5 * 10 + 20  # some have no residue between their points
    assert numbers == {1, 2, 3, 4}
    assert targets == batch["num_targets"]


def test_a_record_is_read_alike_in_any_pack():
    collator = ProteinCollator(seed=3, both=True, fill_in=0.5)
    together = sequences(batch_of(collator, PROTEINS[:20], range(20)))
    assert together[::-1] == sequences(batch_of(collator, PROTEINS[:20][::-1], range(19, -1, -1)))
    alone = [sequences(batch_of(collator, [PROTEINS[n]], [n], step=7))[0] for n in range(20)]
    assert alone == together
    assert together != sequences(batch_of(ProteinCollator(seed=4, both=True, fill_in=0.5), PROTEINS[:20], range(20)))


def test_crop_has_the_ends_that_it_reaches():
    """Cut out of <bos> 1 A C D E F G H I K L 2 <eos>; a crop has no span."""
    collator, seen = ProteinCollator(seed=3, both=True, fill_in=1.0), set()
    for record in range(40):
        batch = batch_of(collator, ["ACDEFGHIKL"] * 3, [record] * 3, starts=[0, 5, 7], lengths=[6, 5, 7])
        seen.add(tuple("".join(tokens) for tokens, _ in sequences(batch)))
    assert seen == {("<bos>1ACDE", "EFGHI", "GHIKL2<eos>"), ("EDCA1<eos>", "IHGFE", "<bos>2LKIHG")}


def test_spans_leave_room():
    """No sequence is longer than the longest, which attention and fillers are made for."""
    collator = ProteinCollator(seed=3, fill_in=1.0, longest=24)
    short = [protein for protein in PROTEINS if len(protein) <= 20]
    batch = batch_of(collator, short, range(len(short)))
    assert batch["max_seqlen"] <= 24
    assert any(tokens[0] == "<bos_glm>" for tokens, _ in sequences(batch))


def test_spans_of_given_places():
    ids = encode_direction(b"MKVLA", reverse=False)
    tokens, predicted = with_spans(ids, [(2, 4), (6, 7)])
    words = ["<bos_glm>", "1", "<span_1>", "V", "L", "<span_2>", "2", "<eos>"]
    words += ["<span_1>", "M", "K", "<eos_span>", "<span_2>", "A", "<eos_span>"]
    assert [LETTERS[i] for i in tokens] == words
    assert [word for word, is_target in zip(words, predicted, strict=True) if is_target] == [
        *("M", "K", "<eos_span>", "A", "<eos_span>")
    ]


def test_evaluation_reads_forwards_and_knows_its_proteins():
    batch = batch_of(ProteinCollator(seed=3, both=True, fill_in=1.0), PROTEINS[:5], [7, 3, 5, 1, 0], step=None)
    assert [tokens[:2] for tokens, _ in sequences(batch)] == [["<bos>", "1"]] * 5
    assert batch["records"].tolist() == [7, 3, 5, 1, 0]
    assert batch["num_targets"] == batch["num_tokens"] - 5


def test_empty_pack_has_no_target():
    batch = ProteinCollator(seed=3)(Pack.empty(), np.zeros(0, np.uint8), 0)
    assert (batch["num_targets"], batch["num_tokens"], batch["num_sequences"]) == (0, 0, 0)
    assert batch["labels"].tolist() == [-100]


def test_letters_that_are_no_residues_are_counted():
    assert batch_of(ProteinCollator(seed=3), ["MK*X", "A-"], [0, 1])["num_unknown"] == 3


def test_prepared_proteins_and_files_give_the_same_batches(tmp_path):
    """The store has ESM-2's ids."""
    ids = [ESM2_TOKENS.encode(protein) for protein in PROTEINS[:30]]
    Dataset.from_dict({"input_ids": ids}, Features({"input_ids": List(Value("uint8"))})).save_to_disk(
        tmp_path / "train"
    )
    prepared = TokenStore(tmp_path / "train", RESIDUE_TOKENS)
    characters = np.frombuffer("".join(PROTEINS[:30]).encode(), np.uint8)
    offsets = np.append(0, np.cumsum([len(protein) for protein in PROTEINS[:30]]))
    of_file = MemoryStore(*RESIDUE_TOKENS.encode_many(characters, offsets), RESIDUE_TOKENS)
    records = np.arange(30)
    lengths = prepared.lengths(records)
    assert np.array_equal(lengths, of_file.lengths(records))
    flags = ResidueFlags(directions="both", fill_in=0.3, max_seq_length=64)
    pack, collator = Pack(records, np.zeros_like(records), lengths, 0), protein_batches(flags, Mesh())
    batches = [collator(pack, store.gather(records, pack.starts, lengths)[0], 0) for store in (prepared, of_file)]
    assert sequences(batches[0]) == sequences(batches[1])
