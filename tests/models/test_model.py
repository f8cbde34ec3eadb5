"""The model is ESM-2: logits, loss and gradients equal transformers' EsmForMaskedLM."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import EsmForMaskedLM

from common.data.collators import FillingCollator
from common.models.esm2 import alphabet
from common.models.esm2.config import ESM2_SIZES, esm2_config, load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.family import choose_residual
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from common.models.layers.compiling import compile_layers
from common.models.layers.initialise import count_parameters, initialise
from common.models.layers.recompute import save_activations
from extras.interop.hf_backend import StockEsm
from tests.marks import cases
from tests.models.reference import ours_like, packed, random_batch, reference_model, relative

LENGTHS = [1, 2, 3, 40, 129, 17, 64]
TINY = {"layers": 2, "hidden_size": 64, "heads": 4}


def size(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor).item()


def check_against_reference(config, batch) -> None:
    reference = reference_model(config)
    model = ours_like(reference)
    keep = batch["attention_mask"].bool()
    theirs = reference(**batch)
    theirs.loss.backward()
    pack = packed(batch)
    inputs = {k: v for k, v in pack.items() if k != "labels"}
    with torch.no_grad():
        expected = theirs.logits[keep]
        spread = expected.max() - expected.min()
        for logits in (
            model(**inputs).logits,
            model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[keep],
        ):
            assert ((logits - expected).abs().max() / spread).item() < 1e-5
    output = model(**pack)
    loss = output.loss_sum / (pack["labels"] != -100).sum()
    assert abs(loss.item() - theirs.loss.item()) < 1e-6 * max(1.0, abs(theirs.loss.item()))
    loss.backward()
    expected_grads = {k: p.grad for k, p in reference.named_parameters() if p.grad is not None}
    grads = dict(ADAPTER.to_hf({k: p.grad for k, p in model.named_parameters()}.__getitem__, config))
    assert len(expected_grads) > 10
    for name, expected in expected_grads.items():
        if ".self.query." in name or ".self.key." in name:
            # What comes back through a softmax are differences of sums that nearly cancel, and the rounding is that of
            # the sums: 1.03e-5 of a key's bias on one kind of CPU. In our model query, key and value are one tensor.
            qkv = [re.sub("query|key", part, name) for part in ("query", "key", "value")]
            together = sum(size(expected_grads[part]) ** 2 for part in qkv) ** 0.5
            assert size(grads[name] - expected) < 1e-5 * together, name
            assert relative(grads[name], expected) < 1e-4, name
        else:
            assert relative(grads[name], expected) < 1e-5, name


@pytest.mark.parametrize(
    "name", cases(ESM2_SIZES, slow={f"facebook/esm2_{size}_UR50D" for size in ("t30_150M", "t36_3B", "t48_15B")})
)
def test_esm2_every_size_equals_reference(name):
    config = load_config(name)
    large = config.hidden_size > 1000
    config.num_hidden_layers = 1 if large else 3
    if large:  # widths and heads are the size's own; most of its numbers lie between this one and the hidden size
        config.intermediate_size = 1024
    check_against_reference(config, random_batch([1, 2, 30] if large else LENGTHS))


def test_esm2_without_token_dropout_equals_reference():
    check_against_reference(esm2_config(**TINY, token_dropout=False), random_batch(LENGTHS))


def test_esm2_long_sequences_equal_reference():
    check_against_reference(esm2_config(**TINY), random_batch([1024, 1023, 700]))


@pytest.mark.parametrize("mask_ratio", [0.0, 0.5, 0.9])
def test_esm2_token_dropout_is_counted_per_sequence(mask_ratio):
    """A pack's mean mask ratio is not each sequence's; the guides scale 89 % of packed sequences wrongly."""
    config = esm2_config(**TINY)
    check_against_reference(config, random_batch([30, 200, 5], mask_ratio=mask_ratio))


@pytest.mark.parametrize("backend", ["torch", "hf"])
@pytest.mark.parametrize("layout", ["pack", "padded"])
@pytest.mark.parametrize("mask_ratio", [0.0, 0.12, 0.3])
def test_esm2_token_dropout_of_other_mask_ratio(backend, layout, mask_ratio):
    """Against stock layers on embeddings that are scaled here: given embeddings, transformers drops no token."""
    config = esm2_config(**TINY)
    reference = reference_model(config)
    ours = {"torch": Esm2ForMaskedLM, "hf": StockEsm}[backend](config)
    ours.load_state_dict(dict(ADAPTER.from_hf(reference.state_dict(), config)[0]))
    batch = random_batch(LENGTHS, mask_ratio=0.4)
    ids, kept = batch["input_ids"], batch["attention_mask"].bool()
    is_mask = ids == alphabet.MASK
    scale = (1 - mask_ratio) / (1 - is_mask.sum(1) / kept.sum(1))
    embedded = reference.esm.embeddings.word_embeddings(ids) * (scale[:, None] * ~is_mask)[..., None]
    with torch.no_grad():
        expected = reference(inputs_embeds=embedded, attention_mask=batch["attention_mask"]).logits
        inputs = packed(batch) if layout == "pack" else dict(batch)
        del inputs["labels"]
        found = ours(**inputs, mask_ratio=mask_ratio).logits
    found = found if layout == "pack" else found[kept]
    assert (found - expected[kept]).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_esm2_packing_changes_nothing(dtype):
    model = build_model(esm2_config(**TINY), seed=1)
    batch = random_batch(LENGTHS, seed=3)
    pack = packed(batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        together = model(**{k: v for k, v in pack.items() if k != "labels"}).logits
        for n, length in enumerate(LENGTHS):
            alone = model(batch["input_ids"][n : n + 1, :length]).logits[0]
            begin = pack["cu_seqlens"][n]
            # bf16 matmuls may be blocked differently for another number of rows: one rounding of the residual
            tolerance = 1e-6 if dtype == torch.float32 else 2e-2
            assert (together[begin : begin + length] - alone).abs().max() < tolerance * together.abs().max()


def test_esm2_ignores_left_padding():
    model = build_model(esm2_config(**TINY), seed=1)
    batch = random_batch([9, 20], seed=3)
    left = {k: batch[k].clone() for k in ("input_ids", "attention_mask")}
    for tensor in left.values():
        tensor[0] = tensor[0].roll(11)
    with torch.no_grad():
        right = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        shifted = model(left["input_ids"], attention_mask=left["attention_mask"]).logits
    torch.testing.assert_close(shifted[0, 11:], right[0, :9])
    torch.testing.assert_close(shifted[1], right[1])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # layers x (12 h^2 + 13 h) + embedding 33 h + final norm 2 h + head (h^2 + h + 2 h + 33), worked out by hand
        ("facebook/esm2_t6_8M_UR50D", 7_512_353),
        ("facebook/esm2_t12_35M_UR50D", 33_501_153),
        ("facebook/esm2_t30_150M_UR50D", 148_139_553),
        ("facebook/esm2_t33_650M_UR50D", 651_042_593),
        ("facebook/esm2_t36_3B_UR50D", 2_839_004_193),
        ("facebook/esm2_t48_15B_UR50D", 15_129_098_273),
    ],
)
def test_esm2_parameter_counts(name, parameters):
    config = load_config(name)
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config)
        reference = EsmForMaskedLM(config.to_transformers())
    idle = ("position_embeddings", "contact_head")
    theirs = sum(p.numel() for k, p in reference.named_parameters() if not any(i in k for i in idle))
    assert count_parameters(model) == theirs == parameters
    contact = sum(p.numel() for k, p in reference.named_parameters() if "contact_head" in k)
    assert contact == config.num_hidden_layers * config.num_attention_heads + 1
    if name == "facebook/esm2_t6_8M_UR50D":
        assert contact == 121


def test_esm2_initialisation_follows_paper():
    model = build_model(esm2_config(2, 320, 20), seed=5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        elif "word_embeddings" in name:
            assert not parameter[alphabet.PAD].any()
            assert not parameter[alphabet.VOCAB_SIZE :].any()
        else:
            count = parameter.numel()
            assert abs(parameter.mean().item()) < 4 * 0.02 / count**0.5, name
            assert abs(parameter.std().item() / 0.02 - 1) < 4 / (2 * count) ** 0.5, name
    again, other = build_model(model.config, seed=5), build_model(model.config, seed=6)
    fused = "encoder.layers.1.self_attention.layernorm_qkv.weight"
    assert torch.equal(model.get_parameter(fused), again.get_parameter(fused))
    assert not torch.equal(model.get_parameter(fused), other.get_parameter(fused))
    layers = [model.get_parameter(f"encoder.layers.{n}.layernorm_mlp.fc1_weight") for n in (0, 1)]
    assert not torch.equal(*layers)


def test_esm2_padded_vocabulary_rows_never_change():
    model = build_model(esm2_config(**TINY), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    pack = packed(random_batch(LENGTHS))
    for _ in range(3):
        model(**pack).loss_sum.backward()
        optimizer.step()
    for parameter in (model.embeddings.word_embeddings.weight, model.lm_head.bias):
        assert not parameter[alphabet.VOCAB_SIZE :].any()
        assert parameter[: alphabet.VOCAB_SIZE].any()


def test_esm2_batch_without_labels_has_loss_zero():
    model = build_model(esm2_config(**TINY), seed=0)
    pack = packed(random_batch([10, 20])) | {"labels": torch.full((30,), -100)}
    output = model(**pack)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0.0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_esm2_sequence_of_masks_only_is_finite():
    model = build_model(esm2_config(**TINY), seed=0)
    ids = torch.full((1, 6), alphabet.MASK)
    assert torch.isfinite(model(ids).logits).all()


def test_esm2_accuracy_counts_top_predictions():
    model = build_model(esm2_config(**TINY), seed=0)
    pack = packed(random_batch(LENGTHS))
    chosen = pack["labels"] != -100
    logits = model(**{k: v for k, v in pack.items() if k != "labels"}).logits
    expected = (logits.argmax(-1)[chosen] == pack["labels"][chosen]).sum()
    assert model(**pack).correct == expected


def test_esm2_conversion_round_trip_keeps_bits_and_contact_head():
    config = esm2_config(**TINY)
    theirs = reference_model(config).state_dict()
    pieces, extras = ADAPTER.from_hf(theirs, config)
    ours = dict(pieces)
    assert any("contact_head" in k for k in extras)
    back = dict(ADAPTER.to_hf(ours.__getitem__, config, extras))
    idle = back.pop("esm.embeddings.position_embeddings.weight")  # transformers before 5 wants it to be there
    assert not idle.any()
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name
    missing = set(theirs) - set(back)
    assert all(m.endswith(("inv_freq", "position_ids")) or m.startswith("lm_head.decoder") for m in missing), missing


def test_esm2_bf16_gradients_differ_by_rounding_only():
    """Sums over tokens are fp32's: in bf16 they would be off by more, the more tokens there are."""
    pack = packed(random_batch([128] * 64))
    assert (pack["labels"] != -100).sum() > 1000
    found = []
    for enabled in (False, True):
        model = build_model(esm2_config(**TINY), seed=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(**pack).loss_sum.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in found[0].items():
        assert relative(found[1][name], expected) < 0.02, name  # 2^-8 a step, and a few steps; seen: 0.01


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("none", torch.bfloat16),
        pytest.param("full", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("selective", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_esm2_layer_compiles_to_one_graph(mode, dtype):
    """Of packs of any length: compiled once, without a break, and the gradients are those of the plain layers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = [build_model(esm2_config(**TINY), seed=1) for _ in range(2)]
    compile_layers(models[0], "cpu", backend="aot_eager")  # traced and differentiated; no C++ compiler is needed
    save_activations(list(models[0].layers), mode)
    for lengths in ([100, 28], [200, 56, 64]):
        pack = packed(random_batch(lengths))
        for model in models:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                model(**pack).loss_sum.backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    bound = 1e-5 if dtype == torch.float32 else 1e-2  # bf16 matmuls are rounded in other places
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < bound, name
    torch._dynamo.reset()


def test_esm2_fillers_change_nothing():
    """Split where they are longer than the longest sequence: in attention a filler of 200 would cost its square."""
    plain, filled = (build_model(esm2_config(**TINY), seed=1) for _ in range(2))
    bounds = []
    filled.layers[0].register_forward_hook(lambda layer, inputs, output: bounds.append(inputs[2].tolist()))
    pack = packed(random_batch([70, 30]))
    full = FillingCollator(lambda *_: pack, 300, 8, 70, 0, alphabet.PAD)(None, None)
    ours, theirs = filled(**full), plain(**pack)
    assert bounds == [[0, 70, 100, 110, 180, 250, 320, 320, 320]]  # of 64's multiple beyond 300
    torch.testing.assert_close(ours.loss_sum, theirs.loss_sum, rtol=1e-6, atol=0)
    assert torch.equal(ours.correct, theirs.correct)
    for output in (ours, theirs):
        output.loss_sum.backward()
    for (name, a), b in zip(filled.named_parameters(), plain.parameters(), strict=True):
        assert relative(a.grad, b.grad) < 1e-5, name


@pytest.mark.parametrize(
    ("asked", "can", "device", "previous", "chosen"),
    [
        (None, True, "cuda", {}, True),
        (None, True, "cpu", {}, False),
        (None, False, "cuda", {}, False),
        (None, True, "cuda", {"bf16_residual": "False"}, False),  # a run that was begun before it was the default
        (None, True, "cpu", {"bf16_residual": "True"}, True),
        (True, True, "cpu", {"bf16_residual": "False"}, True),
        (False, True, "cuda", {}, False),
    ],
)
def test_residual_is_bf16_on_a_gpu_unless_the_run_has_another(asked, can, device, previous, chosen):
    assert choose_residual(asked, can, torch.device(device), previous) == chosen


def test_esm2_bf16_residual_differs_by_rounding_only():
    pack = packed(random_batch([70, 30]))
    results, seen = [], []
    for residual in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            model = Esm2ForMaskedLM(esm2_config(**TINY), residual=residual)
        model.to_empty(device="cpu")
        initialise(model, 1, 0.02)
        for layer in model.layers:
            layer.register_forward_hook(lambda layer, inputs, output: seen.append((inputs[0].x.dtype, output.x.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(**pack).loss_sum)
        assert model(**pack, output_hidden=True).hidden.dtype == torch.float32  # nothing of it without autocast
    layers = TINY["layers"]
    half = [(torch.bfloat16,) * 2] * layers
    assert seen == [(torch.float32,) * 2] * 2 * layers + half + [(torch.float32,) * 2] * layers
    # Each rounding is one of 2^-9 of what a layer adds up; a loss of independent ones moves by less than one of them.
    assert results[1].item() != results[0].item()
    torch.testing.assert_close(results[1], results[0], rtol=2**-8, atol=0)
