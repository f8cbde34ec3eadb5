"""cuda_graphs with --backend te: layers recorded as CUDA graphs by Transformer Engine's `make_graphed_callables`.

A graph reads and writes fixed addresses: inputs are copied there, weights are read where they are. Layers are recorded
before a strategy wraps the model, as torch's notes on CUDA ask with DistributedDataParallel: the recorded backward
passes then have none of its hooks, and those that run later give it gradients to all-reduce.

A replay overwrites the activations and gradients of the one before. So a pack's backward pass comes before the next
pack's forward pass, and gradients are added to memory of their own (`Strategy.keep_gradients`) without a copy in
between. They and the layers' inputs take memory that eager layers do not hold: 4 bytes a weight, and one residual
stream a layer.

Written against Transformer Engine 2.20. No GPU has run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformer_engine.pytorch import make_graphed_callables

from common.data.collators import Batch
from common.data.crops import Pack
from common.models.layers.residual import Model, Stream, total
from common.training.task import Task


def record_run(task: Task) -> None:
    """Record the layers of a run's model for its packs, all of which are filled up to one shape."""
    empty = task.collator(1)(Pack.empty(), np.zeros(0, dtype=np.uint8))
    record_layers(task.built.model, empty, task.loss_sum)


def record_layers(model: Model, batch: Batch, run: Callable[[Model, Batch], Any]) -> None:
    """From now on layers in training replay graphs, in bf16, for packs of the shape of `batch`, whatever their
    boundaries; for other packs, and in evaluations, they compute as before.

    run: passes a batch through the model, under the run's autocast; called once, without gradients.
    """
    calls: list[tuple[Any, ...]] = []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: calls.append(inputs)) for layer in model.layers]
    with torch.no_grad():
        run(model, batch)
    for hook in hooks:
        hook.remove()
    recorded, samples = [], []
    for layer, (stream, rotary, cu_seqlens, max_seqlen, *_) in zip(model.layers, calls, strict=True):
        recorded.append(RecordedLayer(layer, max_seqlen))
        samples.append((torch.zeros_like(total(stream)).requires_grad_(), rotary, cu_seqlens))
    make_graphed_callables(tuple(recorded), tuple(samples), clone_param_grads_on_return=False)
    for layer, graph, (x, _, cu_seqlens) in zip(model.layers, recorded, samples, strict=True):
        layer.forward = _replaying(layer, graph, (x.shape, x.dtype, cu_seqlens.shape))


class RecordedLayer(nn.Module):
    """A layer as a function of tensors alone, for one bound on the lengths of sequences."""

    def __init__(self, layer: nn.Module, max_seqlen: int):
        super().__init__()
        self.layer, self.compute, self.max_seqlen = layer, layer.forward, max_seqlen

    def forward(self, x: Tensor, rotary: Any, cu_seqlens: Tensor) -> Any:
        # Only here: the backward pass is recorded outside of autocast, as it runs. A cache would keep casts of weights
        # beyond the graph that makes them.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return self.compute(x, rotary, cu_seqlens, self.max_seqlen)


def _replaying(
    layer: nn.Module, graph: RecordedLayer, recorded: tuple[torch.Size, torch.dtype, torch.Size]
) -> Callable:
    """The layer's forward pass: the graph where it holds."""

    def forward(stream: Tensor | Stream, rotary: Any, cu_seqlens: Tensor, max_seqlen: int, *others: Any) -> Any:
        if layer.training and torch.is_grad_enabled() and max_seqlen == graph.max_seqlen:
            x = total(stream)
            if (x.shape, x.dtype, cu_seqlens.shape) == recorded:
                return graph(x, rotary, cu_seqlens)
        return graph.compute(stream, rotary, cu_seqlens, max_seqlen, *others)

    return forward
