"""The recipe's ESM-2 (`model_type` nv_esm: nvidia/esm2_*, and what its training saves): read it, write it.

python -m extras.nv_esm MODEL OUT

MODEL: a directory for transformers' from_pretrained (final_model/, a checkpoint of --save_hf), a Hub name, or a step_N
of the recipe. OUT: a new or empty directory for its NVEsmForMaskedLM. Reading needs no command:
--model_name_or_path takes such a directory.

Its layers have Transformer Engine's names, as here, and its vocabulary is padded to the same 64 rows. It has no
contact head. Its code is not copied: the class opens OUT, not trust_remote_code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.cli import UserError, run
from common.models.esm2.alphabet import VOCAB_SIZE
from common.models.esm2.config import HIDDEN_ACT, Esm2Config, gelu_of, load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import PADDED_VOCAB, Esm2ForMaskedLM
from common.models.layers.hf_directory import check_finite, check_tensors
from common.models.layers.initialise import count_parameters
from common.models.layers.model_card import Export
from common.models.layers.write_directory import write_directory
from extras.command_line import positional
from extras.prepare.output_directory import check_free

logger = logging.getLogger(__name__)

MODEL_TYPE = "nv_esm"
# Of its config.json: what the weights' layout depends on, with the only value that is read, and what it does not.
LAYOUT = {"qkv_weight_interleaved": True, "fuse_qkv_params": True, "encoder_activation": "gelu"}
LAYOUT |= {"padded_vocab_size": PADDED_VOCAB}
COMPUTING = {"attn_input_format": "bshd", "attn_mask_type": "padding", "add_pooling_layer": False}
COMPUTING |= {"micro_batch_size": None, "max_seq_length": None}
PREFIXES = ("model.", "esm.")  # of the newer and the older version
HEAD = {  # theirs: ours
    "lm_head.decoder.layer_norm_weight": "lm_head.layer_norm.weight",
    "lm_head.decoder.layer_norm_bias": "lm_head.layer_norm.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
TIED = "lm_head.decoder.weight"
UNUSED = ("_extra_state", "inv_freq", "pooler.dense.weight", "pooler.dense.bias", TIED)


def stock_config(content: dict[str, Any]) -> dict[str, Any]:
    """The config.json of an EsmForMaskedLM like this nv_esm. ValueError for another layout of the weights.

    Transformer Engine's `gelu` is the tanh approximation, whatever `hidden_act` says.
    """
    for name, expected in LAYOUT.items():
        if content.get(name, expected) != expected:
            raise ValueError(f"{name} is {content[name]!r}: of nv_esm models only {expected!r} is read")
    fields = {name: value for name, value in content.items() if name not in LAYOUT | COMPUTING}
    return fields | {"model_type": "esm", "architectures": ["EsmForMaskedLM"], "hidden_act": HIDDEN_ACT["tanh"]}


def pieces(theirs: Mapping[str, Tensor], config: Esm2Config, where: str) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of each parameter. UserError for missing, unknown and misshapen tensors, and for NaN."""
    tensors = {_our_name(name): tensor for name, tensor in theirs.items() if not name.endswith(UNUSED)}
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config)
    check_tensors(tensors, model.state_dict(), _NvConfig.architecture, where)
    for name in model.state_dict():
        tensor = check_finite(name, tensors[name], where)
        if name in model.padded_vocab:  # their biases of the rows without a token are the lowest number
            tensor = torch.cat((tensor[:VOCAB_SIZE], torch.zeros_like(tensor[VOCAB_SIZE:])))
        yield name, tensor


def _our_name(theirs: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if theirs.startswith(prefix)), "")
    return HEAD.get(theirs, theirs.removeprefix(prefix))


class _NvConfig(Esm2Config):
    """`to_transformers` is the recipe's configuration."""

    architecture: ClassVar[str] = "NVEsmForMaskedLM"

    def to_transformers(self):
        from transformers import EsmConfig

        class NVEsmConfig(EsmConfig):
            model_type = MODEL_TYPE

        return NVEsmConfig.from_dict(
            self.content() | LAYOUT | COMPUTING | {"model_type": MODEL_TYPE, "hidden_act": "gelu"}
        )


def save(source: str, directory: Path) -> None:
    """Write the model `source` in the recipe's format."""
    config = load_config(source)
    if config.alphabet is not None:
        raise UserError(f"{source}: of the alphabet {config.tokens.name}, and the recipe has ESM-2's alone")
    if gelu_of(config) == "exact":
        logger.warning("%s computes the exact GELU, the recipe's layers its tanh approximation", source)
    ours, _ = ADAPTER.read(source, config)
    theirs = {ours: name for name, ours in HEAD.items()}
    lowest = torch.finfo(torch.float32).min

    def renamed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in ours:
            if name == "lm_head.bias":
                tensor = torch.cat((tensor[:VOCAB_SIZE], torch.full_like(tensor[VOCAB_SIZE:], lowest)))
            yield name_of(name), tensor

    def name_of(name: str) -> str:
        return theirs.get(name, name if name.startswith("lm_head.") else PREFIXES[0] + name)

    with torch.device("meta"):
        model = Esm2ForMaskedLM(config)
    export = Export(
        _NvConfig(**vars(config)),
        tags=("fill-mask", "esm", "protein"),
        expected={name_of(name): tensor for name, tensor in model.state_dict().items()},
        parameters=count_parameters(model),
        finish=ADAPTER.write_tokenizer,
    )
    write_directory(renamed(), export, directory)


def main() -> None:
    source, target = positional(__doc__, "python -m extras.nv_esm MODEL OUT", 2)
    directory = Path(target).resolve()
    check_free(directory)
    save(source, directory)
    logger.info("%s as a model of the recipe: %s", source, directory)


if __name__ == "__main__":
    run(main)
