"""Protein decoders' tokens: E1's 34, then `<span_1>` and so on, which stand for residues to fill in.

A protein is `<bos> 1 residues 2 <eos>`, and reversed `<bos> 2 residues backwards 1 <eos>`: 1 is the N-terminus, 2 the
C-terminus, so that the first of them says the direction. As ProGen3 (Bhatnagar et al. 2025).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from common.cli import UserError
from extras.families.e1.alphabet import ALPHABET

RESIDUES = "residues"  # value of --tokenizer
SPANS = 30  # 64 tokens in all
RESIDUE_TOKENS = replace(
    ALPHABET,
    vocab_size=ALPHABET.vocab_size + SPANS,
    letters=(*ALPHABET.letters, *(f"<span_{number}>" for number in range(1, SPANS + 1))),
)
BOS_FILL, EOS_SPAN = map(ALPHABET.letters.index, ("<bos_glm>", "<eos_span>"))
FIRST_SPAN = ALPHABET.vocab_size
TURNED = np.arange(RESIDUE_TOKENS.vocab_size, dtype=np.uint8)  # of each token, what it is to one who reads backwards
TURNED[[RESIDUE_TOKENS.begin, RESIDUE_TOKENS.end]] = RESIDUE_TOKENS.end, RESIDUE_TOKENS.begin


def encode_direction(sequence: bytes, reverse: bool) -> np.ndarray:
    """A protein from `<bos>` to `<eos>` as uint8 ids, shape [len(sequence) + 4]; backwards if `reverse`.

    A prompt is the same without its last two tokens.
    """
    ids = RESIDUE_TOKENS.encode(sequence)
    return reversed_protein(ids) if reverse else ids


def reversed_protein(ids: np.ndarray) -> np.ndarray:
    """A protein, or a crop of one, read from its end: `<bos> 1 M K 2 <eos>` is `<bos> 2 K M 1 <eos>` then, and
    `<bos> 1 M` is `M 1 <eos>`."""
    return TURNED[ids[::-1]]


class ResidueTokenizer:
    """The tokens of proteins, as runs and exports know a tokenizer (extras.families.text.tokenizers)."""

    name = identity = RESIDUES
    vocab_size = RESIDUE_TOKENS.vocab_size
    eos_id = RESIDUE_TOKENS.end
    dtype = np.dtype(np.uint8)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise UserError(
            f"--tokenizer {RESIDUES}: is of proteins, and this is text: prepare proteins by 1.tokenize_uniref_csv.py"
        )

    def save(self, directory: Path) -> None:
        write_residue_tokenizer(directory)


def write_residue_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer opens.

    Text is what follows `<bos>`: `1MKV` is a prompt forwards, `2VKM` one backwards, `1MKV2<eos>` a whole protein.
    `<bos>` is added, `<eos>` is not: a prompt must not carry it. Lower case counts as upper case, a character without
    a token as X.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = RESIDUE_TOKENS.letters
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=letters[RESIDUE_TOKENS.unknown]))
    upper = [normalizers.Replace(letter.lower(), letter) for letter in ascii_uppercase]
    tokenizer.normalizer = normalizers.Sequence(upper)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    bos, eos, pad, mask = (letters[getattr(RESIDUE_TOKENS, name)] for name in ("begin", "end", "pad", "mask"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        mask_token=mask,
        additional_special_tokens=[letters[n] for n in (BOS_FILL, EOS_SPAN, *range(FIRST_SPAN, len(letters)))],
    ).save_pretrained(directory)


def reads_residues(directory: Path) -> bool:
    """Whether the tokenizer.json of a model's directory is `write_residue_tokenizer`'s, by its tokens."""
    try:
        vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return vocabulary == {letter: number for number, letter in enumerate(RESIDUE_TOKENS.letters)}
