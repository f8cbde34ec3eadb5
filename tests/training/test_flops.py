"""FLOPs of a step: what PyTorch counts, and what published sizes of models say."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import EsmForMaskedLM

from common.models.esm2.config import esm2_config
from common.models.esm2.family import FAMILY as ESM2
from extras.families.decoders.config import PRESETS
from extras.families.decoders.family import FAMILY as DECODERS
from extras.families.decoders.model import DecoderForCausalLM
from tests.models.reference import random_batch


def test_flops_equal_pytorchs_count_of_each_protein():
    """PyTorch's counter on transformers' model, forward and backward: the matmuls it really runs.

    The reference runs the LM head on every position and the rotary angles as a product; ours does neither.
    """
    config = esm2_config(2, 64, 4)
    stock = config.to_transformers()
    stock._attn_implementation = "eager"
    model = EsmForMaskedLM(stock)
    counted, lengths = 0, [5, 33, 120]
    for length in lengths:
        batch = random_batch([length])
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        counted += counter.get_total_flops()
        angles = 2 * length * 16 // 2  # forward only: [D/2, 1] x [1, L]
        counted -= angles
    tokens, squared = sum(lengths), sum(n * n for n in lengths)
    assert ESM2.flops(config, tokens, squared, tokens) == counted
    masked = 24
    head = 3 * 2 * (64 * 64 + 64 * 33)
    assert ESM2.flops(config, tokens, squared, masked) == counted - head * (tokens - masked)


def test_flops_of_experts_count_active_weights():
    """6 a weight and token: all but embeddings and norms of a dense model; of Mixtral 12.9 billion, as published
    (arXiv:2401.04088), with the embeddings. Of attention 12 x layers x hidden x context a token (PaLM's appendix B),
    halved by the causal mask."""
    for name, preset in PRESETS.items():
        config, context = preset.config, 4096
        flops = DECODERS.flops(config, context, context**2, context) / context
        attention = 6 * config.num_hidden_layers * config.hidden_size * context
        embedding = config.vocab_size * config.hidden_size
        weights = (flops - attention) / 6
        if name == "mistral_8x7b":
            assert weights + embedding == pytest.approx(12.9e9, rel=0.005)
            continue
        with torch.device("meta"):
            matrices = sum(p.numel() for p in DecoderForCausalLM(config).parameters() if p.dim() > 1)
        assert weights == pytest.approx(matrices - embedding * (not config.tie_word_embeddings), rel=1e-9), name
