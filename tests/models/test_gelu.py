"""Exact and tanh GELU: each is what it says, a run records which, and only the encoder layers are concerned."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import EsmForMaskedLM
from transformers.models.esm.modeling_esm import EsmIntermediate

from common.cli import UserError
from common.models.esm2.config import HIDDEN_ACT, esm2_config, gelu_of
from common.models.esm2.family import choose_gelu
from common.models.esm2.model import build_model
from tests.models.reference import ours_like, packed, random_batch, reference_model
from tests.training_fixtures import train

TINY = {"layers": 2, "hidden_size": 64, "heads": 4}


class TanhIntermediate(EsmIntermediate):
    def forward(self, hidden_states):
        return F.gelu(self.dense(hidden_states), approximate="tanh")


def logits_beside_reference(hidden_act: str, intermediate: type[EsmIntermediate]) -> tuple[torch.Tensor, torch.Tensor]:
    config = esm2_config(**TINY, hidden_act=hidden_act)
    reference = reference_model(config)
    with torch.no_grad():
        for layer in reference.esm.encoder.layer:
            layer.intermediate.dense.weight.mul_(12)  # to numbers around 2, where the two curves part
            layer.output.dense.weight.mul_(20)
            layer.intermediate.__class__ = intermediate
    batch = random_batch([40, 64, 17])
    inputs = {k: v for k, v in packed(batch).items() if k != "labels"}
    with torch.no_grad():
        theirs = reference(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
        ours = ours_like(reference)(**inputs).logits
    return ours, theirs[batch["attention_mask"].bool()]


@pytest.mark.parametrize("gelu", HIDDEN_ACT)
def test_gelu_of_layers_is_chosen_and_of_head_exact(gelu):
    """The stock model's head is exact; its layers get the tanh approximation here."""
    peers = {"exact": EsmIntermediate, "tanh": TanhIntermediate}
    ours, theirs = logits_beside_reference(HIDDEN_ACT[gelu], peers.pop(gelu))
    assert (ours - theirs).abs().max() < 1e-5 * (theirs.max() - theirs.min())
    (other,) = peers.values()
    ours, theirs = logits_beside_reference(HIDDEN_ACT[gelu], other)
    assert (ours - theirs).abs().max() > 5e-5 * (theirs.max() - theirs.min())  # the test could tell


def test_gelu_tanh_gradients_equal_formula():
    torch.manual_seed(0)
    layer = build_model(esm2_config(**TINY, hidden_act=HIDDEN_ACT["tanh"]), seed=0).encoder.layers[0].layernorm_mlp
    x = torch.randn(7, 64, dtype=torch.float64, requires_grad=True)
    layer.double()(x).sum().backward()
    ours, x.grad = x.grad, None
    h = F.layer_norm(x, (64,), layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)
    h = h @ layer.fc1_weight.T + layer.fc1_bias
    h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    (h @ layer.fc2_weight.T + layer.fc2_bias).sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("asked", "backend", "own", "chosen"),
    [
        (None, "torch", "exact", "exact"),
        (None, "torch", "tanh", "tanh"),  # weights keep theirs
        (None, "te", "exact", "tanh"),
        (None, "te", "tanh", "tanh"),
        ("tanh", "torch", "exact", "tanh"),
        ("exact", "torch", "tanh", "exact"),
        ("tanh", "te", "exact", "tanh"),
        ("exact", "te", "exact", None),
    ],
)
def test_gelu_choice_by_device_and_flag(asked, backend, own, chosen):
    config = esm2_config(**TINY, hidden_act=HIDDEN_ACT[own])
    if chosen is None:
        with pytest.raises(UserError, match="--gelu exact: --backend te"):
            choose_gelu(asked, backend, config)
        return
    settled, remark = choose_gelu(asked, backend, config)
    assert settled == chosen == gelu_of(config)
    assert config.hidden_act == HIDDEN_ACT[chosen]
    assert bool(remark) == ("tanh" in (chosen, own))  # ESM-2 as published goes without saying


def test_gelu_of_copied_model_is_kept():
    model = build_model(esm2_config(**TINY, hidden_act=HIDDEN_ACT["tanh"]), seed=0)
    batch = packed(random_batch([9, 20]))
    assert torch.equal(copy.deepcopy(model)(**batch).loss_sum, model(**batch).loss_sum)


def test_gelu_of_unknown_hidden_act_is_exact():
    assert gelu_of(esm2_config(**TINY, hidden_act="relu")) == "exact"


def test_gelu_is_recorded_and_kept_by_export(dataset, tmp_path):
    train(dataset, tmp_path / "a", gelu="tanh", max_steps=3)
    final = tmp_path / "a" / "final_model"
    assert json.loads((final / "config.json").read_text())["hidden_act"] == "gelu_pytorch_tanh"
    results = json.loads((tmp_path / "a" / "train_results.json").read_text())
    assert (results["gelu"], results["backend"]) == ("tanh", "torch")
    recorded = json.loads((tmp_path / "a" / "trainer_state.json").read_text())["arguments"]
    assert (recorded["gelu"], recorded["backend"]) == ("tanh", "torch")
    assert isinstance(EsmForMaskedLM.from_pretrained(final), EsmForMaskedLM)

    said = train(dataset, tmp_path / "b", model_name_or_path=final, max_steps=2)
    assert "tanh approximation (as the weights were trained)" in said
    said = train(dataset, tmp_path / "c", model_name_or_path=final, max_steps=2, gelu="exact")
    assert "these weights were trained with the tanh approximation" in said
    # What the layers compute with is the configuration's, as the first test here shows; no loss of two steps could.
    for name, gelu in (("b", "tanh"), ("c", "exact")):
        config = json.loads((tmp_path / name / "final_model" / "config.json").read_text())
        assert config["hidden_act"] == HIDDEN_ACT[gelu]
        assert json.loads((tmp_path / name / "train_results.json").read_text())["gelu"] == gelu
