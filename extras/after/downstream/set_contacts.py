"""Features of contacts from models that read sets: attention maps of a protein that follows homologs, or is alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.models.esm2.layers_torch import SelfAttention
from common.models.layers.attention import rotate
from extras.after.downstream.contacts import corrected
from extras.after.downstream.structures import Chain
from extras.after.inference.contexts import Contexts
from extras.after.inference.encoder import Encoder


class SetFeatures:
    """Of a chain: float32 [L, L, attentions x heads], of all layers in turn, means over its contexts.

    Over the set a map is the attention among the protein's own tokens: what goes to its homologs is left
    out, and the rest sums to one, so that contexts of any size compare.
    """

    def __init__(self, encoder: Encoder, contexts: Contexts | None = None, follow: Collection[Chain] = ()):
        """follow: the chains that are read with `contexts`; others are read alone."""
        self.encoder, self.contexts, self.follow = encoder, contexts, set(follow)

    def __call__(self, chain: Chain) -> np.ndarray:
        drawn: list[list[bytes]] = [[]]
        if self.contexts is not None and chain in self.follow:
            drawn = self.contexts.of(chain.name, chain.sequence.encode())
        total: Any = 0.0
        for homologs in drawn:
            total = total + corrected(self.maps(chain.sequence, self.encoder.read(homologs)))
        return total / len(drawn)

    def maps(self, sequence: str, context: Any = None) -> Tensor:
        """fp32 [attentions x heads, L, L]: attention of the residues, context as of `Encoder.read`."""
        alphabet, found = self.encoder.alphabet, []
        ids = alphabet.encode(sequence)
        residues = slice(len(alphabet.head), len(ids) - len(alphabet.tail))

        def record(module: Any, inputs: tuple, _output: Tensor) -> None:
            x, (cos, sin) = inputs[:2]
            q, k, _ = module.layernorm_qkv(x).view(len(x), module.heads, 3, -1).unbind(2)
            q, k = (rotate(each, cos, sin)[: len(ids)].transpose(0, 1).float() for each in (q, k))  # without fillers
            attention = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
            found.append(attention[:, residues, residues].cpu())

        attentions = [module for module in self.encoder.model.modules() if isinstance(module, SelfAttention)]
        handles = [module.register_forward_hook(record) for module in attentions]
        try:
            self.encoder.hidden([ids], context=context)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(found)
