"""Our decoders beside transformers' Llama, Mistral and Mixtral: numbers, sizes, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.cli import UserError
from common.data.collators import to_device
from common.data.crops import Pack
from common.distributed.world import Mesh
from common.models.layers.compiling import compile_layers
from common.models.layers.initialise import initialise
from extras.families.decoders import model as loss_module
from extras.families.decoders.config import GUIDE_RUNS, PRESETS, DecoderConfig, load_decoder_config
from extras.families.decoders.convert import ADAPTER
from extras.families.decoders.layers import rotary_frequencies
from extras.families.decoders.model import DecoderForCausalLM, vocabulary_loss
from extras.families.decoders.residues import ResidueTokenizer
from extras.families.text.contexts import causal_batches
from extras.families.text.flags import TextFlags

# vocabulary, kv heads, ffn, hidden, layers, heads, rope theta, parameters: of the publications and the Hub
PUBLISHED = {
    "llama2_7b": (32000, 32, 11008, 4096, 32, 32, 1e4, 6_738_415_616),
    "llama2_13b": (32000, 40, 13824, 5120, 40, 40, 1e4, 13_015_864_320),
    "llama2_70b": (32000, 8, 28672, 8192, 80, 64, 1e4, 68_976_648_192),
    "llama3_1_8b": (128256, 8, 14336, 4096, 32, 32, 5e5, 8_030_261_248),
    "llama3_1_70b": (128256, 8, 28672, 8192, 80, 64, 5e5, 70_553_706_496),
    "llama3_2_1b": (128256, 8, 8192, 2048, 16, 32, 5e5, 1_235_814_400),
    "llama3_2_3b": (128256, 8, 8192, 3072, 28, 24, 5e5, 3_212_749_824),
    "mathstral_7b": (32768, 8, 14336, 4096, 32, 32, 1e6, 7_248_023_552),
    "mistral_8x7b": (32000, 8, 14336, 4096, 32, 32, 1e6, 46_702_792_704),
}
# One of each kind: every head its own keys, Llama 3's rotation, tied embeddings, Mistral, experts.
FAMILIES = ("llama2_7b", "llama3_1_8b", "llama3_2_1b", "mathstral_7b", "mistral_8x7b")
LENGTHS = (17, 5, 1, 30)


def tiny(name: str, **changes) -> DecoderConfig:
    """A model of the family that is small, with weights large enough for attention and router to prefer something."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6 if name.startswith("llama2") else 2}
    return replace(PRESETS[name].config, **sizes, **heads, initializer_range=0.2, **changes)


def stock_model(config: DecoderConfig) -> transformers.PreTrainedModel:
    """transformers' own, with the weights that ours begins with."""
    stock = config.to_transformers()
    if config.num_local_experts:
        stock.output_router_logits = True
    torch.manual_seed(5)
    return getattr(transformers, config.architecture)(stock)


def ours(config: DecoderConfig, seed: int = 3) -> DecoderForCausalLM:
    model = DecoderForCausalLM(config)
    initialise(model, seed, config.initializer_range)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(our model, transformers' with the same weights, the directory by which they came there)."""
    config = tiny(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    reference = stock_model(config)
    reference.save_pretrained(directory)
    read = DecoderConfig.read(directory / "config.json")
    assert read.fingerprint() == config.fingerprint()
    model = DecoderForCausalLM(read)
    model.load_state_dict(dict(ADAPTER.read(str(directory), read)[0]))
    return model, reference, directory


@pytest.mark.parametrize("name", PUBLISHED)
def test_decoder_presets_equal_published(name):
    config = PRESETS[name].config
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DecoderForCausalLM(config).parameters())
    sizes = (config.vocab_size, config.num_key_value_heads, config.intermediate_size, config.hidden_size)
    shape = (config.num_hidden_layers, config.num_attention_heads, config.rope_theta)
    assert (*sizes, *shape, parameters) == PUBLISHED[name]
    assert config.tie_word_embeddings == name.startswith("llama3_2")
    scaling = config.rope_scaling or {}
    assert scaling.get("factor") == {"llama3_1": 8, "llama3_2": 32}.get(name[:8])
    assert config.router_aux_loss_coef == (0.02 if name == "mistral_8x7b" else 0)
    config.check(name)
    assert list(GUIDE_RUNS) == list(PRESETS) == list(PUBLISHED)


def test_decoder_pack_equals_transformers(pair):
    """Logits, loss and every gradient, in fp32."""
    model, reference, _ = pair
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    packed = {"cu_seqlens": cu_seqlens, "max_seqlen": max(LENGTHS)}
    labels = torch.cat([torch.cat((ids[1:], torch.tensor([-100]))) for ids in sequences])
    logits = model(torch.cat(sequences), **packed).logits
    theirs = [reference(ids[None]) for ids in sequences]
    expected = torch.cat([out.logits[0] for out in theirs])
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    output = model(torch.cat(sequences), labels=labels, **packed)
    loss = torch.nn.functional.cross_entropy(expected, labels, reduction="sum")
    torch.testing.assert_close(output.loss_sum, loss, rtol=1e-5, atol=0)
    told = labels != -100
    assert output.correct == (expected.argmax(-1) == labels)[told].sum()
    model.zero_grad()
    output.loss_sum.backward()
    reference.zero_grad()
    loss.backward()
    _check_gradients(model, reference)


def test_decoder_router_loss_equals_transformers(pair):
    model, reference, _ = pair
    ids = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(2))
    output = model(ids, labels=ids.roll(-1, 1))
    if not model.config.num_local_experts:
        assert output.router is None
        return
    theirs = reference(ids, labels=ids)
    torch.testing.assert_close(output.router, theirs.aux_loss, rtol=1e-5, atol=0)
    assert output.router > 1.0
    for gradients in (model, reference):
        gradients.zero_grad()
    output.router.backward()
    theirs.aux_loss.backward()
    _check_gradients(model, reference)


def _check_gradients(model: DecoderForCausalLM, reference: transformers.PreTrainedModel) -> None:
    """Each of transformers' parameters has the gradient of ours, to 1e-5 of its norm."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    mine = dict(ADAPTER.to_hf(found.__getitem__, model.config))
    theirs = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()}
    for name in [name for name in theirs if ".experts." in name]:  # transformers 5 keeps those of a layer in one
        whole, layer = theirs.pop(name), name.partition(".mlp.")[0]
        names = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
        for expert, part in enumerate(whole):
            for half, matrix in zip(names, part.chunk(len(names)), strict=True):
                theirs[f"{layer}.block_sparse_moe.experts.{expert}.{half}.weight"] = matrix
    theirs = {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): grad for name, grad in theirs.items()}
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = gradient.norm() + 1e-12
        assert (mine[name] - gradient).norm() <= 1e-5 * scale, name


def test_rotary_frequencies_equal_transformers():
    for name, preset in PRESETS.items():
        stock = preset.config.to_transformers()
        kind = stock.rope_parameters["rope_type"]
        assert kind == ("llama3" if name.startswith("llama3") else "default")
        mine = rotary_frequencies(preset.config)
        if kind == "llama3":
            expected, _ = ROPE_INIT_FUNCTIONS[kind](stock, "cpu")
        else:
            steps = torch.arange(0, preset.config.head_dim, 2, dtype=torch.float64) / preset.config.head_dim
            expected = (preset.config.rope_theta**-steps).float()
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_vocabulary_loss_equals_whole_logits(monkeypatch, rows):
    """In float64, whatever number of rows is taken at a time."""
    monkeypatch.setattr(loss_module, "LOGITS_AT_A_TIME", rows * 50 + 3)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(33, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (33,), generator=generator)
    labels[[0, 5, 32]] = -100
    loss, correct, _ = vocabulary_loss(hidden, weight, labels)
    logits = hidden @ weight.t()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert correct == (logits.argmax(-1) == labels).sum()
    mine = torch.autograd.grad(0.3 * loss, (hidden, weight))
    for gradient, theirs in zip(mine, torch.autograd.grad(0.3 * expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-12)


def test_decoder_bf16_is_near_fp32():
    """Within what bf16's eight bits leave over two layers: a hundredth of the loss, a twentieth of the gradient."""
    model = ours(tiny("llama3_1_8b"))
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    results = {}
    for bf16 in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(ids, labels=ids.roll(-1, 1)).loss_sum
        loss.backward()
        results[bf16] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])
    (loss, gradient), (rounded, of_rounded) = results[False], results[True]
    assert abs(rounded - loss) < 0.01 * loss
    assert 0 < (of_rounded - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.parametrize("name", ["llama3_1_8b", pytest.param("mistral_8x7b", marks=pytest.mark.slow)])
def test_decoder_compiled_layers_agree(name):
    """As traced by torch.compile, forward and backward, without a compiler: packs of two lengths, and in Mixtral other
    numbers of tokens for each expert, down to none, are one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = tiny(name)
    plain, compiled = ours(config), ours(config)
    compile_layers(compiled, "cpu", backend="aot_eager")
    counts = []
    for length in (25, 35):  # packs of no number that the model has: a graph holds sizes that look alike for the same
        ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(length))
        gradients, routers = [], []
        for model in (plain, compiled):
            if config.num_local_experts:  # tokens look alike to the router, and none goes to the first expert
                with torch.no_grad():
                    model.embed_tokens.weight[:, 0] = 9
                    for layer in model.layers:
                        layer.layernorm_mlp.gate_weight[0, 0] = -30
            model.zero_grad()
            output = model(ids, labels=ids.roll(-1, 1))
            (output.loss_sum + (output.router or 0)).backward()
            gradients.append([p.grad for p in model.parameters()])
            routers.append(output.router)
        for mine, theirs in zip(*gradients, strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        if config.num_local_experts:
            assert torch.allclose(*routers)
            by_expert = compiled.layers[0].layernorm_mlp.fc2_weight.grad.chunk(config.num_local_experts)
            counts.append([bool(grad.any()) for grad in by_expert])
    assert all(not first and any(rest) for first, *rest in counts)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_decoder_initial_weights_follow_config():
    """N(0, initializer_range) matrices, unit norms; none of it left as the memory was."""
    config = replace(tiny("mistral_8x7b"), initializer_range=0.02)
    for name, parameter in ours(config).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            size = parameter.numel() ** 0.5
            assert parameter.mean().abs() < 5 * 0.02 / size, name
            assert (parameter.std() / 0.02 - 1).abs() < 5 / size, name


def test_decoder_conversion_round_trip_is_bitwise(pair):
    model, _, directory = pair
    theirs = load_file(directory / "model.safetensors")
    back = dict(ADAPTER.to_hf(model.state_dict().__getitem__, model.config))
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    less = dict(theirs)
    del less["model.norm.weight"]
    more = theirs | {"x": theirs["model.norm.weight"]}
    for wrong, said in ((less, "it has no tensor model.norm.weight"), (more, "unknown tensor x")):
        with pytest.raises(UserError, match=f"{said}$"):
            dict(ADAPTER.from_hf(wrong, model.config, "here")[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"num_attention_heads": 5}, "rotary embeddings need an even head dimension"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "only llama3's is here"),
        ({"vocab_size": 0}, "vocab_size is 0: must be above 0"),
        ({"others": {"attention_bias": True}}, "attention_bias is True, decoders here have False"),
        ({"others": {"sliding_window": 64}}, "sliding_window is 64, decoders here have None"),
    ],
)
def test_decoder_config_refuses_unsupported(changes, said):
    with pytest.raises(UserError, match=said):
        replace(tiny("llama3_1_8b"), **changes).check("x")


def test_decoder_config_refuses_other_models(tmp_path: Path):
    with pytest.raises(UserError, match="--model llama9: .*neither a directory nor one of llama2_7b, .* ESM-2"):
        load_decoder_config("llama9")
    (tmp_path / "config.json").write_text('{"model_type": "esm"}')
    with pytest.raises(UserError, match="model_type is 'esm', expected llama, mistral, mixtral"):
        load_decoder_config(str(tmp_path))


def test_decoder_filled_packs_are_one_graph_and_change_nothing():
    """Documents' boundaries, more of them in one pack than in another, empty sequences, and fillers behind."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config, random = tiny("llama3_1_8b"), np.random.default_rng(3)
    assert not ours(tiny("mistral_8x7b")).takes_fillers
    plain, compiled = ours(config), ours(config)
    compile_layers(compiled, "cpu", backend="eager", static_shape=True)
    flags = TextFlags(max_seq_length=48, per_device_train_batch_size=2, document_masks=True)
    collators = [causal_batches(flags, Mesh(), filled_to) for filled_to in (0, 96, 160)]
    for lengths in ([96], [10, 30, 8, 48], [48, 20], [1, 2, 3, 42]):
        nothing = np.zeros(len(lengths), dtype=np.int64)
        pack = Pack(nothing, nothing, np.array(lengths), 0), random.integers(0, 97, sum(lengths))
        found = []
        for collator, model in zip(collators, (plain, plain, compiled), strict=True):
            model.zero_grad()
            output = model(**to_device(collator(*pack), torch.device("cpu")))
            output.loss_sum.backward()
            found.append([output.loss_sum.detach(), *(p.grad for p in model.parameters())])
        for alone, same_size, filled in zip(*found, strict=True):
            assert (same_size - alone).norm() <= 1e-5 * alone.norm()
            assert (filled - alone).norm() <= 1e-5 * alone.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_decoder_fillers_change_nothing():
    """Layers that take a multiple of so many tokens (extras.families.decoders.layers_te): shapes and values stay."""
    config = tiny("llama3_1_8b")
    random = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(0, config.vocab_size, (2, sum(LENGTHS)), generator=random)
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    found = []
    for multiple in (1, 64):
        model = ours(config)
        model.multiple = multiple
        output = model(ids, cu_seqlens=bounds, max_seqlen=max(LENGTHS), labels=labels)
        output.loss_sum.backward()
        whole = model(ids, cu_seqlens=bounds, max_seqlen=max(LENGTHS)).logits
        found.append([whole.detach(), output.loss_sum.detach(), *(p.grad for p in model.parameters())])
    for alone, filled in zip(*found, strict=True):
        assert filled.shape == alone.shape
        assert (filled - alone).norm() <= 1e-5 * alone.norm()


@pytest.mark.parametrize("name", ["llama3_1_8b", "mathstral_7b"])
def test_decoder_export_says_its_rotation_in_the_keys_of_transformers_4_and_5(tmp_path, name):
    """4.57 reads these alone, and would rotate by its defaults (docs/compatibility.md)."""
    config = load_decoder_config(name)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    config = replace(config, **sizes, num_attention_heads=4, num_key_value_heads=2)
    pieces = ADAPTER.to_hf(ours(config).state_dict().__getitem__, config)
    ADAPTER.save(pieces, config, tmp_path / "out", None, ResidueTokenizer())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (config.rope_theta, config.rope_scaling)
    stock = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert stock.rope_parameters == config.to_transformers().rope_parameters
    again = load_decoder_config(str(tmp_path / "out"))
    assert (again.rope_theta, again.rope_scaling) == (config.rope_theta, config.rope_scaling)
