"""Llama, Mistral and Mixtral for causal language modelling: embeddings, decoder layers, LM head, loss.

Fidelity to transformers' classes (fp32 logits, losses and every gradient within 1e-5) is tested for each family.
Inside, tokens always lie packed end to end, with the boundaries of their sequences: attention and positions stay
within one. Nothing here is a buffer: rotary tables are made from the positions of each pass, so that nothing is
lost on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.models.layers.linear import Embedding, Linear, gradients, linear
from common.models.layers.residual import Block, Layers, Model, Stream, total
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.layers import RMSNorm, rotary_frequencies

# Cross-entropy over a large vocabulary without the logits of all tokens: some rows at a time, gradients at once.
#
# Logits of 8,192 tokens over 128,256 words are 4.2 GB in fp32, and as much again for their gradient. Here the forward
# pass takes as many rows at a time as make 256 MB of logits, adds up their loss and, while they are there, their
# gradients for the hidden states and the matrix: nothing is computed twice, and between forward and backward pass only
# those two are held (the second in fp32). As in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).

IGNORE = -100
LOGITS_AT_A_TIME = 2**26


def vocabulary_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H], weight [V, H], labels int64 [T], -100 where there is no target.

    Returns the cross-entropy in nats, summed over the labelled positions (fp32 scalar; float64 for float64), at how
    many of them the label is the top prediction (int64 scalar), and the cross-entropy of each [T], 0 where there is no
    label, without a gradient. By autocast's rules where that is on.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
        weight = weight.to(hidden.dtype)
    with torch.autocast(kind, enabled=False):
        return _VocabularyLoss.apply(hidden, weight, labels, hidden.requires_grad or weight.requires_grad)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, differentiates: bool):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        of_tokens = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        if differentiates:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight, dtype=wide)
        step = max(1, LOGITS_AT_A_TIME // len(weight))
        for rows in (slice(begin, begin + step) for begin in range(0, len(hidden), step)):
            x, targets = hidden[rows], labels[rows]
            logits = linear(x, weight).to(wide)
            of_tokens[rows] = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
            loss += of_tokens[rows].sum()
            correct += (logits.argmax(-1) == targets).sum()
            if differentiates:
                is_target = targets != IGNORE
                grad = logits.softmax(-1)
                grad[torch.arange(len(x), device=x.device), targets.clamp(min=0)] -= 1
                grad *= is_target[:, None]
                grad_hidden[rows], more = gradients(grad.to(x.dtype), x, weight)
                grad_weight += more
        if differentiates:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(correct, of_tokens)
        return loss, correct, of_tokens

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = torch.empty_like(grad_weight, dtype=ctx.dtype)
        return grad_hidden * grad.to(grad_hidden.dtype), torch.mul(grad_weight, grad, out=of_weight), None, None


class DecoderOutput(NamedTuple):
    """The result of a forward pass. Without labels: `logits`. With labels: sums over the labelled positions.

    router: Mixtral's load-balancing loss (fp32 scalar), not yet weighted; None without experts. Where ranks share a
    pack, this rank's part of it: the sum over them is the pack's.
    """

    logits: Tensor | None = None  # [T, V] or [B, S, V], fp32
    loss_sum: Tensor | None = None  # scalar fp32: cross-entropy in nats
    correct: Tensor | None = None  # scalar int64: labelled positions whose top prediction is the label
    router: Tensor | None = None
    token_losses: Tensor | None = None  # [T] fp32, 0 where nothing is predicted; without a gradient


class DecoderForCausalLM(Model):
    """A decoder of any size. Build it under `torch.device("meta")` if large.

    backend: of the layers, `torch` (any device) or `te` (Transformer Engine; CUDA). Parameters are the same.
    """

    def __init__(self, config: DecoderConfig, backend: str = "torch"):
        super().__init__()
        self.config = config
        self.takes_fillers = not config.num_local_experts  # which a router would count
        self.share_of: Callable | None = None  # with context parallelism: extras.speed.cp_model.share_of
        layers: Any
        if backend == "te":
            from extras.families.decoders import layers_te as layers
        else:
            from extras.families.decoders import layers
        self.multiple, self.begin = layers.TOKENS, layers.begin
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = Layers(layers.DecoderLayer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Tied embeddings are one parameter, by whatever it is sharded, saved or exported.
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def hidden_matrices(self) -> dict[str, list[Block]]:
        config, experts = self.config, self.config.num_local_experts or 1
        size, ffn, keys = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
        of_layer = {
            "self_attention.layernorm_qkv.weight": [
                Block(config.num_attention_heads * config.head_dim),
                *2 * [Block(keys)],
            ],
            "self_attention.proj.weight": [Block(size)],
            "layernorm_mlp.fc1_weight": [Block(ffn)] * 2 * experts,  # gate and up
            "layernorm_mlp.fc2_weight": [Block(size)] * experts,
        }
        return {f"layers.{n}.{name}": of for n in range(config.num_hidden_layers) for name, of in of_layer.items()}

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        labels: Tensor | None = None,
        cp_pack: Any = None,
    ) -> DecoderOutput:
        """Run a pack (`input_ids` [T], `cu_seqlens` int32 [B + 1]), or sequences of one length (`input_ids` [B, S]).

        cp_pack: with context parallelism, how ranks share the pack's sequences (extras.speed.context_parallel.CpPack);
        all others and the results are then of this rank's tokens.
        labels: of the shape of `input_ids`, the token that follows each, -100 where there is no target.
        """
        shape = input_ids.shape
        if input_ids.dim() == 2:
            cu_seqlens = torch.arange(0, shape.numel() + 1, shape[1], dtype=torch.int32, device=input_ids.device)
            max_seqlen, input_ids = shape[1], input_ids.flatten()
        assert cu_seqlens is not None, "a pack comes with cu_seqlens"
        assert max_seqlen is not None, "and with max_seqlen"
        tokens = len(input_ids)
        if fillers := -tokens % self.multiple:  # one more sequence, whose results are cut off below
            input_ids = F.pad(input_ids, (0, fillers))
            cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + fillers))
            max_seqlen = max(max_seqlen, fillers)
        x = self.embed_tokens(input_ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # the residual stream is fp32, also if a strategy casts weights to bf16
        layout = None
        if cp_pack is None:
            starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=len(x))
            positions = torch.arange(len(x), device=x.device) - starts
        else:
            assert self.share_of is not None, "a model takes its share of packs once it is in a group of ranks"
            positions, layout = self.share_of(cp_pack, len(x))
            x = layout.without_padding(x)  # which then changes no number format's scale
        stream, rotary, shares = self.begin(x), self._rotary(positions), []
        for layer in self.layers.in_turn():
            *parts, of_router = layer(stream, rotary, cu_seqlens, max_seqlen, layout, tokens if fillers else None)
            stream = Stream(*parts)
            shares.append(of_router)
        x = self.norm(total(stream)[:tokens])
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        router = self._balance(sum(shares), len(x), layout) if self.config.num_local_experts else None
        if labels is None:
            logits = F.linear(x, head).to(torch.promote_types(x.dtype, torch.float32))
            return DecoderOutput(logits=logits.view(*shape, -1), router=router)
        loss_sum, correct, token_losses = vocabulary_loss(x, head, labels.flatten())
        return DecoderOutput(loss_sum=loss_sum, correct=correct, router=router, token_losses=token_losses)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D / 2] of each token's position in its sequence."""
        angles = positions.float()[:, None] * rotary_frequencies(self.config, positions.device)
        return angles.cos(), angles.sin()

    def _balance(self, shares: Tensor, tokens: int, layout: Any) -> Tensor:
        """experts x sum over experts of (assignments a token) x (mean probability), over all layers together.

        Equations 4-6 of Switch Transformers (arXiv:2101.03961), as transformers has them. shares [2, experts]: summed.
        Where ranks share a pack, the assignments are of all of it and the probabilities of this rank's tokens: the
        product is linear in those, so that the ranks' parts and their gradients add up to the pack's.
        """
        chosen, probability = shares
        if layout is not None:
            tokens, chosen = int(layout.real.sum()), chosen.detach().clone()  # counts have no gradient
            dist.all_reduce(chosen, group=layout.context.group)
        number = tokens * self.config.num_hidden_layers
        return self.config.num_local_experts * (chosen / number * (probability / number)).sum()
