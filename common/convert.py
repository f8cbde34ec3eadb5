"""Weights between this project's names and Hugging Face's (`EsmForMaskedLM`), without loss in either direction.

Ours fuse query, key and value into one matrix whose rows are interleaved per head, and fold each LayerNorm into the
block that follows it. What a Hub checkpoint has and pretraining does not use (the contact head, the position
embeddings that rotary models leave idle) is carried along untouched as `extras`.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import EsmConfig

from common import alphabet
from common.cli import UserError
from common.esm2 import PADDED_VOCAB, Esm2ForMaskedLM

# one layer: ours -> theirs. QKV is handled apart.
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


def _names(config: EsmConfig) -> dict[str, str]:
    names = dict(_REST)
    for n in range(config.num_hidden_layers):
        names |= {f"encoder.layers.{n}.{a}": f"esm.encoder.layer.{n}.{b}" for a, b in _LAYER.items()}
    return names


def _qkv_names(layer: int, kind: str) -> list[str]:
    return [f"esm.encoder.layer.{layer}.attention.self.{x}.{kind}" for x in ("query", "key", "value")]


def _interleave(parts: list[Tensor], heads: int) -> Tensor:
    """q, k, v, each [H * D, ...] -> [H * 3 * D, ...]."""
    return torch.stack([p.unflatten(0, (heads, -1)) for p in parts], dim=1).flatten(0, 2)


def _deinterleave(fused: Tensor, heads: int) -> list[Tensor]:
    return [p.flatten(0, 1) for p in fused.unflatten(0, (heads, 3, -1)).unbind(1)]


def from_hf(theirs: dict[str, Tensor], config: EsmConfig, where: str = "") -> tuple[dict[str, Tensor], dict]:
    """Hugging Face weights -> (our state dict, extras). UserError names a missing or unknown tensor."""
    # A bare EsmModel checkpoint has no "esm." prefix and no LM head: not something to go on pretraining from.
    left = {_new_name(k): v for k, v in theirs.items() if k not in _REDUNDANT and not k.endswith(_ROTARY)}
    _check_shapes(left, config, where)
    ours = {a: left.pop(b) for a, b in _names(config).items()}
    for n in range(config.num_hidden_layers):
        for kind in ("weight", "bias"):
            fused = _interleave([left.pop(name) for name in _qkv_names(n, kind)], config.num_attention_heads)
            ours[f"encoder.layers.{n}.self_attention.layernorm_qkv.{kind}"] = fused
    for a, b in _VOCAB.items():
        value = left.pop(b)
        ours[a] = torch.cat((value, value.new_zeros(PADDED_VOCAB - len(value), *value.shape[1:])))
    return ours, left


def _new_name(name: str) -> str:
    return next((name.removesuffix(old) + new for old, new in _OLD_NAMES.items() if name.endswith(old)), name)


def _check_shapes(theirs: dict[str, Tensor], config: EsmConfig, where: str) -> None:
    """UserError unless `theirs` are the tensors of an EsmForMaskedLM of this configuration; extras may be absent."""
    with torch.device("meta"):
        expected = to_hf(Esm2ForMaskedLM(config).state_dict(), config)
    for name, tensor in expected.items():
        if name not in theirs:
            if name == _POSITIONS or name.startswith(_CONTACT):
                continue
            raise UserError(f"{where}: not an EsmForMaskedLM checkpoint: it has no tensor {name}")
        if theirs[name].shape != tensor.shape:
            raise UserError(
                f"{where}: {name} is {list(theirs[name].shape)}, its config.json asks for {list(tensor.shape)}"
            )
    for name in theirs:
        if name not in expected:
            raise UserError(f"{where}: not an ESM-2 checkpoint: unknown tensor {name}")


def to_hf(ours: dict[str, Tensor], config: EsmConfig, extras: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Our state dict -> Hugging Face weights, complete enough for `from_pretrained` to load without a warning."""
    theirs = {b: ours[a] for a, b in _names(config).items()}
    for n in range(config.num_hidden_layers):
        for kind in ("weight", "bias"):
            fused = ours[f"encoder.layers.{n}.self_attention.layernorm_qkv.{kind}"]
            theirs |= zip(_qkv_names(n, kind), _deinterleave(fused, config.num_attention_heads), strict=True)
    theirs |= {b: ours[a][: alphabet.VOCAB_SIZE] for a, b in _VOCAB.items()}
    # Stock EsmForMaskedLM owns these even where nothing reads them; absent, it would draw random ones and warn.
    device = {"device": ours["lm_head.bias"].device}
    theirs[_POSITIONS] = torch.zeros(config.max_position_embeddings, config.hidden_size, **device)
    contacts = config.num_hidden_layers * config.num_attention_heads
    theirs[f"{_CONTACT}.weight"] = torch.zeros(1, contacts, **device)
    theirs[f"{_CONTACT}.bias"] = torch.zeros(1, **device)
    return {k: v.contiguous() for k, v in (theirs | (extras or {})).items()}


def load_weights(directory: str, config: EsmConfig) -> tuple[dict[str, Tensor], dict]:
    """Read a local directory's safetensors (one file or an index of shards), or fetch a Hub repository's."""
    root = Path(directory)
    if not root.is_dir():
        from huggingface_hub import snapshot_download

        try:
            root = Path(snapshot_download(directory, allow_patterns=["*.safetensors", "*.json"]))
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(
                f"{directory}: weights not found, neither there nor on the Hub ({reason}); "
                "to start from random weights use --config_name"
            ) from error
    theirs: dict[str, Tensor] = {}
    for path in _weight_files(root):
        try:
            theirs |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read: {error}; cut short? Copy or download it again") from error
    return from_hf(theirs, config, str(root))


def _weight_files(root: Path) -> list[Path]:
    index = root / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not an index of safetensors shards") from error
    for name in names:
        if not (root / name).is_file():
            other = next(root.glob("pytorch_model*.bin"), None)
            hint = f"; {other.name} there is pickled: convert it with transformers' save_pretrained" if other else ""
            raise UserError(f"{root / name}: no such file; weights are read from safetensors only{hint}")
    return [root / name for name in names]


def save_pretrained(ours: dict[str, Tensor], config: EsmConfig, extras: dict, directory: Path) -> None:
    """Write a directory that stock `EsmForMaskedLM` / `AutoModel` / `AutoTokenizer.from_pretrained` open offline."""
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = copy.deepcopy(config)  # as loaded it may name another class, and the precision it was stored in
    config.architectures, config.dtype = ["EsmForMaskedLM"], "float32"
    config.save_pretrained(partial)
    theirs = {k: v.float() for k, v in (to_hf(ours, config, extras) | _frequencies(config)).items()}
    save_file(theirs, partial / "model.safetensors", {"format": "pt"})
    write_tokenizer(partial)
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def _frequencies(config: EsmConfig) -> dict[str, Tensor]:
    """The rotary frequencies that every layer of a Hub checkpoint holds: transformers warns where they are missing."""
    dim = config.hidden_size // config.num_attention_heads
    layers = range(config.num_hidden_layers)
    return {
        f"esm.encoder.layer.{n}.attention.self.{_ROTARY}": 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
        for n in layers
    }


def write_tokenizer(directory: Path) -> None:
    from transformers import EsmTokenizer

    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(alphabet.TOKENS))
    EsmTokenizer(str(vocabulary), model_max_length=1026).save_pretrained(directory)
