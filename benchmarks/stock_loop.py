"""A training loop of transformers and torch alone, which `benchmarks.prove` holds this project's runs to.

Nothing of this project is imported here: models, padding, token dropout, loss, clipping, optimiser and learning rates
are transformers', torch's or written out. It is given token ids and labels of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

STEPS, WARMUP = 10, 3
PEAK, LAST_RATE = 2e-3, 1e-5
# Under the names of the run's flags, which are given the same.
RECIPE: dict[str, Any] = {
    "learning_rate": PEAK,
    "warmup_steps": WARMUP,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
# Weights larger than usual: attention is far from uniform, so that every part of a layer counts.
SIZES = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "initializer_range": 0.1}


def rate_of_esm2(step: int, peak: float) -> float:
    """Before step `step`, from 0: up to the peak with the third, then down to a tenth of it at 90 % of the run."""
    return peak * (step + 1) / WARMUP if step < WARMUP else peak * (1 - 0.9 * min(1, (step - WARMUP) / (9 - WARMUP)))


def rate_of_llama(step: int, peak: float) -> float:
    """Up to the peak with the third step, then down to LAST_RATE with the last."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    return peak - (peak - LAST_RATE) * (step + 1 - WARMUP) / (STEPS - WARMUP)


@dataclass(frozen=True)
class Family:
    """A model of transformers, and its learning rate. shifted: what a token predicts is the next one."""

    model: Any
    config: Callable[[], Any]
    rate: Callable[[int, float], float]
    shifted: bool

    def initial(self) -> Any:
        """The model with the weights that transformers draws."""
        torch.manual_seed(0)
        return self.model(self.config())


FAMILIES = {
    "ESM-2": Family(
        transformers.EsmForMaskedLM,
        lambda: transformers.EsmConfig(
            **SIZES,
            vocab_size=33,
            pad_token_id=1,
            mask_token_id=32,
            intermediate_size=512,
            position_embedding_type="rotary",
            token_dropout=True,
            emb_layer_norm_before=False,
            layer_norm_eps=1e-5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        rate_of_esm2,
        shifted=False,
    ),
    "Llama": Family(
        transformers.LlamaForCausalLM,
        lambda: transformers.LlamaConfig(
            **SIZES, vocab_size=272, num_key_value_heads=2, intermediate_size=352, max_position_embeddings=256
        ),
        rate_of_llama,
        shifted=True,
    ),
}

Sequences = list[tuple[Tensor, Tensor]]  # (token ids, labels) of each, int64 [length]


class Trained(NamedTuple):
    """Of each step the loss (nats a target) and the gradient norm before clipping; the weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def loop(
    family: Family,
    model: nn.Module,
    steps: list[list[Sequences]],
    device: str,
    bf16: bool = False,
    recipe: Mapping[str, Any] = RECIPE,
) -> Trained:
    """Train `model` on the sequences of each pack of each step, a padded batch a pack. bf16: by autocast."""
    model = model.to(device).train()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        betas=(recipe["adam_beta1"], recipe["adam_beta2"]),
        eps=recipe["adam_epsilon"],
    )
    losses, norms = [], []
    for number, packs in enumerate(steps):
        batches = [_batch(family, sequences, device) for sequences in packs]
        targets = sum(int((labels >= 0).sum()) for _, _, labels in batches)  # of the global batch
        total = torch.zeros((), device=device)
        for ids, attended, labels in batches:
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                logits = model(input_ids=ids, attention_mask=attended).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.detach()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe["max_grad_norm"]).item())
        for group in optimizer.param_groups:
            group["lr"] = family.rate(number, recipe["learning_rate"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return Trained(losses, norms, {name: p.detach().cpu() for name, p in model.named_parameters()})


def _batch(family: Family, sequences: Sequences, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and labels, each int64 [B, longest]; -100 where nothing is predicted."""

    def padded(tensors: list[Tensor], filler: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler).to(device)

    ids = padded([ids for ids, _ in sequences], 1)
    attended = padded([torch.ones_like(ids) for ids, _ in sequences], 0)
    if not family.shifted:
        return ids, attended, padded([labels for _, labels in sequences], -100)
    # By itself, not by the labels that it is given.
    return ids, attended, padded([F.pad(ids[1:], (0, 1), value=-100) for ids, _ in sequences], -100)


def with_tanh_gelu(model: Any) -> None:
    """Transformer Engine's GELU in the layers; EsmForMaskedLM has the exact one only."""
    for layer in model.esm.encoder.layer:
        dense = layer.intermediate.dense
        layer.intermediate.forward = lambda hidden, dense=dense: F.gelu(dense(hidden), approximate="tanh")
