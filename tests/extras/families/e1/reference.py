"""E1 in plain float64, from the description of its authors: whole sets at once, with explicit masks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from extras.families.e1.config import E1Config
from extras.families.e1.convert import ADAPTER

PAD, BOS, EOS, MASK, ONE, TWO = 0, 1, 2, 5, 6, 7
VOCAB = 34


class Reference(nn.Module):
    """One set at a time, with the authors' names. Every parameter is random."""

    def __init__(self, config: E1Config, seed: int = 0):
        super().__init__()
        self.config, size, ffn = config, config.hidden_size, config.intermediate_size
        self.shapes = {
            "model.embed_tokens.weight": (VOCAB, size),
            "model.embed_seq_id.weight": (config.max_num_sequences, size),
            "model.norm.weight": (size,),
        }
        for n in range(config.num_hidden_layers):
            attention, mlp = f"model.layers.{n}.norm_attn_norm.", f"model.layers.{n}.ffn.mlp."
            self.shapes |= {f"{attention}{x}_layernorm.weight": (size,) for x in ("input", "post_attention")}
            self.shapes |= {f"{attention}self_attn.{x}_proj.weight": (size, size) for x in "qkvo"}
            self.shapes |= {f"{mlp}w1.weight": (ffn, size), f"{mlp}w3.weight": (ffn, size)}
            self.shapes |= {f"{mlp}w2.weight": (size, ffn)}
        self.shapes |= {"mlm_head.0.weight": (size, size), "mlm_head.2.weight": (size,)}
        self.shapes |= {"mlm_head.3.weight": (VOCAB, size), "mlm_head.3.bias": (VOCAB,)}
        self.shapes |= {f"mlm_head.{n}.bias": (size,) for n in (0, 2)}
        generator = torch.Generator().manual_seed(seed)
        self.weights = {}
        for name, shape in self.shapes.items():
            centre = float(len(shape) == 1 and not name.endswith("bias"))
            wide = 1.5 / size**0.5 if "_proj" in name else 0.05  # attention is uneven
            values = torch.empty(shape).normal_(centre, wide, generator=generator)  # fp32: exact in both
            self.weights[name] = values.double().requires_grad_()

    def state_dict(self, *_, **__) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[name]

    def matmul(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def attend(self, x, prefix, positions, base, mask):
        """mask: bool [S, S], which keys each query sees."""
        size, heads = self.config.hidden_size, self.config.num_attention_heads
        clip = self.config.clip_qkv or torch.inf
        q, k, v = (
            self.matmul(x, f"{prefix}{n}_proj").clamp(-clip, clip).view(-1, heads, size // heads) for n in "qkv"
        )
        half = size // heads // 2
        angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]

        def rotated(x):
            turned = torch.complex(x[..., :half], x[..., half:]) * turns
            return torch.cat((turned.real, turned.imag), -1)

        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / (2 * half) ** 0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return self.matmul(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{prefix}o_proj")

    def hidden(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """float64 [tokens of the set, hidden], after the last norm."""
        numbers = torch.cat([torch.full((len(ids),), n) for n, ids in enumerate(sequences)])
        within = torch.cat([torch.arange(len(ids)) for ids in sequences]).double()
        weights, ids = self.weights, torch.cat(sequences)
        x = weights["model.embed_tokens.weight"][ids] + weights["model.embed_seq_id.weight"][numbers]
        for n in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{n}."
            y = self.norm(x, f"{prefix}norm_attn_norm.input_layernorm.weight")
            if (n + 1) % 3 == 0:
                where = torch.arange(len(ids)).double(), 5e5, numbers[None] <= numbers[:, None]
            else:
                where = within, 1e4, numbers[None] == numbers[:, None]
            x = x + self.attend(y, f"{prefix}norm_attn_norm.self_attn.", *where)
            y = self.norm(x, f"{prefix}norm_attn_norm.post_attention_layernorm.weight")
            gate, up = (self.matmul(y, f"{prefix}ffn.mlp.{w}") for w in ("w1", "w3"))
            x = x + self.matmul(gate * torch.sigmoid(gate) * up, f"{prefix}ffn.mlp.w2")
        return self.norm(x, "model.norm.weight")

    def logits(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """float64 [tokens of the set, 34]."""
        weights, x = self.weights, self.hidden(sequences)
        x = self.matmul(x, "mlm_head.0") + weights["mlm_head.0.bias"]
        x = x * (1 + torch.erf(x / 2**0.5)) / 2
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        x = x * weights["mlm_head.2.weight"] + weights["mlm_head.2.bias"]
        return self.matmul(x, "mlm_head.3") + weights["mlm_head.3.bias"]

    def loss(self, pack: dict[str, Any]) -> torch.Tensor:
        logits = torch.cat([self.logits(of_set) for of_set in sets_of(pack)])
        return F.cross_entropy(logits, pack["labels"], reduction="sum")


def pack_of(sets: list[list[int]], seed: int = 0) -> dict[str, Any]:
    """A pack of random proteins with masks, given the lengths of the sequences of each set (at least 4)."""
    rng, lengths = np.random.default_rng(seed), [length for of_set in sets for length in of_set]
    parts = [np.concatenate(([BOS, ONE], rng.integers(8, VOCAB, n - 4), [TWO, EOS])) for n in lengths]
    ids = np.concatenate(parts)
    chosen = rng.random(len(ids)) < 0.3
    chosen[0] = True
    bounds = np.append(0, np.cumsum(lengths))
    of_sets = np.append(0, np.cumsum([len(of_set) for of_set in sets]))
    of_sets = np.pad(of_sets, (0, len(bounds) - len(of_sets)), mode="edge")
    return {
        "input_ids": torch.from_numpy(np.where(chosen & (rng.random(len(ids)) < 0.8), MASK, ids)),
        "labels": torch.from_numpy(np.where(chosen, ids, -100)),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        "max_seqlen": max(lengths),
        "sets": torch.from_numpy(np.stack((bounds, of_sets)).astype(np.int32)),
    }


def sets_of(pack: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The token ids of the sequences of each set."""
    sequences = pack["input_ids"].split(pack["cu_seqlens"].diff().tolist())
    return [list(sequences[a:b]) for a, b in pairwise(pack["sets"][1].tolist()) if b > a]


def gradients(model: nn.Module, config: E1Config) -> dict[str, torch.Tensor]:
    """Of our model, by the authors' names."""
    return dict(ADAPTER.to_hf({name: p.grad for name, p in model.named_parameters()}.__getitem__, config))
