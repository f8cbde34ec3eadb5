"""What an alphabet declares: ids, masks, text; and what is refused, in one line each."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.data.collators import mask_tokens
from common.data.counter_rng import MASKING
from common.hooks import extra
from extras.families.alphabets.codon import STOPS
from extras.families.alphabets.declared import declaration, declare, in_order
from extras.prepare.sources.alphabet_texts import AlphabetCleaner
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.records import BadRecords
from tests.data.test_masking import GOLDEN, splitmix

SAPROT: Alphabet = extra().alphabet("saprot", "")
CODON: Alphabet = extra().alphabet("codon", "")
SPECIAL = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>"]
NUCLEOTIDES = {"name": "dna", "tokens": [*SPECIAL, *"ACGT"], "ambiguous": "N", "synonyms": {"U": "T"}}


def written(path, content):
    path.write_text(yaml.safe_dump(content) if isinstance(content, dict) else content)
    return str(path)


def test_saprot_tokens_are_a_residue_and_a_structure():
    tokens = [a + s for a in "ACDEFGHIKLMNPQRSTVWY#" for s in "pynwrqhgdlvtmfsaeikc#"]
    assert SAPROT.letters == (*SPECIAL, *tokens)
    assert SAPROT.encode("MdEvKp#dA#").tolist() == [
        0,
        *(5 + tokens.index(t) for t in ("Md", "Ev", "Kp", "#d", "A#")),
        2,
    ]
    assert SAPROT.dtype == np.uint16
    ids, offsets = SAPROT.encode_many(np.frombuffer(b"MdEvKp", np.uint8), np.array([0, 4, 6]))
    assert (ids.tolist(), offsets.tolist()) == ([*SAPROT.encode("MdEv"), *SAPROT.encode("Kp")], [0, 4, 7])


def test_codons_are_in_the_order_of_acgt():
    place = {letter: n for n, letter in enumerate("ACGT")}
    numbers = [16 * place[a] + 4 * place[b] + place[c] for a, b, c in ("ATG", "TGA", "CCC")]
    assert CODON.encode("augTGAccc").tolist() == [0, *(5 + n for n in numbers), 2]
    assert CODON.encode("ANG").tolist() == [0, 3, 2]
    assert (CODON.vocab_size, CODON.dtype) == (69, np.uint8)
    assert [chr(CODON.amino_acids[CODON.encode(codon)[1]]) for codon in ("ATG", "TTA", "CTG", "AGC")] == [*"MLLS"]


@pytest.mark.parametrize("alphabet", [SAPROT, CODON])
def test_masks_of_alphabets_equal_a_hand_loop(alphabet):
    generator = np.random.default_rng(5)
    ids = np.concatenate(([0], generator.integers(5, alphabet.vocab_size, 4000), [2])).astype(alphabet.dtype)
    got = mask_tokens(ids, np.array([7]), np.array([0]), np.array([len(ids)]), alphabet, 1, 2)
    key = 0
    for part in (1, 2, MASKING):
        key = splitmix((key + GOLDEN) ^ splitmix(part + GOLDEN))
    stops = {5 + "ACGT".index(a) * 16 + "ACGT".index(b) * 4 + "ACGT".index(c) for a, b, c in STOPS}
    maskable = [n for n in range(5, 69) if n not in stops] if alphabet is CODON else range(5, 425)
    shown, labels = [], []
    for position, token in enumerate(ids.tolist()):
        number = splitmix(splitmix(key + 7 * GOLDEN) + position * GOLDEN)
        if token not in maskable or number / 2**64 >= 0.15:
            shown.append(token)
            labels.append(-100)
            continue
        fate = splitmix(number ^ 0x5851F42D4C957F2D)
        which, at_random = (fate >> 32) / 2**32, maskable[(fate % 2**32) * len(maskable) // 2**32]
        masked = 4 if alphabet is CODON else 425 + (token - 5) % 21
        shown.append(masked if which < 0.8 else at_random if which < 0.9 else token)
        labels.append(token)
    assert (got[0].tolist(), got[1].tolist()) == (shown, labels)
    assert got[0].dtype == alphabet.dtype


def test_declaration_makes_the_same_alphabet_again():
    assert declare(declaration(SAPROT), json.loads(SAPROT.declared)) == SAPROT
    assert extra().alphabet(json.loads(CODON.declared), "") == CODON
    turned = (*SAPROT.letters[:5], *SAPROT.letters[:4:-1])
    other = in_order(SAPROT, turned, "")
    assert extra().alphabet(json.loads(other.declared), "") == other != SAPROT
    token = turned.index("Md")
    assert other.letters[other.masked_ids[token]] == "#d"
    assert other.text_of(other.encode("MdEv")[1:-1]) == "MdEv"
    assert extra().alphabet(list(turned), "vocab.txt") == other


def test_alphabet_of_a_yaml_file(tmp_path):
    found = extra().alphabet(written(tmp_path / "dna.yaml", NUCLEOTIDES), "")
    assert (found.name, found.letters, found.encode("acguN").tolist()) == (
        "dna",
        (*SPECIAL, *"ACGT"),
        [0, 5, 6, 7, 8, 3, 2],
    )
    assert extra().alphabet(json.loads(found.declared), "") == found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("tokens: [", "cannot be read: "),
        ("[]", "not an alphabet: it has no keys name and tokens"),
        ({"letters": []}, "unknown key 'letters': choose of ambiguous, amino_acids"),
        ({"name": 5}, "name is 5: expected a text"),
        ({"tokens": [*SPECIAL, "A", True]}, "tokens is True: expected a list of texts, in quotes"),
        ({"tokens": [*SPECIAL, "A", "A"]}, "tokens: 'A' is there twice"),
        ({"tokens": ["<pad>", "A"]}, "begin: '<cls>' is not one of the tokens"),
        ({"tokens": [*SPECIAL, "A", "CC"]}, "CC has 2 characters and A 1"),
        ({"tokens": ["A", *SPECIAL, "C"]}, "the special token <cls> lies among the others"),
        ({"maskable": ["<cls>"]}, "maskable: <cls> is a special token"),
        ({"maskable": []}, "maskable and replacements: at least one token each"),
        ({"masked_as": {"A": "B"}}, "masked_as: 'B' is not one of the tokens"),
        ({"tokens": [*SPECIAL, "a"]}, "a is lower case: write tokens in upper case, or ignore_case: false"),
        ({"synonyms": {"A": "C"}}, "synonyms: 'A': 'C': one new character"),
        ({"ambiguous": "NA"}, "ambiguous: A is a character of tokens"),
        ({"amino_acids": {"A": "Ala"}}, "amino_acids: 'Ala': one capital letter"),
        ({"name": "esm2"}, "name: esm2 is ESM-2's own"),
        ({"name": "saprot"}, "name: saprot is built in"),
    ],
)
def test_yaml_file_that_declares_no_alphabet_is_refused(tmp_path, changed, said):
    path = written(tmp_path / "own.yaml", changed if isinstance(changed, str) else NUCLEOTIDES | changed)
    with pytest.raises(UserError) as refused:
        extra().alphabet(path, "")
    assert str(refused.value).startswith(f"--alphabet {path}: {said}")
    assert "\n" not in str(refused.value)


RECORDS = [
    (CODON, "ATGAA", "has 5 characters, no multiple of 3: out of frame"),
    (CODON, "ATGTAAATG", "has TAA as token 2, which may only be the last"),
    (CODON, "ATGAAX", "has 'X', which is not in the alphabet codon"),
    (CODON, "ATGNAA", "has 1 tokens of 2 with a letter of"),
    (SAPROT, "MdE", "has 3 characters, no multiple of 2: out of frame"),
    (SAPROT, "MdvE", "has vE as token 2, which is none of the alphabet saprot"),
    (SAPROT, "MdEz", "has 'z', which is not in the alphabet saprot"),
]


@pytest.mark.parametrize(("alphabet", "text", "said"), RECORDS)
def test_record_outside_the_alphabet_is_refused_or_skipped(tmp_path, alphabet, text, said):
    good = "ATGAAATAA" if alphabet is CODON else "MdEv#p"
    path = tmp_path / "in.fasta"
    path.write_text(f">good\n{good}\n>bad\n{text}\n>more\n{good}\n")
    with pytest.raises(UserError, match="record bad " + said.partition("(")[0]):
        list(read_fasta(path, cleaner=AlphabetCleaner(str(path), alphabet)))
    skipped = BadRecords("skip")
    read = list(read_fasta(path, cleaner=AlphabetCleaner(str(path), alphabet, skipped)))
    assert [name for name, _ in read] == [b"good", b"more"]
    assert skipped.count == 1


def test_line_that_begins_with_a_hash_is_text_where_it_is_a_letter(tmp_path):
    path = tmp_path / "in.fasta"
    path.write_text(">a\nMd\n#vEp\n>b\n#p\n")
    assert list(read_fasta(path, cleaner=AlphabetCleaner("", SAPROT))) == [(b"a", b"Md#vEp"), (b"b", b"#p")]
