"""transformers' model with a run's weights, or those of a directory: what downstream evaluations compute with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.cli import UserError
from common.models.esm2.convert import ADAPTER
from common.models.family import encoder_family, family_of


class Tensors(NamedTuple):
    """In the place of transformers' model, of a family that it has no class for."""

    config: Any
    tensors: dict[str, Tensor]
    device: torch.device


def stock_model(config: Any, pieces: Iterable[tuple[str, Tensor]], device: torch.device) -> Any:
    """In fp32 and eval mode, with eager attention, which alone returns attention maps; or `Tensors`.

    pieces: tensors in the names of an export, which need host memory for all of them.
    """
    family = family_of(config.model_type)
    if not family.stock:
        return Tensors(config, {name: tensor.detach().cpu() for name, tensor in pieces}, device)
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading weights
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in pieces}
    tensors |= family.adapter.constants(config)
    stock = config.to_transformers()
    stock.dtype = torch.float32
    kind = getattr(transformers, f"{family.stock}ForMaskedLM")
    model: Any = kind.from_pretrained(None, config=stock, state_dict=tensors, attn_implementation="eager")
    return model.to(device).eval()


def read_stock_model(name: str, device: torch.device) -> Any:
    """transformers' ESM-2 of a directory or a name on the Hub, in fp32. UserError for another model, and for missing,
    unknown or misshapen tensors."""
    check_esm2(name)
    config = config_for_proteins(name)
    ours, extras = ADAPTER.read(name, config)
    return stock_model(config, ADAPTER.to_hf(dict(ours).__getitem__, config, extras), device)


def config_for_proteins(name: str) -> Any:
    """The configuration of a model. UserError for one of a declared alphabet, which reads no plain proteins."""
    family = encoder_family(name)
    config = family.load_config(name)
    if alphabet := getattr(family.tokens_of(config), "declared", ""):
        raise UserError(f"{name}: its alphabet is {alphabet[:60]}: this reads proteins by ESM-2's letters alone")
    return config


def check_esm2(name: str) -> None:
    """UserError for a model of another family."""
    if encoder_family(name) is not family_of("esm"):
        raise UserError(f"{name}: only ESM-2 has a contact head in transformers: give one of its models")
