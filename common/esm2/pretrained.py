"""ESM-2's weights from a directory of `transformers`, and a trained ESM-2 as one (common.layers.hf_directory)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from common.cli import UserError
from common.esm2 import convert
from common.esm2.config import Esm2Config
from common.esm2.model import Esm2ForMaskedLM, count_parameters
from common.esm2.presets import ESM2_SIZES
from common.files import alphabet
from common.layers.hf_directory import SHARD_BYTES, Content, read_tensors, write_directory
from common.layers.model_card import UNKNOWN, Training, write_card

logger = logging.getLogger(__name__)
NOT_FITTED = "the contact head is not fitted: `predict_contacts` answers 0.5 for every pair of residues"
KEPT = "the contact head is that of the starting weights, which training leaves as it is"

VOCABULARY_CHARACTERS = 10_000  # at most to be read of a vocab.txt: ESM-2's has 100

VOCABULARY_CHARACTERS = 10_000  # at most to be read of a vocab.txt: ESM-2's has 100


def read_pretrained(directory: str, config: Esm2Config) -> tuple[Iterator[tuple[str, Tensor]], dict]:
    """(our parameters as (name, tensor), extras) of a local directory's safetensors, or of a Hub repository's.

    UserError for another vocabulary than ESM-2's, other tensors than `config` asks for, NaN and infinity.
    """
    root, theirs = read_tensors(directory)
    _check_vocabulary(root / "vocab.txt")
    return convert.pieces_from_hf(theirs, config, str(root))


def _check_vocabulary(path: Path) -> None:
    """UserError for a vocab.txt with other tokens, or in another order. Without one the weights are ESM-2's."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        tokens = [line.strip() for line in file.read(VOCABULARY_CHARACTERS).rstrip().split("\n")]
    if tokens != list(alphabet.TOKENS):
        both = zip_longest(tokens, alphabet.TOKENS, fillvalue="nothing")
        number, (theirs, ours) = next((n, pair) for n, pair in enumerate(both) if pair[0] != pair[1])
        raise UserError(
            f"{path}: not ESM-2's vocabulary: token {number} is {theirs[:20]!r}, not {ours!r}: only models of "
            "ESM-2's 33 tokens in their published order can be read"
        )


def save_pretrained(
    pieces: Iterator[tuple[str, Tensor]],
    config: Esm2Config,
    directory: Path,
    training: Training = UNKNOWN,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that stock `EsmForMaskedLM` / `AutoModel` / `AutoTokenizer.from_pretrained` open offline.

    pieces: Hugging Face's tensors as `convert.pieces_to_hf` gives them; written in fp32. training: for the model card.
    The directory appears when it is complete, or not at all; one that is there already is replaced.
    """
    frequencies = convert.frequencies(config)
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config)
        tensors = convert.to_hf(model.state_dict(), config) | frequencies
    has_contacts = False

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal has_contacts
        for name, tensor in pieces:
            has_contacts |= convert.is_contact_head(name) and bool(tensor.any())
            yield name, tensor

    def finish(partial: Path) -> None:
        contacts = KEPT if has_contacts else NOT_FITTED
        logger.info("%s: %s", directory.name, contacts)
        write_tokenizer(partial)
        notes = {"Contacts": f"{contacts[0].upper()}{contacts[1:]}."}
        tags = ("fill-mask", "esm", "protein")
        parameters = count_parameters(model)
        write_card(partial, "EsmForMaskedLM", tags, config, parameters, training, ESM2_SIZES, notes)

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    content = Content(config.to_transformers(), "EsmForMaskedLM", shapes, finish)
    write_directory(chain(watched(), frequencies.items()), content, directory, shard_bytes)


def write_tokenizer(directory: Path) -> None:
    from transformers import EsmTokenizer

    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(alphabet.TOKENS))
    EsmTokenizer(str(vocabulary), model_max_length=1026).save_pretrained(directory)
