"""ESM-2's weights between this project's names and Hugging Face's (`EsmForMaskedLM`), lossless in both directions.

Ours fuse query, key and value into one matrix whose rows are interleaved per head, and fold each LayerNorm into the
block that follows it. What a Hub checkpoint has and pretraining does not use (the contact head, the position
embeddings that rotary models ignore) is carried along as `extras`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from common.cli import UserError
from common.models.esm2 import alphabet
from common.models.esm2.config import ESM2_SIZES, Esm2Config
from common.models.esm2.model import PADDED_VOCAB, Esm2ForMaskedLM
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
# Names under which a checkpoint may repeat a tensor that is tied, or keep a constant.
_REDUNDANT = {"lm_head.decoder.weight", "lm_head.decoder.bias", "esm.embeddings.position_ids"}
_POSITIONS = "esm.embeddings.position_embeddings.weight"
_CONTACT = "esm.contact_head.regression"
_ROTARY = "rotary_embeddings.inv_freq"
# transformers 5 saves the layers' norms under TensorFlow's old names (and reads both).
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


def _parts(config: Esm2Config) -> Iterator[tuple[str, list[str]]]:
    """(our name, the tensors that ours is made of: one, or query, key and value), in the order of an export."""
    for ours, theirs in _REST.items():
        yield ours, [theirs]
    layers = range(config.num_hidden_layers)
    for n in layers:
        for ours, theirs in _LAYER.items():
            yield f"encoder.layers.{n}.{ours}", [f"esm.encoder.layer.{n}.{theirs}"]
    for n in layers:
        for kind in ("weight", "bias"):
            qkv = [f"esm.encoder.layer.{n}.attention.self.{x}.{kind}" for x in ("query", "key", "value")]
            yield f"encoder.layers.{n}.self_attention.layernorm_qkv.{kind}", qkv
    for ours, theirs in _VOCAB.items():
        yield ours, [theirs]


def _interleave(parts: list[Tensor], heads: int) -> Tensor:
    """q, k, v, each [H * D, ...] -> [H * 3 * D, ...]."""
    return torch.stack([p.unflatten(0, (heads, -1)) for p in parts], dim=1).flatten(0, 2)


def _deinterleave(fused: Tensor, heads: int) -> list[Tensor]:
    return [p.flatten(0, 1) for p in fused.unflatten(0, (heads, 3, -1)).unbind(1)]


def from_hf(theirs: Mapping[str, Tensor], config: Esm2Config, where: str = "") -> tuple[dict[str, Tensor], dict]:
    """Hugging Face weights -> (our state dict, extras). UserError names a missing or unknown tensor."""
    pieces, extras = pieces_from_hf(theirs, config, where)
    return dict(pieces), extras


def pieces_from_hf(
    theirs: Mapping[str, Tensor], config: Esm2Config, where: str = ""
) -> tuple[Iterator[tuple[str, Tensor]], dict]:
    """The same, one of our tensors at a time: `theirs` may read each when it is asked for.

    UserError for a tensor with NaN or infinity, when it is read.
    """
    # A bare EsmModel checkpoint has no "esm." prefix and no LM head: pretraining cannot continue from it.
    known = {_new_name(k): k for k in theirs if k not in _REDUNDANT and not k.endswith(_ROTARY)}
    with torch.device("meta"):
        expected = to_hf(Esm2ForMaskedLM(config).state_dict(), config)
    tensors = {name: theirs[k] for name, k in known.items()}
    check_tensors(tensors, expected, "EsmForMaskedLM", where, optional=(_POSITIONS, _CONTACT))
    used = {name for _, names in _parts(config) for name in names}
    extras = {name: check_finite(name, theirs[k], where) for name, k in known.items() if name not in used}
    return _pieces_from_hf(lambda name: check_finite(name, theirs[known[name]], where), config), extras


def _pieces_from_hf(get: Callable[[str], Tensor], config: Esm2Config) -> Iterator[tuple[str, Tensor]]:
    for ours, names in _parts(config):
        parts = [get(name) for name in names]
        value = parts[0] if len(parts) == 1 else _interleave(parts, config.num_attention_heads)
        padding = PADDED_VOCAB - len(value) if ours in _VOCAB else 0
        yield ours, torch.cat((value, value.new_zeros(padding, *value.shape[1:]))) if padding else value


def _new_name(name: str) -> str:
    return next((name.removesuffix(old) + new for old, new in _OLD_NAMES.items() if name.endswith(old)), name)


def to_hf(ours: dict[str, Tensor], config: Esm2Config, extras: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Our state dict -> Hugging Face weights, complete enough for `from_pretrained` to load without a warning."""
    return dict(pieces_to_hf(ours.__getitem__, config, extras))


def pieces_to_hf(
    get: Callable[[str], Tensor], config: Esm2Config, extras: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The same, one tensor at a time: `get` is asked for each of our parameters once, always in the same order."""
    extras = dict(extras or {})
    for ours, names in _parts(config):
        value = get(ours)
        if ours in _VOCAB:
            value = value[: alphabet.VOCAB_SIZE]
        parts = [value] if len(names) == 1 else _deinterleave(value, config.num_attention_heads)
        yield from zip(names, (part.contiguous() for part in parts), strict=True)
    # Stock EsmForMaskedLM has these though nothing reads them; if absent, it would draw random ones and warn.
    contacts = config.num_hidden_layers * config.num_attention_heads
    for name, shape in (
        (_POSITIONS, (config.max_position_embeddings, config.hidden_size)),
        (f"{_CONTACT}.weight", (1, contacts)),
        (f"{_CONTACT}.bias", (1,)),
    ):
        yield name, extras.pop(name) if name in extras else torch.zeros(shape, device=value.device)
    yield from extras.items()


def frequencies(config: Esm2Config) -> dict[str, Tensor]:
    """The rotary frequencies that every layer of a Hub checkpoint has: transformers warns if they are missing."""
    dim = config.hidden_size // config.num_attention_heads
    layers = range(config.num_hidden_layers)
    return {
        f"esm.encoder.layer.{n}.attention.self.{_ROTARY}": 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
        for n in layers
    }


logger = logging.getLogger(__name__)
NOT_FITTED = "the contact head is not fitted: `predict_contacts` answers 0.5 for every pair of residues"
FITTED = "the contact head was fitted to these weights on {} protein chains"
KEPT = "the contact head is that of the starting weights, which training leaves as it is"

VOCABULARY_CHARACTERS = 10_000  # read of a vocab.txt at most: ESM-2's has 100


def read_pretrained(directory: str, config: Esm2Config) -> tuple[Iterator[tuple[str, Tensor]], dict]:
    """(our parameters as (name, tensor), extras) of a local directory's safetensors, or of a Hub repository's.

    UserError for another vocabulary than ESM-2's, other tensors than `config` asks for, NaN and infinity.
    """
    root, theirs = read_tensors(directory)
    _check_vocabulary(root / "vocab.txt")
    if "lm_head.decoder.layer_norm_weight" in theirs:
        from extras import nv_esm

        return nv_esm.pieces(theirs, config, str(root)), {}
    return pieces_from_hf(theirs, config, str(root))


def _check_vocabulary(path: Path) -> None:
    """UserError for a vocab.txt with other tokens or another order. None is needed."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        tokens = [line.strip() for line in file.read(VOCABULARY_CHARACTERS).rstrip().split("\n")]
    if tokens != list(alphabet.TOKENS):
        both = zip_longest(tokens, alphabet.TOKENS, fillvalue="nothing")
        number, (theirs, ours) = next((n, pair) for n, pair in enumerate(both) if pair[0] != pair[1])
        raise UserError(
            f"{path}: not ESM-2's vocabulary: token {number} is {theirs[:20]!r}, not {ours!r}: only models of "
            "ESM-2's 33 tokens in their published order can be read"
        )


def save_pretrained(
    pieces: Iterator[tuple[str, Tensor]],
    config: Esm2Config,
    directory: Path,
    training: Training = UNKNOWN,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that stock `EsmForMaskedLM` / `AutoModel` / `AutoTokenizer.from_pretrained` open offline.

    pieces: Hugging Face's tensors as `pieces_to_hf` gives them; written in fp32. training: for the model card.
    The directory appears when it is complete; an existing one is replaced.
    """
    rotary = frequencies(config)
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config)
        expected = to_hf(model.state_dict(), config) | rotary
    has_contacts = False

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal has_contacts
        for name, tensor in pieces:
            has_contacts |= name.startswith(_CONTACT) and bool(tensor.any())
            yield name, tensor

    def finish(partial: Path) -> dict[str, str]:
        contacts = KEPT if has_contacts else NOT_FITTED
        if training.contacts:
            contacts = FITTED.format(training.contacts)
            # Only eager attention returns the maps that `predict_contacts` reads.
            config_file = partial / "config.json"
            content = json.loads(config_file.read_text()) | {"attn_implementation": "eager"}
            config_file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        logger.info("%s: %s", directory.name, contacts)
        write_tokenizer(partial)
        return {"Contacts": f"{contacts[0].upper()}{contacts[1:]}."}

    export = Export(
        config,
        "EsmForMaskedLM",
        tags=("fill-mask", "esm", "protein"),
        expected=expected,
        parameters=count_parameters(model),
        finish=finish,
        training=training,
        published=ESM2_SIZES,
    )
    write_directory(chain(watched(), rotary.items()), export, directory, shard_bytes)


def write_tokenizer(directory: Path) -> None:
    from transformers import EsmTokenizer

    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(alphabet.TOKENS))
    EsmTokenizer(str(vocabulary), model_max_length=1026).save_pretrained(directory)
