"""Recomputation of a layer of Transformer Engine's modules, which minds FP8's scales."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


class RecomputedByTe:
    """Of a layer (beside nn.Module): what common.layers.recompute calls for `full`."""

    def recompute(self) -> None:
        """Keep no activations: run the forward pass again when the backward pass comes.

        te.checkpoint minds FP8's scales, but takes each layer's second forward pass for the end of a step: the amax
        history would age as many times as there are layers. Inside another autocast it is no outermost one that ends.
        """

        def contexts():
            # Of the first pass, of the second; with the recipe there is, for it would note a default one beside it.
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            return nullcontext(), te.autocast(enabled=False, recipe=recipe)

        self.forward = partial(te.checkpoint, self.forward, use_reentrant=False, context_fn=contexts)
