"""Outputs of some tokens alone: the last layer leaves the others out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.models.family import encoders, family_of
from common.models.layers.initialise import initialise


@pytest.mark.parametrize("kind", [kind for kind in encoders() if family_of(kind).published])
def test_they_are_those_of_the_whole_pack(kind):
    family = family_of(kind)
    config = replace(family.load_config(family.published[0]), num_hidden_layers=3)
    with torch.device("meta"):
        model = family.make(config)
    initialise(model.to_empty(device="cpu").eval(), 0, 0.1)
    lengths = torch.tensor([0, 9, 21, 26], dtype=torch.int32)
    ids = torch.randint(4, 24, (26,), generator=torch.Generator().manual_seed(0))
    pack, at = {"cu_seqlens": lengths, "max_seqlen": 12}, torch.tensor([25, 3, 11])
    with torch.inference_mode():
        every, some = model(ids, **pack, output_hidden=True), model(ids, **pack, output_hidden=True, at=at)
    torch.testing.assert_close(some.logits, every.logits[at], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(some.hidden, every.hidden[at], rtol=1e-5, atol=1e-5)
    calls, last = [], model.layers[-1]
    for module in (last.self_attention.proj, last.layernorm_mlp):
        module.register_forward_hook(lambda _module, inputs, _out: calls.append(len(inputs[0])))
    with torch.inference_mode():
        model(ids, **pack, at=at)
    if not family.reads_sets:
        assert calls == [3, 3]
