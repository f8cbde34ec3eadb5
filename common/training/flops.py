"""Floating-point operations of a training step of each family, for total_flos and MFU."""

from __future__ import annotations

from common.models.esm2.config import Esm2Config
from extras.decoders.config import DecoderConfig


def step_flops(config: Esm2Config, tokens: int, squared_lengths: int, predicted: int) -> float:
    """Floating-point operations of a training step: matrix products only, forward plus twice as much backward.

    Linears cost 2 per weight and token; scores and weighted sums 4 x hidden per pair of tokens of the same sequence
    (so the sum of squared lengths counts, not tokens x maximum); the LM head runs on predicted positions only.
    """
    hidden, ffn = config.hidden_size, config.intermediate_size
    per_token = 2 * config.num_hidden_layers * (4 * hidden * hidden + 2 * hidden * ffn)
    attention = 4 * config.num_hidden_layers * hidden * squared_lengths
    head = 2 * predicted * (hidden * hidden + hidden * config.vocab_size)
    return 3.0 * (per_token * tokens + attention + head)


def decoder_flops(config: DecoderConfig, tokens: int, squared_lengths: int) -> float:
    """Floating-point operations of a training step: matrix products only, forward plus twice as much backward.

    Linears cost 2 per weight and token, of Mixtral those of the experts that a token is sent to; scores and weighted
    sums 4 x hidden per pair of tokens of the same sequence, half of which a causal mask leaves.
    """
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    active = config.num_experts_per_tok if config.num_local_experts else 1
    feed_forward = active * 3 * hidden * config.intermediate_size + hidden * config.num_local_experts
    per_token = config.num_hidden_layers * (2 * hidden * hidden + 2 * hidden * kv + feed_forward)
    per_token += hidden * config.vocab_size
    attention = 2 * config.num_hidden_layers * hidden * squared_lengths
    return 3.0 * (2 * per_token * tokens + attention)
