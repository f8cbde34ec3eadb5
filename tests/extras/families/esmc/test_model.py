"""Our ESM C beside transformers' EsmcForMaskedLM: logits, loss, gradients, sizes, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import EsmcForMaskedLM as Stock

from common.cli import UserError
from common.models.layers.compiling import compile_layers
from common.models.layers.config_base import override
from common.models.layers.hf_directory import check_no_dropout
from common.models.layers.initialise import count_parameters, initialise
from common.models.layers.recompute import save_activations
from extras.families.esmc.config import ESMC_SIZES, TOKENS, EsmcConfig, esmc_config, load_config
from extras.families.esmc.convert import ADAPTER
from extras.families.esmc.family import FAMILY
from extras.families.esmc.model import EsmcForMaskedLM
from tests.marks import cases
from tests.models.reference import adapted, packed, random_batch, relative

LENGTHS = [1, 2, 3, 40, 129, 17, 64]
TINY = esmc_config(3, 64, 4, 96)


@torch.no_grad()
def reference_model(config: EsmcConfig) -> Stock:
    """A stock model whose every parameter is random, so that a swapped tensor shows."""
    torch.manual_seed(0)
    stock = config.to_transformers()
    stock._attn_implementation = "eager"
    model = Stock(stock)
    for name, parameter in model.named_parameters():
        centre = float(parameter.dim() == 1 and name.endswith("weight"))
        parameter.normal_(centre, 0.05 if parameter.dim() == 1 else 0.04)
    return model


def fresh(config: EsmcConfig = TINY, **options) -> EsmcForMaskedLM:
    model = EsmcForMaskedLM(config, **options)
    initialise(model, 1, config.initializer_range)
    return model


def check_against_reference(config: EsmcConfig, batch: dict[str, torch.Tensor]) -> None:
    reference = reference_model(config)
    model = adapted(ADAPTER, reference, config)
    keep = batch["attention_mask"].bool()
    theirs = reference(**batch)
    theirs.loss.backward()
    pack = packed(batch)
    inputs = {name: value for name, value in pack.items() if name != "labels"}
    with torch.no_grad():
        expected = theirs.logits[keep]
        padded = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[keep]
        for logits in (model(**inputs).logits, padded):
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() < 1e-5 * (expected.max() - expected.min())
    output = model(**pack)
    loss = output.loss_sum / (pack["labels"] != -100).sum()
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    loss.backward()
    grads = dict(ADAPTER.to_hf({name: p.grad for name, p in model.named_parameters()}.__getitem__, config))
    expected_grads = {name: p.grad for name, p in reference.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        assert relative(grads[name], expected) < 1e-5, name


@pytest.mark.parametrize("name", cases(ESMC_SIZES, slow={"biohub/ESMC-600M-hf", "biohub/ESMC-6B-hf"}))
def test_esmc_every_size_equals_reference(name):
    check_against_reference(replace(load_config(name), num_hidden_layers=1), random_batch([1, 2, 30]))


def test_esmc_depth_and_lengths_equal_reference():
    check_against_reference(TINY, random_batch(LENGTHS))


@pytest.mark.parametrize(
    ("name", "parameters"),
    # layers x (4 h^2 + 3 h f + 6 h) + embedding 64 h + final norm h + head (h^2 + h + 2 h + 64 h + 64)
    [
        ("biohub/ESMC-300M-hf", 332_997_184),
        ("biohub/ESMC-600M-hf", 575_036_992),
        ("biohub/ESMC-6B-hf", 6_352_005_184),
    ],
)
def test_esmc_parameter_counts(name, parameters):
    config = load_config(name)
    with torch.device("meta"):
        model, reference = EsmcForMaskedLM(config), Stock(config.to_transformers())
    assert count_parameters(model) == sum(p.numel() for p in reference.parameters()) == parameters


def test_esmc_config_of_6b_is_transformers_default():
    from transformers import EsmcConfig as StockConfig

    assert load_config("biohub/ESMC-6B-hf").to_transformers().to_diff_dict() == StockConfig().to_diff_dict()


def test_esmc_alphabet_is_the_tokenizers():
    from transformers import EsmcTokenizer

    assert EsmcTokenizer().convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)


def test_esmc_flops_equal_pytorchs_count_of_each_protein():
    """The reference runs the LM head on every position and the rotary angles as a product; ours does neither."""
    model, counted, lengths = reference_model(TINY), 0, [5, 33, 120]
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            model(**random_batch([length])).loss.backward()
        counted += counter.get_total_flops() - 2 * length * 16 // 2
    tokens, squared = sum(lengths), sum(n * n for n in lengths)
    assert FAMILY.flops(TINY, tokens, squared, tokens) == counted
    head = 3 * 2 * (64 * 64 + 64 * 64)
    assert FAMILY.flops(TINY, tokens, squared, 24) == counted - head * (tokens - 24)


def test_esmc_initial_weights_are_those_of_transformers():
    """N(0, initializer_range) matrices, zero biases, unit norms: also where transformers' own are."""
    config = esmc_config(2, 128, 4, 192)
    initial = dict(ADAPTER.to_hf(fresh(config).state_dict().__getitem__, config))
    torch.manual_seed(0)
    for name, theirs in Stock(config.to_transformers()).named_parameters():
        ours = initial[name]
        if theirs.dim() == 1:
            assert torch.equal(ours, theirs), name
        else:
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=8 / theirs.numel() ** 0.5), name


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
def test_esmc_bf16_gradients_differ_by_rounding_only(residual):
    pack = packed(random_batch([128] * 16))
    found = []
    for enabled in (False, True):
        model = fresh(residual=residual)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(**pack).loss_sum.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in found[0].items():
        assert 0 < relative(found[1][name], expected) < 0.05, name  # 2^-8 a rounding, and a few of them


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "bf16"), [("none", True), ("selective", False)])
def test_esmc_layer_compiles_to_one_graph(mode, bf16):
    """Of packs of any length: compiled once, without a break, and the gradients are those of the plain layers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = [fresh() for _ in range(2)]
    compile_layers(models[0], "cpu", backend="aot_eager")
    save_activations(list(models[0].layers), mode)
    for lengths in ([100, 28], [200, 56, 64]):
        pack = packed(random_batch(lengths))
        for model in models:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(**pack).loss_sum.backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < (2e-2 if bf16 else 1e-5), name
    torch._dynamo.reset()


def test_esmc_export_opens_in_transformers_and_is_read_again(tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model, directory = fresh(), tmp_path / "model"
    ADAPTER.save(ADAPTER.to_hf(model.state_dict().__getitem__, TINY), TINY, directory)
    stock, loading = AutoModelForMaskedLM.from_pretrained(directory, output_loading_info=True)
    assert type(stock) is Stock
    assert not any(loading.values()), loading
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoded = tokenizer(["MKTAYI<mask>QR|LW", "MX"], return_tensors="pt", padding=True)
    with torch.no_grad():
        theirs = stock(**encoded).logits
        ours = model(encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
    kept = encoded["attention_mask"].bool()
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-5, atol=1e-6)
    config = load_config(str(directory))
    assert config.fingerprint() == TINY.fingerprint()
    pieces, extras = ADAPTER.read(str(directory), config)
    again, weights = dict(pieces), model.state_dict()
    assert not extras
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    theirs = load_file(directory / "model.safetensors")
    del theirs["esmc.norm.weight"]
    with pytest.raises(UserError, match="no tensor esmc.norm.weight"):
        ADAPTER.from_hf(theirs, config, "here")


def test_esmc_dropout_is_read_and_refused_in_training(tmp_path: Path):
    content = TINY.to_transformers().to_dict() | {"attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="attention_dropout is 0.1, and training here has no dropout"):
        check_no_dropout(load_config(str(tmp_path)), "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, ESM C has 4"),
        ({"head_dim": 8}, "head_dim is 8, ESM C has 16"),
        ({"vocab_size": 33}, "vocab_size is 33, ESM C here has 64"),
        ({"model_type": "esm"}, "model_type is 'esm', ESM C here has 'esmc'"),
        ({"attention_bias": True}, "attention_bias is True, ESM C here has False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta is 1000000.0"),
        ({"rope_parameters": 3}, "rope_parameters is 3: must be an object"),
        ({"classifier_dropout": "x"}, "transformers refuses its config.json: .*classifier_dropout"),
        ({"hidden_size": 60}, "rotary embeddings need an even head dimension"),
    ],
)
def test_esmc_config_refuses_what_it_would_not_compute(tmp_path: Path, changes, said):
    content = TINY.to_transformers().to_dict() | changes
    if changes.get("hidden_size"):
        content["head_dim"] = None
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        load_config(str(tmp_path))


def test_esmc_overrides_change_sizes_only():
    sizes = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=64"
    config = override(load_config("biohub/ESMC-300M-hf"), sizes)
    assert config == esmc_config(2, 32, 4, 64)
    with pytest.raises(UserError, match="layer_norm_eps=1e-6: expected name=value"):
        override(config, "layer_norm_eps=1e-6")
