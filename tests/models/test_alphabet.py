"""common/models/esm2/alphabet.py against the order of the published vocab.txt and a per-character reading."""

import numpy as np

from common.models.esm2.alphabet import BYTE_TO_ID, EOS, MASK, PAD, TOKENS, UNK, VOCAB_SIZE, encode, encode_many

PUBLISHED = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"


def test_alphabet_order_equals_transformers():
    assert " ".join(TOKENS) == PUBLISHED
    assert (VOCAB_SIZE, TOKENS[PAD], TOKENS[EOS], TOKENS[UNK], TOKENS[MASK]) == (
        33,
        "<pad>",
        "<eos>",
        "<unk>",
        "<mask>",
    )


def test_alphabet_encodes_every_byte():
    for byte in range(256):
        character = chr(byte).upper() if byte < 128 else "none"
        expected = TOKENS.index(character) if character in TOKENS else UNK
        assert BYTE_TO_ID[byte] == expected, chr(byte)


def test_encode_maps_unknown_letters_and_adds_special_tokens():
    assert encode("LaGx-*").tolist() == [0, 4, 5, 6, 24, 30, UNK, 2]
    assert "".join(TOKENS[i] for i in encode("MKVlaG-.XBUZO")[1:-1]) == "MKVLAG-.XBUZO"
    assert encode("M*1é")[2:-1].tolist() == [UNK] * 3


def test_encode_many_equals_encode_one():
    generator = np.random.default_rng(0)
    sequences = [bytes(generator.integers(1, 128, size=n, dtype=np.uint8)) for n in (1, 5, 0, 300, 2, 0)]
    offsets = np.cumsum([3, *map(len, sequences)])  # a slice of a longer buffer
    ids, out_offsets = encode_many(np.frombuffer(b"AAA" + b"".join(sequences) + b"CC", np.uint8), offsets)
    assert ids.dtype == np.uint8
    assert out_offsets[0] == 0
    for i, sequence in enumerate(sequences):
        assert ids[out_offsets[i] : out_offsets[i + 1]].tolist() == encode(sequence).tolist()
    assert encode_many(np.empty(0, np.uint8), np.zeros(1, int))[0].shape == (0,)
