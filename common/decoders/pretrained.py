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
from common.layers.model_card import UNKNOWN, Training, write_card


def read_decoder(directory: str, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters as (name, tensor) of a local directory's safetensors, or of a Hub repository's."""
    root, theirs = read_tensors(directory)
    return pieces_from_hf(theirs, config, str(root))


def save_decoder(
    pieces: Iterator[tuple[str, Tensor]],
    config: DecoderConfig,
    directory: Path,
    save_tokenizer: Callable[[Path], None],
    training: Training = UNKNOWN,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` opens offline.

    pieces: Hugging Face's tensors as `pieces_to_hf` gives them; training: for the model card. As
    common.layers.hf_directory.write_directory.
    """
    with torch.device("meta"):
        model = DecoderForCausalLM(config)
        tensors = dict(pieces_to_hf(model.state_dict().__getitem__, config))

    def finish(partial: Path) -> None:
        save_tokenizer(partial)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        write_card(partial, config.architecture, ("text-generation", config.model_type), config, parameters, training)

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    content = Content(config.to_transformers(), config.architecture, shapes, finish)
    write_directory(pieces, content, directory, shard_bytes)
