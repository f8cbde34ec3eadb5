"""AMPLIFY's weights between this project's names and its authors', lossless in both directions.

Ours fuse query, key and value into one matrix, head by head, fold each RMSNorm into the block that follows it, and
pad the vocabulary. Rows of queries and keys are permuted within a head, as theirs rotate neighbours
(extras.amplify.layers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.layers.hf_directory import (
    SHARD_BYTES,
    UNKNOWN,
    Export,
    Training,
    check_finite,
    check_tensors,
    read_tensors,
    write_directory,
)
from common.models.layers.initialise import count_parameters
from extras.amplify.alphabet import ALPHABET
from extras.amplify.config import AMPLIFY_SIZES, AmplifyConfig
from extras.amplify.model import DECODER, EMBEDDING, PADDED_VOCAB, AmplifyForMaskedLM

ARCHITECTURE = "AMPLIFY"
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
_REDUNDANT = ("freqs_cis",)  # what a checkpoint may keep of constants, by the ends of names


def _parts(config: AmplifyConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(our name, their names) of every parameter, in the order of an export."""
    yield EMBEDDING, ("encoder.weight",)
    for n in range(config.num_hidden_layers):
        for ours, theirs in _LAYER.items():
            yield f"encoder.layers.{n}.{ours}", tuple(f"transformer_encoder.{n}.{name}" for name in theirs)
    yield "encoder.emb_layer_norm_after.weight", ("layer_norm_2.weight",)
    yield from ((f"{DECODER}.{kind}", (f"decoder.{kind}",)) for kind in ("weight", "bias"))


def _to_theirs(name: str, tensor: Tensor, config: AmplifyConfig) -> list[Tensor]:
    if name.startswith((EMBEDDING, DECODER)):
        return [tensor[: ALPHABET.vocab_size].contiguous()]
    if not name.endswith(QKV):
        return [tensor.contiguous()]
    by_head = tensor.unflatten(0, (config.num_attention_heads, 3, 2, -1))  # [H, 3, halves, D/2, hidden]
    query, key, value = by_head.unbind(1)
    return [part.flatten(0, 2).contiguous() for part in (query.transpose(1, 2), key.transpose(1, 2), value)]


def _to_ours(name: str, tensors: list[Tensor], config: AmplifyConfig) -> Tensor:
    first = tensors[0]
    if name.startswith((EMBEDDING, DECODER)):
        rows = PADDED_VOCAB - len(first)
        return F.pad(first, (0, 0, 0, rows) if first.dim() == 2 else (0, rows))
    if not name.endswith(QKV):
        return first
    query, key = (part.unflatten(0, (config.num_attention_heads, -1, 2)).transpose(1, 2) for part in tensors[:2])
    value = tensors[2].unflatten(0, (config.num_attention_heads, 2, -1))
    return torch.stack((query, key, value), 1).flatten(0, 3)


def pieces_to_theirs(get: Callable[[str], Tensor], config: AmplifyConfig) -> Iterator[tuple[str, Tensor]]:
    """Theirs, one tensor at a time: `get` is asked for each of our parameters once, always in the same order."""
    for ours, names in _parts(config):
        yield from zip(names, _to_theirs(ours, get(ours), config), strict=True)


def pieces_to_ours(
    theirs: Mapping[str, Tensor], config: AmplifyConfig, where: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor), one at a time, in fp32. UserError unless `theirs` are such a model's tensors, and finite."""
    tensors = {name: tensor for name, tensor in theirs.items() if not name.endswith(_REDUNDANT)}
    check_tensors(tensors, _expected(config), ARCHITECTURE, where)
    return (
        (ours, _to_ours(ours, [check_finite(name, theirs[name], where).float() for name in names], config))
        for ours, names in _parts(config)
    )


def read_pretrained(directory: str, config: AmplifyConfig) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
    """(our parameters as (name, tensor), {}) of a local directory's safetensors, or of a Hub repository's."""
    root, theirs = read_tensors(directory)
    return pieces_to_ours(theirs, config, str(root)), {}


def save_pretrained(
    pieces: Iterator[tuple[str, Tensor]],
    config: AmplifyConfig,
    directory: Path,
    training: Training = UNKNOWN,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory of AMPLIFY's config.json, weights and tokenizer, in its authors' names.

    pieces: as `pieces_to_theirs` gives them; training: for the model card.
    """
    with torch.device("meta"):
        parameters = count_parameters(AmplifyForMaskedLM(config))
    export = Export(
        config,
        ARCHITECTURE,
        tags=("fill-mask", "amplify", "protein"),
        expected=_expected(config),
        parameters=parameters,
        finish=write_tokenizer,
        training=training,
        published=AMPLIFY_SIZES,
        opened_by="its authors' package (chandar-lab/AMPLIFY), and this project's `--model_name_or_path`",
    )
    write_directory(pieces, export, directory, shard_bytes)


def _expected(config: AmplifyConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(pieces_to_theirs(AmplifyForMaskedLM(config).state_dict().__getitem__, config))


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, one token a character, between `<bos>` and `<eos>`: transformers' AutoTokenizer opens it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = ALPHABET.letters
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    ends = [("<bos>", ALPHABET.begin), ("<eos>", ALPHABET.end)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask", "bos", "eos")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=2048).save_pretrained(directory)
