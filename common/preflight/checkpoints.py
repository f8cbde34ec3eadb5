"""Whether there is room for a run's checkpoints: found out before the run, not by its third save."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from common.decoders.model import DecoderForCausalLM
from common.decoders.presets import PRESETS, load_decoder_config
from common.esm2.model import Esm2ForMaskedLM, count_parameters
from common.esm2.presets import ESM2_SIZES, load_config
from common.outputs.checkpoint_files import NAME

BYTES_A_PARAMETER = 12  # weights and two moments in fp32


def bytes_needed(model: str, limit: int) -> int | None:
    """What `limit` checkpoints of a model take (0: two, at least) and the next, written before the oldest goes.

    None for a model of another name: its directory, or the Hub, would have to be asked.
    """
    module: type[nn.Module]
    if model in PRESETS:
        config, module = load_decoder_config(model), DecoderForCausalLM
    elif model in ESM2_SIZES:
        config, module = load_config(model), Esm2ForMaskedLM
    else:
        return None
    with torch.device("meta"):
        parameters = count_parameters(module(config))
    return BYTES_A_PARAMETER * parameters * ((limit or 2) + 1)


def bytes_there(output_dir: Path) -> int:
    """Of the checkpoints that a run has there already, which make way for newer ones."""
    return sum(
        file.stat().st_size
        for directory in output_dir.glob("checkpoint-*")
        if NAME.fullmatch(directory.name)
        for file in directory.rglob("*")
        if file.is_file()
    )
