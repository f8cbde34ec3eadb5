"""ESM-2 with attention over sets: the old ESM-2 at step 0, and plain float64 with explicit masks after it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, EsmForMaskedLM

from common.cli import UserError
from common.models.esm2.config import esm2_config
from common.models.esm2.convert import ADAPTER as ESM2
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.family import encoder_family, family_of
from common.models.layers.compiling import compile_layers
from common.models.layers.initialise import initialise
from common.models.layers.recompute import save_activations
from extras.families.esm2_sets.config import EsmSetsConfig, load_config
from extras.families.esm2_sets.convert import ADAPTER
from extras.families.esm2_sets.family import FAMILY
from extras.families.esm2_sets.model import EsmSetsForMaskedLM
from tests.models.reference import packed, random_batch, reference_model, relative

TINY = esm2_config(4, 32, 4)
CONFIG = EsmSetsConfig.on(TINY)
CONFIG.set_every = 2  # after layers 1 and 3
LENGTHS, SETS = [9, 30, 5, 41, 17, 60, 25, 12], [0, 1, 4, 7, 8]
HEADS, DIM = 4, 8


def pack_of(lengths: list[int] = LENGTHS, sets: list[int] = SETS) -> dict[str, Any]:
    pack = packed(random_batch(lengths))
    row = sets + [len(lengths)] * (len(lengths) + 1 - len(sets))
    return pack | {"sets": torch.stack((pack["cu_seqlens"], torch.tensor(row, dtype=torch.int32)))}


def continued(esm2: Esm2ForMaskedLM) -> EsmSetsForMaskedLM:
    """As load_model makes it: random weights first, then those that are given."""
    model = EsmSetsForMaskedLM(CONFIG)
    initialise(model, 1, CONFIG.initializer_range)
    missing, unexpected = model.load_state_dict(esm2.state_dict(), strict=False)
    assert all("set_attention" in name for name in missing)
    assert not unexpected
    return model


def old() -> Esm2ForMaskedLM:
    """ESM-2 with a random value everywhere."""
    model, reference = Esm2ForMaskedLM(TINY), reference_model(TINY)
    model.load_state_dict(dict(ESM2.from_hf(reference.state_dict(), TINY)[0]))
    return model


def trained() -> EsmSetsForMaskedLM:
    model = continued(old())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "set_attention" in name:
                wide = 0.05 if parameter.dim() == 1 else 0.2
                parameter.normal_(float(name.endswith("layer_norm_weight")), wide)
    return model


@torch.no_grad()
def logits_of(model: Any, pack: dict[str, Any]) -> torch.Tensor:
    return model(**{name: value for name, value in pack.items() if name != "labels"}).logits


@pytest.mark.parametrize("bf16", [False, True])
def test_esm_sets_begins_as_the_old_model_to_the_last_bit(bf16):
    esm2, model, pack = old(), continued(old()), pack_of()
    plain = {name: value for name, value in pack.items() if name != "sets"}
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected = logits_of(esm2, plain)
        assert torch.equal(logits_of(model, plain), expected)
        assert torch.equal(logits_of(model, pack), expected)
    if not bf16:
        batch, stock = random_batch(LENGTHS), reference_model(TINY)
        with torch.no_grad():
            theirs = stock(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        theirs = theirs[batch["attention_mask"].bool()]
        assert (expected - theirs).abs().max() < 1e-5 * (theirs.max() - theirs.min())


def attended_over_sets(layer: nn.Module, x: torch.Tensor, pack: dict[str, Any]) -> torch.Tensor:
    """x [T, hidden] + attention over sets, set by set, with explicit masks and positions in the set."""
    bounds, of_sets = pack["sets"].tolist()
    y = F.layer_norm(x, x.shape[-1:], layer.layernorm_qkv.layer_norm_weight, layer.layernorm_qkv.layer_norm_bias, 1e-5)
    qkv = (y @ layer.layernorm_qkv.weight.T + layer.layernorm_qkv.bias).view(-1, HEADS, 3, DIM)
    parts = []
    for first, last in pairwise(of_sets):
        begin, end = bounds[first], bounds[last]
        if begin == end:
            continue
        q, k, v = qkv[begin:end].unbind(2)
        numbers = torch.repeat_interleave(torch.arange(last - first), torch.tensor(bounds[first : last + 1]).diff())
        angles = torch.arange(end - begin)[:, None] * 5e5 ** (-torch.arange(DIM // 2, dtype=torch.float64) * 2 / DIM)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (torch.complex(*part.chunk(2, -1)) * turns for part in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k.conj()).real / DIM**0.5  # of turned pairs, their real products
        weights = scores.masked_fill(numbers[None] > numbers[:, None], -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    return x + torch.cat(parts) @ layer.proj.weight.T + layer.proj.bias


def dense_loss(stock: EsmForMaskedLM, model: EsmSetsForMaskedLM, pack: dict[str, Any]) -> torch.Tensor:
    """The loss of transformers' model on the padded batch, with `attended_over_sets` behind some of its layers."""
    batch = random_batch(LENGTHS)
    real = batch["attention_mask"].bool()
    for n, layer in enumerate(stock.esm.encoder.layer):
        if n % 2 == 1:
            of_sets = model.encoder.layers[n].set_attention

            def follow(_module, _inputs, output, of_sets=of_sets):
                x = output if isinstance(output, torch.Tensor) else output[0]
                x = x.masked_scatter(real[..., None], attended_over_sets(of_sets, x[real], pack))
                return x if isinstance(output, torch.Tensor) else (x, *output[1:])

            layer.register_forward_hook(follow)
    logits = stock(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[real], pack["labels"], reduction="sum")


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_esm_sets_loss_and_gradients_equal_dense_float64(dtype, near):
    """In float64 by the code of a GPU, whose rotations are fp32."""
    model, pack = trained().to(dtype), pack_of()
    ours = model(**pack).loss_sum
    ours.backward()
    exact, stock = trained().double(), reference_model(TINY).double()
    exact.load_state_dict(model.state_dict())
    theirs = dense_loss(stock, exact, pack)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for name, parameter in exact.named_parameters():
        if "set_attention" in name:
            assert relative(model.get_parameter(name).grad, parameter.grad) < near, name
    grads = dict(ADAPTER.to_hf({name: p.grad for name, p in model.named_parameters()}.__getitem__, CONFIG))
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None and "inv_freq" not in name:
            assert relative(grads[name], parameter.grad) < near, name


@pytest.mark.parametrize("sequence", range(len(LENGTHS)))
def test_esm_sets_change_is_seen_by_later_sequences_of_its_set_alone(sequence):
    model, pack = trained(), pack_of()
    bounds, of_sets = pack["sets"].tolist()
    ids = pack["input_ids"].clone()
    ids[bounds[sequence] + 1] = 4 + (ids[bounds[sequence] + 1] - 3) % 20
    differs = (logits_of(model, pack) != logits_of(model, pack | {"input_ids": ids})).any(1)
    end = next(b for b in of_sets if b > sequence)
    for n, (first, last) in enumerate(pairwise(bounds)):
        assert differs[first:last].any() == (sequence <= n < end), n


def test_esm_sets_after_a_context_is_the_last_of_the_whole_set():
    model, whole = trained(), pack_of([30, 5, 41, 17], [0, 4])
    read, ids = whole["cu_seqlens"][:4], whole["input_ids"]
    context = model.read_context(ids[: read[-1]], read)
    query = {"input_ids": ids[read[-1] :], "cu_seqlens": torch.tensor([0, 17], dtype=torch.int32), "max_seqlen": 17}
    assert relative(logits_of(model, query | {"context": context}), logits_of(model, whole)[-17:]) < 1e-5


def test_esm_sets_compiled_and_recomputed_layers_give_the_same():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, models = trained(), {mode: trained() for mode in ("none", "selective", "full")}
    for model in (compiled, models["selective"], models["full"]):
        model.load_state_dict(models["none"].state_dict())
    compile_layers(compiled, "cpu", backend="aot_eager")
    for mode in ("selective", "full"):
        save_activations(models[mode].layers, mode)
    for model in (compiled, *models.values()):
        model(**pack_of()).loss_sum.backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, parameter in models["none"].named_parameters():
        assert relative(compiled.get_parameter(name).grad, parameter.grad) < 1e-5, name
        assert torch.equal(models["selective"].get_parameter(name).grad, parameter.grad), name
        assert torch.equal(models["full"].get_parameter(name).grad, parameter.grad), name
    torch._dynamo.reset()


def test_esm_sets_flops_count_what_is_added():
    tokens, squared, added, hidden = sum(LENGTHS), sum(n * n for n in LENGTHS), 2, 32
    more = FAMILY.flops(CONFIG, tokens, squared, 9, set_pairs=5000) - family_of("esm").flops(TINY, tokens, squared, 9)
    assert more == 3 * added * (2 * tokens * 4 * hidden * hidden + 4 * hidden * 5000)


def save(model: EsmSetsForMaskedLM, directory) -> None:
    ADAPTER.save(ADAPTER.to_hf(model.state_dict().__getitem__, CONFIG), CONFIG, directory)


def test_esm_sets_export_is_read_again_and_without_what_is_added_an_esm2(tmp_path):
    model, directory = trained(), tmp_path / "model"
    save(model, directory)
    config = load_config(str(directory))
    assert config.fingerprint() == CONFIG.fingerprint()
    assert encoder_family(str(directory)) is FAMILY
    pieces, weights = dict(ADAPTER.read(str(directory), config)[0]), model.state_dict()
    assert pieces.keys() == weights.keys()
    assert all(torch.equal(pieces[name], weights[name]) for name in weights)
    assert "esm.encoder.set_layer" in (directory / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(directory)("MK")["input_ids"] == [0, 20, 15, 2]

    theirs = load_file(directory / "model.safetensors")
    plain = {name: tensor for name, tensor in theirs.items() if not name.startswith("esm.encoder.set_layer")}
    content = json.loads((directory / "config.json").read_text())
    stock = content | {"model_type": "esm", "architectures": ["EsmForMaskedLM"]}
    from transformers import EsmConfig

    opened, said = EsmForMaskedLM.from_pretrained(
        None, config=EsmConfig.from_dict(stock), state_dict=plain, output_loading_info=True
    )
    assert not any(said.values())
    assert isinstance(opened, EsmForMaskedLM)


def test_esm_sets_reads_an_esm2_of_transformers_and_of_this_project(tmp_path):
    stock = reference_model(TINY)
    stock.save_pretrained(tmp_path / "theirs")
    ESM2.save(ESM2.to_hf(old().state_dict().__getitem__, TINY), TINY, tmp_path / "ours")
    for directory in (tmp_path / "theirs", tmp_path / "ours"):
        assert encoder_family(str(directory)) is family_of("esm")
        assert encoder_family(str(directory), "esm_sets") is FAMILY
        config = load_config(str(directory))
        assert (config.model_type, config.set_every, config.is_of_esm2) == ("esm_sets", 3, True)
        pieces, expected = dict(ADAPTER.read(str(directory), config)[0]), old().state_dict()
        assert pieces.keys() == expected.keys()
        assert all(torch.equal(pieces[name], expected[name]) for name in expected)
    assert encoder_family("facebook/esm2_t6_8M_UR50D", "esm_sets") is FAMILY
    assert load_config("facebook/esm2_t6_8M_UR50D").esm2() == esm2_config(6, 320, 20)
    assert EsmSetsConfig.on(esm2_config(2, 32, 4)).set_every == 2  # it has no third layer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"set_every": 0}, "set_every is 0: must be 1 to num_hidden_layers, 4"),
        ({"set_every": 5}, "set_every is 5: must be 1 to num_hidden_layers, 4"),
        ({"set_every": "two"}, "set_every is 'two', expected int"),
        ({"rope_theta_global": 0.0}, r"rope_theta_global is 0.0: must be above 0"),
        ({"model_type": "esmc"}, "model_type is 'esmc'"),
    ],
)
def test_esm_sets_config_refuses_what_it_would_not_compute(tmp_path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.content() | changes))
    with pytest.raises(UserError, match=said):
        load_config(str(tmp_path))
