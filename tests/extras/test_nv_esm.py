"""The recipe's format of ESM-2 (nv_esm), both ways, against a conversion written down in numpy."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections import OrderedDict
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from transformers import EsmForMaskedLM

from common.cli import UserError
from common.models.esm2.config import esm2_config, gelu_of, load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.hf_directory import model_hash, read_tensors
from extras.nv_esm import save
from tests.forked import run_script
from tests.models.reference import reference_model
from tests.training.hostile_pickles import NO_PART, Evil
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


def recipe_tensors(stock: Path, prefix: str = "model") -> dict[str, np.ndarray]:
    """All that the recipe's model has."""
    more = {
        "lm_head.decoder._extra_state": np.zeros(3, np.uint8),
        f"{prefix}.encoder.rotary_embeddings.inv_freq": np.ones(4, np.float32),
        f"{prefix}.pooler.dense.bias": np.ones(HIDDEN, np.float32),
    }
    return to_recipe(weights_of(EsmForMaskedLM.from_pretrained(stock)), prefix) | more


def write_recipe(stock: Path, directory: Path, prefix: str = "model", **options) -> Path:
    """A directory as the recipe saves it."""
    directory.mkdir()
    save_file(recipe_tensors(stock, prefix), directory / "model.safetensors")
    config = json.loads((stock / "config.json").read_text())
    config |= {"model_type": "nv_esm", "architectures": ["NVEsmForMaskedLM"], "padded_vocab_size": 64}
    config |= {"qkv_weight_interleaved": True, "fuse_qkv_params": True, "encoder_activation": "gelu"}
    config |= {"attn_input_format": "thd", "auto_map": {"AutoModel": "esm_nv.NVEsmModel"}} | options
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def ours(directory: Path) -> Esm2ForMaskedLM:
    config = load_config(str(directory))
    pieces, _ = ADAPTER.read(str(directory), config)
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


@pytest.mark.parametrize("padding", ["as converted", "as initialised"])
def test_recipe_model_round_trip_is_bit_for_bit(stock, tmp_path, padding):
    recipe = write_recipe(stock, tmp_path / "recipe")
    expected = to_recipe(weights_of(EsmForMaskedLM.from_pretrained(stock)), "model")
    if padding == "as initialised":  # rows that no token reads, and no loss: they come back as the converter's
        given = load_file(recipe / "model.safetensors")
        for name in ("model.embeddings.word_embeddings.weight", "lm_head.decoder.bias"):
            given[name][33:] = np.random.default_rng(0).normal(size=given[name][33:].shape)
        save_file(given, recipe / "model.safetensors")
    model = ours(recipe)
    get = model.state_dict().__getitem__
    ADAPTER.save(ADAPTER.to_hf(get, model.config), model.config, tmp_path / "ours")
    save(str(tmp_path / "ours"), tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == expected.keys()
    assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in expected.items())


def write_step(stock: Path, run: Path, script: str) -> Path:
    """A training checkpoint as the recipe's script saves it."""
    weights = {name: torch.from_numpy(tensor) for name, tensor in recipe_tensors(stock).items()}
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.98))
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict()
    directory = run / "step_3"
    directory.mkdir(parents=True)
    if script == "train_ddp":
        model: dict = OrderedDict((f"_orig_mod.module.{name}", tensor) for name, tensor in weights.items())
        setattr(model, "_metadata", OrderedDict({"": {"version": 1}}))  # noqa: B010  # as Module.state_dict
        saved = {"model": model, "optimizer": state, "scheduler": scheduler, "step": 3, "epoch": 0}
        torch.save(saved, directory / "checkpoint.pt")
        return directory
    if script == "train_fsdp2":
        content: dict = {"app": {"model": weights, "optim": state, "scheduler": scheduler, "step": 3}}
    else:
        wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
        content = {"model": wrapped, "optimizer": state, "metadata": {"step": 3}}
    dcp.save(content, checkpoint_id=directory, no_dist=True)
    return directory


@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp2", "train_mfsdp"])
def test_recipe_training_checkpoint_has_its_weights(stock, tmp_path, script):
    step = write_step(stock, tmp_path / script, script)
    with pytest.raises(UserError, match="step_3: a checkpoint of the recipe, which saves no config.json"):
        load_config(str(step))
    write_recipe(stock, step.parent / "final_model")
    found, expected = ours(step).state_dict(), ours(stock).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    before = model_hash(str(step))
    (step / "config.json").write_text((stock / "config.json").read_text())
    assert model_hash(str(step)) != before
    assert gelu_of(load_config(str(step))) == "exact"  # its own config.json comes first


@pytest.mark.parametrize("name", ["checkpoint.pt", ".metadata"])
def test_recipe_training_checkpoint_runs_nothing(tmp_path, name):
    content = {"model": {}, "optimizer": Evil(str(tmp_path / "made"))}
    if name == ".metadata":
        (tmp_path / name).write_bytes(pickle.dumps(content))
        (tmp_path / "__0_0.distcp").write_bytes(bytes(1 << 12))
    else:
        torch.save(content, tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: refused: .*{NO_PART}"):
        read_tensors(str(tmp_path))
    assert not (tmp_path / "made").exists()


def test_recipe_training_checkpoint_takes_no_more_than_its_bytes(tmp_path):
    """Sixty-four tensors over the same bytes of the file."""
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {f"lm_head.{n}": torch.ones(4096) for n in range(64)}}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    numbers = [name for name in entries if "/data/" in name]
    with zipfile.ZipFile(path, "w") as archive:
        for name in entries.keys() - set(numbers[1:]):
            archive.writestr(name, entries[name])
        for name in numbers[1:]:
            twin = copy(archive.getinfo(numbers[0]))
            twin.filename = name
            archive.filelist.append(twin)
    with pytest.raises(UserError, match=r"checkpoint.pt: refused: its tensors have [\d,]+ bytes, its file"):
        read_tensors(str(tmp_path))


def test_recipe_model_starts_a_run(stock, dataset, tmp_path):
    recipe = write_recipe(stock, tmp_path / "recipe")
    said = train(dataset, tmp_path / "out", model_name_or_path=recipe, max_steps=1, learning_rate=0)
    assert "GELU: the tanh approximation (as the weights were trained)" in said
    final_model = tmp_path / "out" / "final_model"
    exported, given = (weights_of(EsmForMaskedLM.from_pretrained(path)) for path in (final_model, stock))
    same = [name for name in given if "contact_head" not in name]
    assert all(np.array_equal(exported[name], given[name]) for name in same)
    assert "nv_esm" not in (final_model / "config.json").read_text()
    back = run_script("extras.export", tmp_path / "out", tmp_path / "back", "--format", "nv_esm")
    assert back.returncode == 0, back.stderr
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(written[name], tensor) for name, tensor in to_recipe(given, "model").items())
    usage = run_script("extras.export", tmp_path / "out", tmp_path / "other", "--format", "onnx")
    assert (usage.returncode, usage.stderr) == (
        2,
        "error: usage: python -m extras.export CHECKPOINT OUT [--format hf|nv_esm]\n",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"qkv_weight_interleaved": False}, "qkv_weight_interleaved is False: of nv_esm models only True is read"),
        ({"encoder_activation": "swiglu"}, "encoder_activation is 'swiglu'"),
        ({"padded_vocab_size": 33}, "padded_vocab_size is 33"),
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
