"""ESM-2's weights from a directory of `transformers`, and a trained ESM-2 as one (common.layers.hf_directory)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from common.esm2 import convert
from common.esm2.config import Esm2Config
from common.esm2.model import Esm2ForMaskedLM
from common.files import alphabet
from common.layers.hf_directory import SHARD_BYTES, Content, read_tensors, write_directory


def read_pretrained(directory: str, config: Esm2Config) -> tuple[Iterator[tuple[str, Tensor]], dict]:
    """(our parameters as (name, tensor), extras) of a local directory's safetensors, or of a Hub repository's."""
    root, theirs = read_tensors(directory)
    return convert.pieces_from_hf(theirs, config, str(root))


def save_pretrained(
    pieces: Iterator[tuple[str, Tensor]], config: Esm2Config, directory: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a directory that stock `EsmForMaskedLM` / `AutoModel` / `AutoTokenizer.from_pretrained` open offline.

    pieces: Hugging Face's tensors as `convert.pieces_to_hf` gives them; written in fp32. The directory appears when it
    is complete, or not at all; one that is there already is replaced.
    """
    frequencies = convert.frequencies(config)
    with torch.device("meta"):
        tensors = convert.to_hf(Esm2ForMaskedLM(config).state_dict(), config) | frequencies
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    content = Content(config.to_transformers(), "EsmForMaskedLM", shapes, write_tokenizer)
    write_directory(chain(pieces, frequencies.items()), content, directory, shard_bytes)


def write_tokenizer(directory: Path) -> None:
    from transformers import EsmTokenizer

    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(alphabet.TOKENS))
    EsmTokenizer(str(vocabulary), model_max_length=1026).save_pretrained(directory)
