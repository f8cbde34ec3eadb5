"""benchmarks/token_dropout.py: its folded weights compute what a run with more masks computes, masked or not."""

from __future__ import annotations

import numpy as np
import torch
from transformers import EsmForMaskedLM

from benchmarks.token_dropout import HIDDEN, at_scale, compare, questions
from common.models.family import encoder_family
from extras.after.inference.encoder import Encoder, EncoderFlags
from tests.extras.after.inference.embed_fixtures import make_model


@torch.no_grad()
def test_folded_weights_compute_what_the_run_does(tmp_path):
    name = str(make_model(tmp_path / "model"))
    family = encoder_family(name)
    config = family.load_config(name)
    model = family.make(config).eval()
    for parameter, tensor in family.adapter.read(name, config)[0]:
        model.get_parameter(parameter).copy_(tensor)
    folded = at_scale(EsmForMaskedLM.from_pretrained(name).eval(), 0.2)
    ids = torch.randint(4, 24, (2, 30), generator=torch.Generator().manual_seed(0))
    ids[1, 5:15] = 32  # <mask>
    expected = model(ids, mask_ratio=0.2).logits[..., :33]
    torch.testing.assert_close(folded(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (folded(ids).logits - model(ids).logits[..., :33]).abs().max() > 1e-3


def test_page_of_one_scale_has_no_difference(tmp_path):
    name = str(make_model(tmp_path / "model"))
    encoder = Encoder(EncoderFlags(name, use_cpu=True))
    proteins = [
        encoder.alphabet.encode(b"MKTAYIAKQRQISFVKSHFSRQ"),
        encoder.alphabet.encode(b"ACDEFGHIKLMNPQRSTVWY" * 2),
    ]
    lines = compare(encoder, encoder, proteins)
    assert "Cosine of the two mean embeddings of a protein: 1.0000" in lines[0]
    assert sum("+0.0000 ± 0.0000 | 1.0000 |" in line for line in lines) == len(HIDDEN)
    for hidden, at, number in questions(proteins, 0.2, 32):
        assert (hidden == 32).sum() == len(at) == round(0.2 * (len(proteins[number]) - 2))
        assert (np.delete(hidden, at) == np.delete(proteins[number], at)).all()
