"""The independent reference of the model tests: `transformers.EsmForMaskedLM`, with random weights everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EsmForMaskedLM

from common.models.esm2 import alphabet
from common.models.esm2.config import Esm2Config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.state_dict_adapter import StateDictAdapter


@torch.no_grad()
def reference_model(config: Esm2Config, seed: int = 0) -> EsmForMaskedLM:
    """A stock model whose every parameter is random (biases and norms too, so that a swapped tensor shows)."""
    torch.manual_seed(seed)
    stock = config.to_transformers()
    stock._attn_implementation = "eager"
    model = EsmForMaskedLM(stock)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "LayerNorm.weight" in name or "layer_norm" in name and name.endswith("weight") else 0.0
        parameter.normal_(centre, 0.05 if parameter.dim() == 1 else 0.02)
    return model


def adapted(adapter: StateDictAdapter, reference: nn.Module, config: Any) -> Any:
    """Our model with the weights of a reference in its published names."""
    with torch.device("meta"):
        model = adapter.model(config)
    model.load_state_dict(dict(adapter.from_hf(reference.state_dict(), config)[0]), assign=True)
    return model


def ours_like(reference: EsmForMaskedLM) -> Esm2ForMaskedLM:
    return adapted(ADAPTER, reference, Esm2Config.of(reference.config.to_dict()))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()


def random_batch(lengths: list[int], seed: int = 0, mask_ratio: float = 0.15) -> dict[str, torch.Tensor]:
    """A right-padded batch of random proteins: input_ids, attention_mask, labels, each [B, S]."""
    rng = np.random.default_rng(seed)
    width = max(lengths)
    ids = np.full((len(lengths), width), alphabet.PAD)
    labels = np.full_like(ids, -100)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.integers(4, 24, length)
        ids[row, 0], ids[row, length - 1] = alphabet.CLS, alphabet.EOS
        chosen = rng.random(length) < mask_ratio
        chosen[rng.integers(0, length)] = True
        labels[row, :length][chosen] = ids[row, :length][chosen]
        hidden = chosen & (rng.random(length) < 0.8)
        hidden[0] = False  # where nothing is visible the reference divides 0 by 0
        ids[row, :length][hidden] = alphabet.MASK
    attention_mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    arrays = {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def packed(batch: dict[str, torch.Tensor]) -> dict:
    """The same tokens end to end, as the packed collator lays them out."""
    keep = batch["attention_mask"].bool()
    lengths = keep.sum(1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "input_ids": batch["input_ids"][keep],
        "labels": batch["labels"][keep],
        "cu_seqlens": cu_seqlens,
        "max_seqlen": int(lengths.max()),
    }


NORMS = ("attention.LayerNorm", "LayerNorm")  # of one layer: those that transformers 5 may rename
ROTARY = "attention.self.rotary_embeddings.inv_freq"


def published_names(layers: int) -> set[str]:
    """The tensors of an ESM-2 as transformers 4.57 names them, and the position embeddings that the Hub's have."""
    linear = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    modules = (*linear, "intermediate.dense", "output.dense", *NORMS)
    modules = [f"esm.encoder.layer.{n}.{module}" for n in range(layers) for module in modules]
    modules += [
        "esm.encoder.emb_layer_norm_after",
        "esm.contact_head.regression",
        "lm_head.dense",
        "lm_head.layer_norm",
    ]
    names = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    names |= {f"esm.embeddings.{kind}_embeddings.weight" for kind in ("word", "position")} | {"lm_head.bias"}
    return names | {f"esm.encoder.layer.{n}.{ROTARY}" for n in range(layers)}


def as_transformers_5_24(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of published names as transformers 5.6 to 5.24 write a new model (docs/compatibility.md)."""
    old = {
        f"{norm}.{now}": f"{norm}.{then}" for norm in NORMS for now, then in (("weight", "gamma"), ("bias", "beta"))
    }
    written = {}
    for name, tensor in tensors.items():
        if name.startswith("esm.encoder.layer."):
            number, _, rest = name.removeprefix("esm.encoder.layer.").partition(".")
            name = f"esm.encoder.layer.{'*' if rest == ROTARY else number}.{old.get(rest, rest)}"
        written[name] = tensor
    return written
