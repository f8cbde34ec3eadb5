"""A decoder's weights from a directory of `transformers`, and a trained one as such a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.decoders.config import DecoderConfig
from common.decoders.convert import pieces_from_hf, pieces_to_hf
from common.decoders.model import DecoderForCausalLM
from common.layers.hf_directory import SHARD_BYTES, Content, read_tensors, write_directory


def read_decoder(directory: str, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters as (name, tensor) of a local directory's safetensors, or of a Hub repository's."""
    root, theirs = read_tensors(directory)
    return pieces_from_hf(theirs, config, str(root))


def save_decoder(
    pieces: Iterator[tuple[str, Tensor]],
    config: DecoderConfig,
    directory: Path,
    save_tokenizer: Callable[[Path], None],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` opens offline.

    pieces: Hugging Face's tensors as `pieces_to_hf` gives them. As common.layers.hf_directory.write_directory.
    """
    with torch.device("meta"):
        tensors = dict(pieces_to_hf(DecoderForCausalLM(config).state_dict().__getitem__, config))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    content = Content(config.to_transformers(), config.architecture, shapes, save_tokenizer)
    write_directory(pieces, content, directory, shard_bytes)
