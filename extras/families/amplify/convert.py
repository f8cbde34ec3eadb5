"""AMPLIFY's weights between this project's names and its authors', lossless in both directions.

Ours fuse query, key and value into one matrix, head by head, fold each RMSNorm into the block that follows it, and
pad the vocabulary. Rows of queries and keys are permuted within a head, as theirs rotate neighbours
(extras.families.amplify.layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.layers.state_dict_adapter import StateDictAdapter
from extras.families.amplify.alphabet import ALPHABET
from extras.families.amplify.config import AMPLIFY_SIZES, AmplifyConfig
from extras.families.amplify.model import DECODER, EMBEDDING, PADDED_VOCAB, AmplifyForMaskedLM

QKV = "self_attention.layernorm_qkv.weight"
# One layer: ours -> theirs.
_LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight": ("attention_norm.weight",),
    QKV: ("q.weight", "k.weight", "v.weight"),
    "self_attention.proj.weight": ("wo.weight",),
    "layernorm_mlp.layer_norm_weight": ("ffn_norm.weight",),
    "layernorm_mlp.fc1_weight": ("ffn.w12.weight",),
    "layernorm_mlp.fc2_weight": ("ffn.w3.weight",),
}


class AmplifyAdapter(StateDictAdapter):
    model = AmplifyForMaskedLM
    published = AMPLIFY_SIZES
    redundant = ("freqs_cis",)
    opened_by = "its authors' package (chandar-lab/AMPLIFY), and this project's `--model_name_or_path`"

    def parts(self, config: AmplifyConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield EMBEDDING, ("encoder.weight",)
        for n in range(config.num_hidden_layers):
            for ours, theirs in _LAYER.items():
                yield f"encoder.layers.{n}.{ours}", tuple(f"transformer_encoder.{n}.{name}" for name in theirs)
        yield "encoder.emb_layer_norm_after.weight", ("layer_norm_2.weight",)
        yield from ((f"{DECODER}.{kind}", (f"decoder.{kind}",)) for kind in ("weight", "bias"))

    def split(self, name: str, tensor: Tensor, parts: int, config: AmplifyConfig) -> list[Tensor]:
        if name.startswith((EMBEDDING, DECODER)):
            return [tensor[: ALPHABET.vocab_size]]
        if not name.endswith(QKV):
            return [tensor]
        by_head = tensor.unflatten(0, (config.num_attention_heads, 3, 2, -1))  # [H, 3, halves, D/2, hidden]
        query, key, value = by_head.unbind(1)
        return [part.flatten(0, 2) for part in (query.transpose(1, 2), key.transpose(1, 2), value)]

    def join(self, name: str, tensors: list[Tensor], config: AmplifyConfig) -> Tensor:
        first = tensors[0]
        if name.startswith((EMBEDDING, DECODER)):
            rows = PADDED_VOCAB - len(first)
            return F.pad(first, (0, 0, 0, rows) if first.dim() == 2 else (0, rows))
        if not name.endswith(QKV):
            return first
        query, key = (part.unflatten(0, (config.num_attention_heads, -1, 2)).transpose(1, 2) for part in tensors[:2])
        value = tensors[2].unflatten(0, (config.num_attention_heads, 2, -1))
        return torch.stack((query, key, value), 1).flatten(0, 3)

    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        """tokenizer.json, one token a character, between `<bos>` and `<eos>`: transformers' AutoTokenizer opens it."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        letters = ALPHABET.letters
        word_level = Tokenizer(models.WordLevel({token: n for n, token in enumerate(letters)}, unk_token="<unk>"))
        word_level.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        ends = [("<bos>", ALPHABET.begin), ("<eos>", ALPHABET.end)]
        word_level.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
        names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask", "bos", "eos")}
        PreTrainedTokenizerFast(tokenizer_object=word_level, **names, model_max_length=2048).save_pretrained(directory)


ADAPTER = AmplifyAdapter()
