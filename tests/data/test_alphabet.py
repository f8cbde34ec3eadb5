"""Alphabets with several tokens before and after the residues: as text, and of records in ESM-2's ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.cli import UserError
from common.data.token_store import TokenStore
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS
from extras.families.e1.alphabet import ALPHABET, TOKENS
from tests.files.test_token_store import assert_holds, random_records, save

# Three tokens before the residues, and four after them.
WIDE = replace(ALPHABET, after_begin=(3, 6), before_end=(7, 4, 7))


def longer(record: np.ndarray, alphabet) -> np.ndarray:
    letters = [ESM2_TOKENS.letters[token] for token in record[1:-1]]
    residues = [TOKENS.index(letter) for letter in letters]
    return np.array([*alphabet.head, *residues, *alphabet.tail], np.uint8)


def test_alphabet_encodes_by_letter_between_all_special_tokens():
    assert (ALPHABET.head, ALPHABET.tail, ALPHABET.num_special) == ((1, 6), (7, 2), 4)
    assert (ESM2_TOKENS.head, ESM2_TOKENS.tail, ESM2_TOKENS.num_special) == ((CLS,), (EOS,), 2)
    texts = ["MKT", "acX-J?", ""]
    expected = [["<bos>", "1", *letters, "2", "<eos>"] for letters in ("MKT", "ACXXJX", "")]
    expected = [[TOKENS.index(token) for token in tokens] for tokens in expected]
    assert [ALPHABET.encode(text).tolist() for text in texts] == expected
    characters = np.frombuffer("".join(texts).encode(), np.uint8)
    ids, offsets = ALPHABET.encode_many(characters, np.array([0, 3, 9, 9]))
    assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == expected


@pytest.mark.parametrize("alphabet", [ALPHABET, WIDE], ids=["e1", "wide"])
def test_store_gives_longer_records_and_their_crops(tmp_path, alphabet):
    records = [*random_records(200, longest=30), np.array([CLS, EOS], np.uint8)]
    store = TokenStore(save(tmp_path / "s", records), alphabet)
    assert_holds(store, [longer(record, alphabet) for record in records])


def test_store_reads_ids_that_the_alphabet_lacks_as_x(tmp_path):
    record = ESM2_TOKENS.encode("M.K-XBJ")  # J is <unk> there
    store = TokenStore(save(tmp_path / "s", [record]), ALPHABET)
    ids, _ = store.gather(np.array([0]), np.array([2]), np.array([7]))
    assert "".join(TOKENS[token] for token in ids) == "MXKXXBX"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([5, 6, EOS], "record 1: begins with token id 5, not with ESM-2's <cls>, 0"),
        ([CLS, 6, 7], "record 1: ends with token id 7, not with ESM-2's <eos>, 2"),
        ([CLS], "record 1: has no <cls> and <eos>"),
        ([CLS, 33, EOS], "record 1: token id 33, the model has 0-32"),
    ],
)
def test_store_refuses_records_that_it_cannot_make_longer(tmp_path, record, said):
    path = save(tmp_path / "s", [np.array([CLS, 5, EOS]), np.array(record)])
    store, where = TokenStore(path, ALPHABET), np.array([0, 1])
    with pytest.raises(UserError, match=said):
        store.gather(where, np.zeros(2, np.int64), store.lengths(where))
