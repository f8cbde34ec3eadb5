"""ESM-2's weights between this project's names and Hugging Face's (`EsmForMaskedLM`), lossless in both directions.

Ours fuse query, key and value into one matrix whose rows are interleaved per head, and fold each LayerNorm into the
block that follows it. What a Hub checkpoint has and pretraining does not use (the contact head, the position
embeddings that rotary models ignore) is carried along as `extras`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.hooks import extra
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import ESM2_SIZES, Esm2Config, check_vocabulary, read_vocabulary
from common.models.esm2.model import Esm2ForMaskedLM, padded
from common.models.layers.hf_directory import read_tensors
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter

if TYPE_CHECKING:
    from common.models.layers.model_card import Training

logger = logging.getLogger(__name__)

# One layer: ours -> theirs, without the fused query, key and value.
_LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight": "attention.LayerNorm.weight",
    "self_attention.layernorm_qkv.layer_norm_bias": "attention.LayerNorm.bias",
    "self_attention.proj.weight": "attention.output.dense.weight",
    "self_attention.proj.bias": "attention.output.dense.bias",
    "layernorm_mlp.layer_norm_weight": "LayerNorm.weight",
    "layernorm_mlp.layer_norm_bias": "LayerNorm.bias",
    "layernorm_mlp.fc1_weight": "intermediate.dense.weight",
    "layernorm_mlp.fc1_bias": "intermediate.dense.bias",
    "layernorm_mlp.fc2_weight": "output.dense.weight",
    "layernorm_mlp.fc2_bias": "output.dense.bias",
}
_REST = {
    "encoder.emb_layer_norm_after.weight": "esm.encoder.emb_layer_norm_after.weight",
    "encoder.emb_layer_norm_after.bias": "esm.encoder.emb_layer_norm_after.bias",
    "lm_head.dense.weight": "lm_head.dense.weight",
    "lm_head.dense.bias": "lm_head.dense.bias",
    "lm_head.layer_norm.weight": "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias": "lm_head.layer_norm.bias",
}
_VOCAB = {"embeddings.word_embeddings.weight": "esm.embeddings.word_embeddings.weight", "lm_head.bias": "lm_head.bias"}
_POSITIONS = "esm.embeddings.position_embeddings.weight"
_CONTACT = "esm.contact_head.regression"
_ROTARY = "rotary_embeddings.inv_freq"
# Of the layers' norms in files of transformers 5, which reads both; never written here: docs/compatibility.md.
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
_EAGER = '`predict_contacts`, which needs `attn_implementation="eager"`'  # alone it returns attention maps
NOT_FITTED = f"the contact head is not fitted: {_EAGER}, answers 0.5 for every pair of residues"
FITTED = "the contact head was fitted to these weights on {} protein chains"
CONTACT_CHAINS = "contact_head_fitted_on"  # in config.json, where transformers keeps it: hashes of these chains
KEPT = f"the contact head is that of the starting weights, which training leaves as it is: {_EAGER}, uses it"


class Esm2Adapter(StateDictAdapter):
    """A bare EsmModel checkpoint has no "esm." prefix and no LM head, and is refused."""

    model = Esm2ForMaskedLM
    published = ESM2_SIZES
    optional = (_POSITIONS, _CONTACT)
    redundant = (_ROTARY, "lm_head.decoder.weight", "lm_head.decoder.bias", "esm.embeddings.position_ids")

    def parts(self, config: Esm2Config) -> Iterator[tuple[str, tuple[str, ...]]]:
        for ours, theirs in _REST.items():
            yield ours, (theirs,)
        layers = range(config.num_hidden_layers)
        for n in layers:
            for ours, theirs in _LAYER.items():
                yield f"encoder.layers.{n}.{ours}", (f"esm.encoder.layer.{n}.{theirs}",)
        for n in layers:
            for kind in ("weight", "bias"):
                qkv = tuple(f"esm.encoder.layer.{n}.attention.self.{x}.{kind}" for x in ("query", "key", "value"))
                yield f"encoder.layers.{n}.self_attention.layernorm_qkv.{kind}", qkv
        for ours, theirs in _VOCAB.items():
            yield ours, (theirs,)

    def split(self, name: str, tensor: Tensor, parts: int, config: Esm2Config) -> list[Tensor]:
        if name in _VOCAB:
            return [tensor[: config.num_tokens]]
        if parts == 1:
            return [tensor]
        by_head = tensor.unflatten(0, (config.num_attention_heads, 3, -1))  # [H, 3, D, ...]
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(self, name: str, tensors: list[Tensor], config: Esm2Config) -> Tensor:
        first = tensors[0]
        if name in _VOCAB:
            return torch.cat((first, first.new_zeros(padded(len(first)) - len(first), *first.shape[1:])))
        if len(tensors) == 1:
            return first
        return torch.stack([part.unflatten(0, (config.num_attention_heads, -1)) for part in tensors], 1).flatten(0, 2)

    def current_name(self, name: str, config: Esm2Config) -> str | None:
        old = next((old for old in _OLD_NAMES if name.endswith(old)), None)
        return super().current_name(name.removesuffix(old) + _OLD_NAMES[old] if old else name, config)

    def to_hf(
        self, get: Callable[[str], Tensor], config: Esm2Config, extras: Mapping[str, Tensor] | None = None
    ) -> Pieces:
        """Complete enough for `from_pretrained` to load without a warning."""
        for name, tensor in super().to_hf(get, config):
            yield name, tensor
        # Stock EsmForMaskedLM has these though nothing reads them; if absent, it would draw random ones and warn.
        contacts = config.num_hidden_layers * config.num_attention_heads
        shapes = {
            _POSITIONS: (config.max_position_embeddings, config.hidden_size),
            f"{_CONTACT}.weight": (1, contacts),
            f"{_CONTACT}.bias": (1,),
        }
        unused = {name: torch.zeros(shape, device=tensor.device) for name, shape in shapes.items()}
        yield from (unused | dict(extras or {})).items()

    def read_published(self, name: str, config: Esm2Config) -> tuple[Pieces, dict[str, Tensor]]:
        """(our parameters, tensors that only the export needs) of published weights, a directory or a name on the Hub.

        UserError for missing, unknown or misshapen tensors, and for another vocabulary than its configuration's.
        """
        root, theirs = read_tensors(name)
        path = root / "vocab.txt"
        check_vocabulary(read_vocabulary(path), config, path)
        if "lm_head.decoder.layer_norm_weight" in theirs:
            return extra().recipe_pieces(theirs, config, str(root)), {}
        return self.from_hf(theirs, config, str(root))

    def constants(self, config: Esm2Config) -> dict[str, Tensor]:
        """The rotary frequencies that every layer of a Hub checkpoint has: transformers warns if they are missing."""
        dim = config.hidden_size // config.num_attention_heads
        frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
        layers = range(config.num_hidden_layers)
        return {f"esm.encoder.layer.{n}.attention.self.{_ROTARY}": frequencies.clone() for n in layers}

    def finish(self, directory: Path, training: Training, tokenizer: Any) -> Mapping[str, str]:
        """Write the tokenizer's files; say in the log and the model card whether the contact head is fitted."""
        contacts = KEPT if read_tensors(str(directory))[1][f"{_CONTACT}.weight"].any() else NOT_FITTED
        if training.contacts:
            contacts = FITTED.format(len(training.contacts))
            config_file = directory / "config.json"
            head = {"attn_implementation": "eager", CONTACT_CHAINS: list(training.contacts)}
            content = json.loads(config_file.read_text()) | head
            config_file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        logger.info("%s: %s", directory.stem, contacts)
        self.write_tokenizer(directory)
        return {"Contacts": f"{contacts[0].upper()}{contacts[1:]}."}

    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        from transformers import EsmTokenizer

        config = directory / "config.json"
        tokens = Esm2Config.read(config).tokens if config.is_file() else ESM2_TOKENS
        vocabulary = directory / "vocab.txt"
        vocabulary.write_text("\n".join(tokens.letters))
        ids = {"cls": tokens.begin, "eos": tokens.end, "pad": tokens.pad, "unk": tokens.unknown, "mask": tokens.mask}
        names = {f"{name}_token": tokens.letters[token] for name, token in ids.items()}
        EsmTokenizer(str(vocabulary), model_max_length=1026, **names).save_pretrained(directory)


ADAPTER = Esm2Adapter()
