"""common/models/layers/hf_directory.py: a model's identity, and which weights are refused; of both families."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from common.models.esm2.config import esm2_config, load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import build_model
from common.models.layers.hf_directory import check_finite, model_hash
from extras.families.decoders.config import load_decoder_config
from extras.families.decoders.family import FAMILY as DECODERS


def write_esm2(directory: Path, seed: int = 1, **how) -> Path:
    config = esm2_config(1, 16, 2)
    parameters = dict(build_model(config, seed=seed).named_parameters())
    ADAPTER.save(ADAPTER.to_hf(lambda name: parameters[name].detach(), config, {}), config, directory, **how)
    return directory


@pytest.fixture
def esm2(tmp_path) -> Path:
    return write_esm2(tmp_path / "model")


def change(path: Path, name: str, value: float) -> None:
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})


def test_model_hash_follows_the_content_alone(esm2, tmp_path):
    first = model_hash(str(esm2))
    copy = shutil.copytree(esm2, tmp_path / "copy", copy_function=shutil.copyfile)
    (copy / "README.md").write_text("about it")
    assert model_hash(str(copy)) == first
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        other = shutil.copytree(esm2, tmp_path / f"without the old {name}")
        content, stat = (other / name).read_bytes(), (other / name).stat()
        (other / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(other / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert model_hash(str(other)) != first, name


def test_model_hash_covers_every_shard(tmp_path):
    directory = write_esm2(tmp_path / "model", shard_bytes=5000)
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    first = model_hash(str(directory))
    change(shards[1], next(iter(load_file(shards[1]))), 7.0)
    assert model_hash(str(directory)) != first
    shards[2].unlink()
    with pytest.raises(UserError, match=f"{shards[2].name}: no such file"):
        model_hash(str(directory))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["esm.encoder.layer.0.LayerNorm.weight", "esm.contact_head.regression.bias"])
def test_model_with_nonfinite_weights_is_refused(esm2, name, value):
    change(esm2 / "model.safetensors", name, value)
    with pytest.raises(UserError, match=f"{esm2}: tensor {name} holds NaN or infinity"):
        dict(ADAPTER.read(str(esm2), load_config(str(esm2)))[0])


def test_decoder_with_nonfinite_weights_is_refused(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    read = load_decoder_config(str(tmp_path))
    dict(DECODERS.adapter.read(str(tmp_path), read)[0])
    change(tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight", math.nan)
    with pytest.raises(UserError, match="tensor model.layers.0.mlp.up_proj.weight holds NaN or infinity"):
        dict(DECODERS.adapter.read(str(tmp_path), read)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_check_finite_knows_all_types_of_weights(dtype):
    tensor = torch.linspace(-1, 1, 100).to(dtype)
    assert check_finite("w", tensor, "here") is tensor
    check_finite("w", torch.empty(0, dtype=dtype), "here")
    check_finite("w", torch.arange(3), "here")
    tensor[50] = math.nan
    with pytest.raises(UserError, match="here: tensor w holds NaN or infinity"):
        check_finite("w", tensor, "here")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (sorted(TOKENS), "token 0 is '-', not '<cls>'"),
        ([*TOKENS[:4], "A", "L", *TOKENS[6:]], "token 4 is 'A', not 'L'"),
        (TOKENS[:-1], "token 32 is 'nothing', not '<mask>'"),
        ([*TOKENS, "J"], "token 33 is 'J', not 'nothing'"),
    ],
)
def test_model_with_other_vocabulary_is_refused(esm2, tokens, said):
    config = load_config(str(esm2))
    (esm2 / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    ADAPTER.read(str(esm2), config)
    (esm2 / "vocab.txt").write_text("\n".join(tokens))
    with pytest.raises(UserError, match=f"vocab.txt: not ESM-2's vocabulary: {said}"):
        ADAPTER.read(str(esm2), config)
    (esm2 / "vocab.txt").unlink()
    ADAPTER.read(str(esm2), config)


def test_write_directory_flushes_before_it_renames(tmp_path, monkeypatch):
    flushed, fsync, rename = set(), os.fsync, os.rename

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check(source, target) -> None:
        assert {path.stat().st_ino for path in Path(source).rglob("*")} <= flushed
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", check)
    write_esm2(tmp_path / "model", shard_bytes=5000)
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "model", *(tmp_path / "model").iterdir())} <= flushed


def test_adapter_is_refused_as_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="; an adapter: predict.py --model takes finetune.py"):
        model_hash(str(tmp_path))
