"""The time of a training step of ESM-2 on a GPU, without one: its work counted, and a roofline of it.

Model code runs on fake tensors, on the code path of CUDA (bf16 autocast, attention as one operator): the
encoder layer, scaled by the number of layers; embeddings, head and loss; clipping and AdamW. Counted are matmuls,
attention, bytes that all other kernels move, kernels and waits for the device; of compiled layers, kernels fused by
`fused`. benchmarks/step_model.py has the tables, and the checks on what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from common.compat import FakeTensorMode
from common.data.collators import Batch, MaskingCollator, to_device
from common.data.packing import Pack
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS
from common.models.esm2.config import Esm2Config, esm2_config
from common.models.esm2.family import FAMILY
from common.models.esm2.layers_torch import TransformerLayer, prepare
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.cpu import as_on_a_gpu
from common.models.layers.linear import RoundedWeights, use_copy
from common.models.layers.residual import begin, total
from common.shape_buckets import filled_up
from common.training.run_logger import PEAK_FLOPS
from extras.plan.dry_run.memory_tracker import MemoryTracker
from extras.plan.step_model.communication import Times
from extras.plan.step_model.counts import Work, counted
from extras.plan.step_model.fused import fused_work, go_back, graphs_of
from extras.speed.fused_gelu import fused_mlp

EAGER, COMPILED = "eager", "compiled"
BF16 = "compiled, --bf16_residual"  # layers
MODES = (EAGER, COMPILED, BF16)
GELU = f"{BF16} --fused_gelu"


@dataclass(frozen=True)
class Device:
    """bandwidth: of the memory, bytes a second; link: between GPUs of a node, bytes a second in one direction; watts:
    the limit of its power. By the vendor's data sheets (SXM). Efficiencies: the share of each peak that kernels
    reach."""

    name: str
    bandwidth: float
    link: float
    watts: int
    # Reached on the H100 of results/gpu_profile.md at 650M and 16,384 tokens: the matmuls' 63.9 TFLOP in 90.7 ms; the
    # 0.50 GB of GELU's backward kernel in 0.181 ms; attention in 29.1 ms. Taken for the other devices too.
    of_matmuls: float = 0.71
    of_bandwidth: float = 0.83
    of_attention: float = 0.16

    @property
    def peak(self) -> float:
        return PEAK_FLOPS[self.name]


DEVICES = [
    Device("H100", 3.35e12, 450e9, 700),
    Device("H200", 4.8e12, 450e9, 700),
    Device("B200", 8.0e12, 900e9, 1000),
]
A100 = Device("A100", 2.04e12, 300e9, 400)
# Seconds a host takes to launch a kernel: so that the rows of 8M and 150M in results/gpu_throughput.md, which wait for
# their host, are met in their geometric mean, and check nothing. That host was a virtual machine; others differ.
LAUNCH = 53e-6
MAX_LENGTH = 1024
LOG_MEDIAN, LOG_SPREAD = 5.6, 0.75  # of the lengths of UniRef50's proteins, with their ends


class Shape(NamedTuple):
    """Of an ESM-2 encoder: what its step's work depends on."""

    layers: int
    hidden: int
    heads: int
    intermediate: int

    @classmethod
    def of(cls, config: Esm2Config) -> Shape:
        sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size
        return cls(*sizes)

    @property
    def config(self) -> Esm2Config:
        return esm2_config(self.layers, self.hidden, self.heads, intermediate_size=self.intermediate)


@dataclass(frozen=True)
class Step:
    """Work between one wait for the device and the next, in turn; `layer`: of one encoder layer, forward, backward;
    `weights`: how many a layer has, and the rest of the model."""

    phases: list[Work]
    layer: tuple[Work, Work]
    layers: int
    weights: tuple[int, int]
    tokens: int
    flops: float  # as MFU counts them
    pairs: int  # tokens that attend to each other
    hidden: int

    @property
    def all(self) -> Work:
        return sum(self.phases, Work())

    @property
    def parameters(self) -> int:
        return self.layers * self.weights[0] + self.weights[1]

    def parts(self, device: Device) -> dict[str, float]:
        """Seconds of matmuls, attention and all other kernels, and of a host that launches them."""
        work = self.all
        return {
            "matmuls": work.matmul_flops / device.peak / device.of_matmuls,
            "attention": 2 * self.pairs * self.hidden * work.attention / device.peak / device.of_attention,
            "other kernels": work.moved / device.bandwidth / device.of_bandwidth,
            "launching": work.kernels * LAUNCH,
        }

    def seconds(self, device: Device) -> float:
        """Between two waits whichever takes longer: the kernels, or the host that launches them."""
        phases = [replace(self, phases=[phase]).parts(device) for phase in self.phases]
        return sum(max(sum(parts.values()) - parts["launching"], parts["launching"]) for parts in phases)

    def mfu(self, device: Device) -> float:
        return self.flops / self.seconds(device) / device.peak

    def times(self, device: Device) -> Times:
        """What its communication is modelled by. Of a step of one pack."""
        forward, backward = (replace(self, phases=[work]).seconds(device) for work in self.layer)
        attention = tuple(replace(self, phases=[work]).parts(device)["attention"] for work in self.layer)
        shape = self.weights, self.tokens, self.hidden
        return Times(self.seconds(device), self.layers, forward, backward, attention, *shape)


@cache
def step_of(
    shape: Shape,
    tokens: int,
    mode: str,
    packs: int = 1,
    rounded_ahead: bool = True,
    added_up: bool = False,
    recomputed: bool = False,
    longest: int = MAX_LENGTH,
) -> Step:
    """A step on typical packs of `tokens` tokens.

    packs: whose gradients are added up; rounded_ahead: weights to bf16 once a step, not in every pack; added_up: each
    layer makes its last sum itself; recomputed: layers run forward again in the backward pass; longest: tokens of a
    sequence, at most.
    """
    config = shape.config
    batch = typical_pack(tokens, longest)
    layer = layer_work(shape, tokens, mode, rounded_ahead, added_up)
    layers = config.num_hidden_layers
    forward, backward, optimiser, again, rounding, waits, parameters = ends_work(shape, tokens, longest)
    passes = [forward + layer[0] * layers, backward + (layer[1] + layer[0] * recomputed) * layers]
    if not waits:  # the backward pass is launched while the forward pass runs
        passes = [passes[0] + passes[1]]
    more = again[0] + again[1] * layers
    end = optimiser[0] + optimiser[1] * layers + rounding * (layers * rounded_ahead)
    phases = passes + [*passes[:-1], passes[-1] + more] * (packs - 1) + [end]
    if not waits:
        phases = [sum(phases[:-1], Work()), end]
    flops = FAMILY.flops(config, *(batch[key] for key in ("num_tokens", "sum_squared_lengths", "num_targets")))
    counts = packs * batch["num_tokens"], packs * flops, batch["sum_squared_lengths"], config.hidden_size
    return Step(phases, layer, layers, (parameters[1], parameters[0]), *counts)


@cache
def layer_work(
    shape: Shape, tokens: int, mode: str, rounded_ahead: bool = True, added_up: bool = False
) -> tuple[Work, Work]:
    """Of one encoder layer: forward pass, backward pass."""
    config = shape.config
    with FakeTensorMode(), as_on_a_gpu():
        layer = TransformerLayer(config)
        if mode == GELU:
            layer.layernorm_mlp.fused = fused_mlp
        x, rotary, bounds, longest = _call(
            config, filled_up(tokens), torch.bfloat16 if mode in (BF16, GELU) else torch.float32
        )
        weights = dict(layer.named_parameters())
        kept = RoundedWeights([layer] if rounded_ahead else [])
        names = {id(weight): name for name, weight in weights.items()}
        copies = {names[id(weight)]: copy for weight, copy in zip(kept.weights, kept.copies, strict=True)}

        def function(weights, copies, x, cos, sin, bounds):
            for name, copy in copies.items():  # where a graph is traced, other tensors stand for them
                use_copy(weights[name], copy)
            with torch.autocast("cpu", torch.bfloat16):
                stream = torch.func.functional_call(layer, weights, (x, (cos, sin), bounds, longest))
            return total(stream) if added_up else stream

        with torch.autocast("cpu", torch.bfloat16):
            args = weights, copies, x if added_up else begin(x), *rotary, bounds
        if mode != EAGER:
            forward, backward = (fused_work(graph) for graph in graphs_of(function, *args))
            return forward, backward
        with counted() as forward:
            y = function(*args)
        with counted() as backward:
            go_back(y)
    return forward, backward


@cache
def ends_work(
    shape: Shape, tokens: int, longest: int = MAX_LENGTH
) -> tuple[Work, Work, tuple[Work, Work], tuple[Work, Work], Work, bool, tuple[int, int]]:
    """Of what is not a layer: forward, backward; AdamW and clipping of its weights and of a layer's; adding up the
    gradients of both; rounding a layer's weights; whether the host waits in the forward pass; and how many weights it
    has, and a layer."""
    config = shape.config
    batch = typical_pack(tokens, longest)
    with MemoryTracker(), as_on_a_gpu():
        model, layer = Esm2ForMaskedLM(replace(config, num_hidden_layers=0)), TransformerLayer(config)
        with counted() as forward, torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        with counted() as backward:
            loss.backward()
        optimisers, additions = zip(*(optimiser_work(module) for module in (model, layer)), strict=True)
        kept = RoundedWeights([layer])
        with counted() as rounding:
            kept.refresh()
        sizes = tuple(sum(p.numel() for p in module.parameters()) for module in (model, layer))
    return forward, backward, optimisers, additions, rounding, bool(forward.waits), sizes


def loss_of(model: Esm2ForMaskedLM, batch: Batch) -> torch.Tensor:
    return model(**to_device(batch, torch.device("cpu"))).loss_sum


def optimiser_work(module: torch.nn.Module) -> tuple[Work, Work]:
    """Clipping and AdamW of a module's weights; and adding a pack's gradients to those of the packs before."""
    weights = list(module.parameters())
    optimiser = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimiser.step()  # the first makes the moments
    with counted() as work:
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimiser.step()
    with counted() as addition:
        for weight in weights:
            weight.grad.add_(torch.empty_like(weight))
    return work, addition


def _call(config: Esm2Config, tokens: int, residual: torch.dtype = torch.float32) -> tuple:
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    rotary, longest = prepare(tokens, bounds, tokens, config.hidden_size // config.num_attention_heads)
    return torch.zeros(tokens, config.hidden_size, dtype=residual, requires_grad=True), rotary, bounds, longest


def typical_pack(tokens: int, longest: int = MAX_LENGTH) -> Batch:
    """A pack of `tokens` tokens, or two less, of random proteins whose lengths are distributed as UniRef50's."""
    rng = np.random.default_rng(0)
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(np.clip(np.exp(rng.normal(LOG_MEDIAN, LOG_SPREAD)), 30, longest - 2)) + 2
        lengths.append(left if left - length < 3 else length)
    lengths = np.minimum(np.array(lengths), longest)
    ids = rng.integers(4, 24, lengths.sum()).astype(np.uint8)
    ends = lengths.cumsum()
    ids[ends - lengths], ids[ends - 1] = CLS, EOS
    number = np.arange(len(lengths))
    return MaskingCollator(ESM2_TOKENS, 0)(Pack(number, np.zeros_like(number), lengths, 0), ids)
