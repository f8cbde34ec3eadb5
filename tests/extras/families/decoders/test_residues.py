"""Protein decoders' tokens, and the tokenizer that stock transformers opens."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from extras.families.decoders.residues import (
    RESIDUE_TOKENS,
    encode_direction,
    reads_residues,
    write_residue_tokenizer,
)
from extras.families.text.tokenizers import ByteTokenizer


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_residue_tokenizer(directory)
    assert reads_residues(directory)
    return AutoTokenizer.from_pretrained(directory)


def test_ids_are_those_of_e1():
    assert RESIDUE_TOKENS.letters[:9] == ("<pad>", "<bos>", "<eos>", "<bos_glm>", "<eos_span>", "?", "1", "2", "A")
    assert RESIDUE_TOKENS.letters[33:35] == ("Z", "<span_1>")
    assert RESIDUE_TOKENS.vocab_size == len(RESIDUE_TOKENS.letters) == 64


def test_a_protein_reads_in_both_directions():
    m, k = (ord(letter) - ord("A") + 8 for letter in "MK")
    assert encode_direction(b"MK", reverse=False).tolist() == [1, 6, m, k, 7, 2]
    assert encode_direction(b"mK", reverse=True).tolist() == [1, 7, k, m, 6, 2]
    assert encode_direction(b"", reverse=True).tolist() == [1, 7, 6, 2]
    assert encode_direction(b"*", reverse=False).tolist() == [1, 6, RESIDUE_TOKENS.unknown, 7, 2]


def test_stock_tokenizer_opens_and_round_trips(stock):
    prompt = stock("1MKv")["input_ids"]
    assert prompt == encode_direction(b"MKV", reverse=False)[:-2].tolist()
    assert stock.decode(prompt, skip_special_tokens=True) == "1MKV"
    for reverse, text in ((False, "1MKX2<eos>"), (True, "2XKM1<eos>")):
        ids = encode_direction(b"MK*", reverse).tolist()
        assert stock(text)["input_ids"] == stock(text.replace("X", "*"))["input_ids"] == ids
        assert stock.decode(ids) == f"<bos>{text}"
        assert stock(stock.decode(ids), add_special_tokens=False)["input_ids"] == ids
    filled = "<bos_glm>1M<span_3>A2<eos><span_3>KV<eos_span>"
    ids = stock(filled, add_special_tokens=False)["input_ids"]
    assert ids == [3, 6, 20, 36, 8, 7, 2, 36, 18, 29, 4]
    assert stock.decode(ids) == filled
    assert (len(stock), stock.bos_token_id, stock.eos_token_id, stock.pad_token_id) == (64, 1, 2, 0)


def test_another_tokenizer_reads_no_residues(tmp_path):
    assert not reads_residues(tmp_path)
    ByteTokenizer().save(tmp_path)
    assert not reads_residues(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert not reads_residues(tmp_path)
