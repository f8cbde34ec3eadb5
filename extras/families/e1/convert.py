"""E1's weights between this project's names and its authors', lossless in both directions.

Ours fuse query, key and value into one matrix, head by head, and the two of SwiGLU that go in; they fold each RMSNorm
into the block that follows it, and pad the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.files.runs import resolve_directory
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter
from extras.families.e1.alphabet import ALPHABET
from extras.families.e1.config import E1_SIZES, E1Config
from extras.families.e1.model import DECODER, EMBEDDING, PADDED_VOCAB, E1ForMaskedLM

logger = logging.getLogger(__name__)

QKV = "self_attention.layernorm_qkv.weight"
_ATTENTION, _FFN = "norm_attn_norm", "ffn.mlp"
# One layer: ours -> theirs.
_LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight": (f"{_ATTENTION}.input_layernorm.weight",),
    QKV: tuple(f"{_ATTENTION}.self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.proj.weight": (f"{_ATTENTION}.self_attn.o_proj.weight",),
    "layernorm_mlp.layer_norm_weight": (f"{_ATTENTION}.post_attention_layernorm.weight",),
    "layernorm_mlp.fc1_weight": (f"{_FFN}.w1.weight", f"{_FFN}.w3.weight"),
    "layernorm_mlp.fc2_weight": (f"{_FFN}.w2.weight",),
}
_REST = {
    "encoder.emb_layer_norm_after.weight": "model.norm.weight",
    "lm_head.dense.weight": "mlm_head.0.weight",
    "lm_head.dense.bias": "mlm_head.0.bias",
    "lm_head.layer_norm.weight": "mlm_head.2.weight",
    "lm_head.layer_norm.bias": "mlm_head.2.bias",
    f"{DECODER}.weight": "mlm_head.3.weight",
    f"{DECODER}.bias": "mlm_head.3.bias",
}
# At each launch, as the licence of the published weights asks; it covers weights that were trained from them.
NOTICE = "Profluent-E1: %s are weights of Profluent, or were trained from them, under their licence (Profluent-AI/E1)"


class E1Adapter(StateDictAdapter):
    model = E1ForMaskedLM
    published = E1_SIZES
    opened_by = "its authors' package (Profluent-AI/E1), and this project's `--model_name_or_path`"

    def parts(self, config: E1Config) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield EMBEDDING, ("model.embed_tokens.weight",)
        yield "encoder.embed_number.weight", ("model.embed_seq_id.weight",)
        for n in range(config.num_hidden_layers):
            for ours, theirs in _LAYER.items():
                yield f"encoder.layers.{n}.{ours}", tuple(f"model.layers.{n}.{name}" for name in theirs)
        yield from ((ours, (theirs,)) for ours, theirs in _REST.items())

    def split(self, name: str, tensor: Tensor, parts: int, config: E1Config) -> list[Tensor]:
        if name.startswith((EMBEDDING, DECODER)):
            return [tensor[: ALPHABET.vocab_size]]
        if not name.endswith(QKV):
            return list(tensor.chunk(parts))
        by_head = tensor.unflatten(0, (config.num_attention_heads, 3, -1))  # [H, 3, D, hidden]
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(self, name: str, tensors: list[Tensor], config: E1Config) -> Tensor:
        first = tensors[0]
        if name.startswith((EMBEDDING, DECODER)):
            rows = PADDED_VOCAB - len(first)
            return F.pad(first, (0, 0, 0, rows) if first.dim() == 2 else (0, rows))
        if not name.endswith(QKV):
            return super().join(name, tensors, config)
        return torch.stack([part.unflatten(0, (config.num_attention_heads, -1)) for part in tensors], 1).flatten(0, 2)

    def read(self, name: str, config: E1Config) -> tuple[Pieces, dict[str, Tensor]]:
        config.profluent_e1 |= not resolve_directory(name).is_dir()  # a name on the Hub
        if config.profluent_e1:
            logger.info(NOTICE, name)
        return super().read(name, config)

    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        """tokenizer.json, one token a character, between `<bos> 1` and `2 <eos>`: transformers' AutoTokenizer opens
        it."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        letters = ALPHABET.letters
        word_level = Tokenizer(models.WordLevel({token: n for n, token in enumerate(letters)}, unk_token="X"))
        word_level.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        head, tail = ([letters[token] for token in ends] for ends in (ALPHABET.head, ALPHABET.tail))
        word_level.post_processor = processors.TemplateProcessing(
            single=" ".join((*head, "$A", *tail)), special_tokens=[(each, letters.index(each)) for each in head + tail]
        )
        names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")} | {"mask_token": "?"}
        PreTrainedTokenizerFast(tokenizer_object=word_level, **names, model_max_length=8192).save_pretrained(directory)


ADAPTER = E1Adapter()
