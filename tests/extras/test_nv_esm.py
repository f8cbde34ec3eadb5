"""The recipe's format of ESM-2 (nv_esm), both ways, against a conversion written down in numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import EsmForMaskedLM

from common.cli import UserError
from common.models.esm2.config import esm2_config, gelu_of, load_config
from common.models.esm2.convert import read_pretrained
from common.models.esm2.model import Esm2ForMaskedLM
from extras.nv_esm import save
from tests.forked import run_script
from tests.models.reference import reference_model
from tests.training_fixtures import train

LAYERS, HIDDEN, HEADS = 2, 32, 4
LOWEST = -3.4028234663852886e38
# One layer: their name, and that of transformers.
LAYER = {
    "self_attention.layernorm_qkv.layer_norm_{}": "attention.LayerNorm.{}",
    "self_attention.proj.{}": "attention.output.dense.{}",
    "layernorm_mlp.layer_norm_{}": "LayerNorm.{}",
    "layernorm_mlp.fc1_{}": "intermediate.dense.{}",
    "layernorm_mlp.fc2_{}": "output.dense.{}",
}


def to_recipe(stock: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """transformers' tensors -> those of the recipe's model."""
    theirs = {f"lm_head.dense.{kind}": stock[f"lm_head.dense.{kind}"] for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        theirs[f"lm_head.decoder.layer_norm_{kind}"] = stock[f"lm_head.layer_norm.{kind}"]
        theirs[f"{prefix}.encoder.emb_layer_norm_after.{kind}"] = stock[f"esm.encoder.emb_layer_norm_after.{kind}"]
        for n in range(LAYERS):
            ours, layer = f"{prefix}.encoder.layers.{n}.", f"esm.encoder.layer.{n}."
            for name, of_stock in LAYER.items():
                theirs[ours + name.format(kind)] = stock[layer + of_stock.format(kind)]
            parts = [stock[f"{layer}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            size = HIDDEN // HEADS
            rows = [part[h * size : (h + 1) * size] for h in range(HEADS) for part in parts]
            theirs[f"{ours}self_attention.layernorm_qkv.{kind}"] = np.concatenate(rows)
    embedding, bias = np.zeros((64, HIDDEN), np.float32), np.full(64, LOWEST, np.float32)
    embedding[:33], bias[:33] = stock["esm.embeddings.word_embeddings.weight"], stock["lm_head.bias"]
    return theirs | {f"{prefix}.embeddings.word_embeddings.weight": embedding, "lm_head.decoder.bias": bias}


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """A model of transformers with random numbers everywhere."""
    directory = tmp_path_factory.mktemp("stock")
    model = reference_model(esm2_config(LAYERS, HIDDEN, HEADS), seed=3)
    model.save_pretrained(directory)
    return directory


def weights_of(model: EsmForMaskedLM) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def write_recipe(stock: Path, directory: Path, prefix: str = "model", **options) -> Path:
    """A directory as the recipe saves it."""
    directory.mkdir()
    more = {
        "lm_head.decoder._extra_state": np.zeros(3, np.uint8),
        f"{prefix}.encoder.rotary_embeddings.inv_freq": np.ones(4, np.float32),
        f"{prefix}.pooler.dense.bias": np.ones(HIDDEN, np.float32),
    }
    save_file(
        to_recipe(weights_of(EsmForMaskedLM.from_pretrained(stock)), prefix) | more, directory / "model.safetensors"
    )
    config = json.loads((stock / "config.json").read_text())
    config |= {"model_type": "nv_esm", "architectures": ["NVEsmForMaskedLM"], "padded_vocab_size": 64}
    config |= {"qkv_weight_interleaved": True, "fuse_qkv_params": True, "encoder_activation": "gelu"}
    config |= {"attn_input_format": "thd", "auto_map": {"AutoModel": "esm_nv.NVEsmModel"}} | options
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def ours(directory: Path) -> Esm2ForMaskedLM:
    config = load_config(str(directory))
    pieces, _ = read_pretrained(str(directory), config)
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config)
    model.load_state_dict(dict(pieces), assign=True)
    return model


@pytest.mark.parametrize("prefix", ["model", "esm"])
def test_recipe_model_has_the_weights_of_its_stock_model(stock, tmp_path, prefix):
    recipe = ours(write_recipe(stock, tmp_path / "recipe", prefix))
    assert gelu_of(recipe.config) == "tanh"  # Transformer Engine's
    plain = ours(stock)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(recipe.state_dict()[name], tensor), name


def test_recipe_model_is_written_as_the_recipe_writes_it(stock, tmp_path):
    done = run_script("extras.nv_esm", stock, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "the recipe's layers its tanh approximation" in done.stderr
    expected = to_recipe(weights_of(EsmForMaskedLM.from_pretrained(stock)), "model")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(written[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("nv_esm", ["NVEsmForMaskedLM"])
    assert (config["padded_vocab_size"], config["vocab_size"], config["hidden_size"]) == (64, 33, HIDDEN)
    assert "auto_map" not in config
    again = ours(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in ours(stock).state_dict().items())
    save(str(tmp_path / "out"), tmp_path / "twice")
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_recipe_model_starts_a_run(stock, dataset, tmp_path):
    recipe = write_recipe(stock, tmp_path / "recipe")
    said = train(dataset, tmp_path / "out", model_name_or_path=recipe, max_steps=1, learning_rate=0)
    assert "GELU: the tanh approximation (as the weights were trained)" in said
    final_model = tmp_path / "out" / "final_model"
    exported, given = (weights_of(EsmForMaskedLM.from_pretrained(path)) for path in (final_model, stock))
    same = [name for name in given if "contact_head" not in name]
    assert all(np.array_equal(exported[name], given[name]) for name in same)
    assert "nv_esm" not in (final_model / "config.json").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"qkv_weight_interleaved": False}, "qkv_weight_interleaved is False: of nv_esm models only True is read"),
        ({"encoder_activation": "swiglu"}, "encoder_activation is 'swiglu'"),
        ({"padded_vocab_size": 33}, "padded_vocab_size is 33"),
        ({"hidden_dropout_prob": 0.1}, "hidden_dropout_prob is 0.1"),
        ({"hidden_size": 64}, "model.safetensors|asks for"),
    ],
)
def test_recipe_model_of_another_layout_is_refused(stock, tmp_path, options, said):
    write_recipe(stock, tmp_path / "recipe", **options)
    with pytest.raises(UserError, match=said):
        ours(tmp_path / "recipe")


@pytest.mark.parametrize("change", ["missing", "unknown", "nan"])
def test_recipe_model_with_damaged_tensors_is_refused(stock, tmp_path, change):
    path = write_recipe(stock, tmp_path / "recipe") / "model.safetensors"
    tensors, name = load_file(path), "model.encoder.layers.1.layernorm_mlp.fc1_bias"
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors["model.encoder.layers.7.proj.bias"] = tensors[name]
    else:
        tensors[name] = np.full_like(tensors[name], math.nan)
    save_file(tensors, path)
    with pytest.raises(UserError, match="it has no tensor|unknown tensor|holds NaN"):
        ours(tmp_path / "recipe")
