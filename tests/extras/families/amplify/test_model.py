"""Our AMPLIFY beside a plain float64 module of its authors' description: logits, loss, gradients, sizes, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.cli import UserError
from common.models.layers.compiling import compile_layers
from common.models.layers.config_base import override
from common.models.layers.initialise import count_parameters, initialise
from extras.families.amplify.alphabet import TOKENS
from extras.families.amplify.config import AMPLIFY_SIZES, AmplifyConfig, amplify_config, load_config
from extras.families.amplify.convert import ADAPTER
from extras.families.amplify.family import FAMILY
from extras.families.amplify.model import AmplifyForMaskedLM
from tests.marks import cases
from tests.models.reference import adapted, relative

LENGTHS = [1, 2, 3, 40, 129, 17]
TINY = amplify_config(3, 64, 4, 100)  # SwiGLU of 72: int(200 / 3) = 66, rounded up
PAD, MASK, BOS, EOS = 0, 2, 3, 4


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class FeedForward(nn.Module):
    """xformers' SwiGLU: w12 gives the gate, then what it is multiplied by."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.w12, self.w3 = nn.Linear(size, 2 * width, bias=False), nn.Linear(width, size, bias=False)

    def forward(self, x):
        gate, up = self.w12(x).split(self.w3.in_features, -1)
        return self.w3(gate * torch.sigmoid(gate) * up)


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, intermediate: int, eps: float):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.wo = (nn.Linear(size, size, bias=False) for _ in range(4))
        width = 8 * ((int(2 * intermediate / 3) + 7) // 8)
        self.ffn = FeedForward(size, width)
        self.attention_norm, self.ffn_norm = Norm(size, eps), Norm(size, eps)

    def forward(self, x):
        length, size = x.shape
        y = self.attention_norm(x)
        q, k, v = (matrix(y).view(length, self.heads, -1) for matrix in (self.q, self.k, self.v))
        dim = size // self.heads
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim))
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # complex [length, 1, dim / 2]
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turns).flatten(2)
            for part in (q, k)
        )
        weights = (torch.einsum("qhd,khd->hqk", q, k) / dim**0.5).softmax(-1)
        x = x + self.wo(torch.einsum("hqk,khd->qhd", weights, v).reshape(length, size))
        return x + self.ffn(self.ffn_norm(x))


class Reference(nn.Module):
    """float64, one sequence at a time, with the authors' names. Every parameter is random."""

    def __init__(self, config: AmplifyConfig):
        super().__init__()
        size = config.hidden_size
        self.encoder = nn.Embedding(27, size)
        shape = size, config.num_attention_heads, config.intermediate_size, config.norm_eps
        self.transformer_encoder = nn.ModuleList(Layer(*shape) for _ in range(config.num_hidden_layers))
        self.layer_norm_2 = Norm(size, config.norm_eps)
        self.decoder = nn.Linear(size, 27)
        self.double()
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                centre = float("norm" in name)
                parameter.copy_(torch.empty_like(parameter).normal_(centre, 0.05).float())  # exact in fp32

    def forward(self, ids):
        x = self.encoder(ids)
        for layer in self.transformer_encoder:
            x = layer(x)
        return self.decoder(self.layer_norm_2(x))


def random_pack(lengths: list[int]) -> dict:
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(6, 27, sum(lengths)), np.full(sum(lengths), -100)
    ends = np.cumsum(lengths)
    ids[ends - 1], ids[ends - lengths] = EOS, BOS
    chosen = rng.random(len(ids)) < 0.2
    chosen[ends - 1] = True
    labels[chosen] = ids[chosen]
    ids[chosen & (rng.random(len(ids)) < 0.8)] = MASK
    bounds = torch.tensor([0, *ends], dtype=torch.int32)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "cu_seqlens": bounds,
        "max_seqlen": max(lengths),
    }


def fresh(config: AmplifyConfig = TINY, **options) -> AmplifyForMaskedLM:
    model = AmplifyForMaskedLM(config, **options)
    initialise(model, 1, config.initializer_range)
    return model


def check_against_reference(config: AmplifyConfig, lengths: list[int]) -> None:
    reference, pack = Reference(config), random_pack(lengths)
    model = adapted(ADAPTER, reference, config)
    expected = torch.cat([reference(part) for part in pack["input_ids"].split(lengths)])
    theirs = F.cross_entropy(expected, pack["labels"], reduction="sum")
    theirs.backward()
    inputs = {name: value for name, value in pack.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (sum(lengths), 27)
    assert (logits - expected).abs().max() < 1e-5 * (expected.max() - expected.min())
    output = model(**pack)
    assert output.loss_sum.item() == pytest.approx(theirs.item(), rel=1e-6)
    output.loss_sum.backward()
    grads = dict(ADAPTER.to_hf({name: p.grad for name, p in model.named_parameters()}.__getitem__, config))
    expected_grads = {name: p.grad for name, p in reference.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        assert relative(grads[name], gradient) < 1e-5, name


@pytest.mark.parametrize("name", cases(AMPLIFY_SIZES, slow={"chandar-lab/AMPLIFY_350M"}))
def test_amplify_every_size_equals_reference(name):
    check_against_reference(replace(load_config(name), num_hidden_layers=1), [1, 2, 30])


def test_amplify_depth_and_lengths_equal_reference():
    check_against_reference(TINY, LENGTHS)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # layers x (4 h^2 + 3 h f + 2 h) + embedding 27 h + final norm h + decoder 27 h + 27
    [("chandar-lab/AMPLIFY_120M", 118_276_507), ("chandar-lab/AMPLIFY_350M", 354_008_667)],
)
def test_amplify_parameter_counts(name, parameters):
    config = load_config(name)
    with torch.device("meta"):
        model, reference = AmplifyForMaskedLM(config), Reference(config)
    assert count_parameters(model) == sum(p.numel() for p in reference.parameters()) == parameters


def test_amplify_flops_equal_pytorchs_count():
    reference, counted, lengths = Reference(TINY), 0, [5, 33, 120]
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            reference(torch.full((length,), 7)).sum().backward()
        counted += counter.get_total_flops()
    tokens, squared = sum(lengths), sum(n * n for n in lengths)
    assert FAMILY.flops(TINY, tokens, squared, tokens) == counted


def test_amplify_initial_weights_are_uniform():
    """In (-0.02, 0.02); norms 1, the decoder's bias 0, and nothing in the rows that pad the vocabulary."""
    model = fresh(amplify_config(1, 128, 4, 192))
    for name, tensor in model.state_dict().items():
        rows = tensor[:27] if name in model.padded_vocab else tensor
        assert not tensor[len(rows) :].any()
        if tensor.dim() == 1:
            assert torch.equal(rows, torch.full_like(rows, float(not name.endswith("bias")))), name
        else:
            assert 0.0195 < rows.abs().max().item() < 0.02, name
            assert rows.std().item() == pytest.approx(0.02 / 3**0.5, rel=0.03), name


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_amplify_layer_compiles_to_one_graph(bf16):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = [fresh() for _ in range(2)]
    compile_layers(models[0], "cpu", backend="aot_eager")
    for lengths in ([100, 28], [200, 56, 64]):
        for model in models:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(**random_pack(lengths)).loss_sum.backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < (2e-2 if bf16 else 1e-5), name
    torch._dynamo.reset()


def test_amplify_export_has_its_authors_names_and_is_read_again(tmp_path):
    from transformers import AutoTokenizer

    config = replace(TINY, max_length=512)
    model, directory = fresh(), tmp_path / "model"
    ADAPTER.save(ADAPTER.to_hf(model.state_dict().__getitem__, config), config, directory)
    content = json.loads((directory / "config.json").read_text())
    assert config.content().items() <= content.items()
    assert (content["model_type"], content["architectures"]) == ("AMPLIFY", ["AMPLIFY"])
    theirs = load_file(directory / "model.safetensors")
    assert theirs.keys() == Reference(config).state_dict().keys()
    again = load_config(str(directory))
    assert again.fingerprint() == config.fingerprint()
    assert again.max_length == 512
    pieces, extras = ADAPTER.read(str(directory), again)
    read, weights = dict(pieces), model.state_dict()
    assert not extras
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = [TOKENS.index(token) for token in ("<bos>", "M", "<mask>", "K", "<unk>", "B", "|", "L", "<eos>")]
    assert tokenizer("M<mask>KXB|L")["input_ids"] == expected
    assert "transformers has no class of it" in (directory / "README.md").read_text()
    del theirs["layer_norm_2.weight"]
    with pytest.raises(UserError, match="no tensor layer_norm_2.weight"):
        ADAPTER.from_hf(theirs, again, "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 32}, "vocab_size is 32, AMPLIFY here has 27"),
        ({"model_type": "esm"}, "model_type is 'esm', not AMPLIFY"),
        ({"att_bias": True}, "att_bias is True, AMPLIFY here has False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', AMPLIFY here has 'SwiGLU'"),
        ({"mask_token_id": 32}, "mask_token_id is 32, AMPLIFY here has 2"),
        ({"decoder_init_range": 0.1}, "embedding_init_range and decoder_init_range differ"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 60}, "rotary embeddings need an even head dimension"),
    ],
)
def test_amplify_config_refuses_what_it_would_not_compute(tmp_path: Path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps(TINY.content() | changes))
    with pytest.raises(UserError, match=said):
        load_config(str(tmp_path))


def test_amplify_overrides_change_sizes_only():
    sizes = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=64"
    assert override(load_config("chandar-lab/AMPLIFY_120M"), sizes) == amplify_config(2, 32, 4, 64)
    with pytest.raises(UserError, match="vocab_size=33: expected name=value"):
        override(load_config("chandar-lab/AMPLIFY_120M"), "vocab_size=33")
