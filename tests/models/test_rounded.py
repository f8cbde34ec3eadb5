"""Weights are rounded to bf16 once a step, and not at every use: with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers import linear
from common.models.layers.compiling import compile_layers
from common.models.layers.cpu import as_on_a_gpu
from common.models.layers.initialise import initialise
from common.models.layers.linear import RoundedWeights
from common.models.layers.recompute import save_activations
from common.precision import Precision
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.model import DecoderForCausalLM
from extras.plan.step_model.counts import counted

T = 60


class Casts(TorchDispatchMode):
    """How often a weight of a product is converted."""

    def __init__(self, model):
        super().__init__()
        self.places = {p.data_ptr() for p in model.layers.parameters() if p.dim() == 2}
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.places:
            self.number += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def esm2():
    return build_model(esm2_config(layers=2, hidden_size=32, heads=2), seed=1)


def decoder(experts: int = 0):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DecoderConfig(
        vocab_size=64, num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=1, **sizes
    )
    with torch.device("meta"):
        model = DecoderForCausalLM(config)
    model.to_empty(device="cpu")
    initialise(model, 1, 0.2)
    return model


def passes(model, micro_batches: int = 2) -> list[Tensor]:
    """Gradients of some micro-batches under autocast."""
    generator = torch.Generator().manual_seed(1)
    bounds = torch.tensor([0, 25, T], dtype=torch.int32)
    for _ in range(micro_batches):
        ids, labels = torch.randint(4, 24, (2, T), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, cu_seqlens=bounds, max_seqlen=35, labels=labels).loss_sum
        loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("made", [esm2, decoder])
def test_rounded_weights_serve_micro_batches_and_recomputation(made):
    gradients, casts = [], []
    for ahead in (False, True):
        model = made()
        save_activations(list(model.layers), "full")
        kept = RoundedWeights(model.layers) if ahead else None
        with Casts(model) as seen:
            gradients.append(passes(model))
        casts.append(seen.number)
    assert casts == [2 * 4 * 2 * 2, 0]  # layers x matmuls x micro-batches x (forward, recomputed forward)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    Precision(rounded=kept).attach(optimizer)
    before = [copy.clone() for copy in kept.copies]
    optimizer.step()
    assert all(torch.equal(copy, weight.bfloat16()) for copy, weight in zip(kept.copies, kept.weights, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(before, kept.copies, strict=True))


def test_rounded_weights_get_fp32_gradients(monkeypatch):
    """On a GPU: neither rounded to bf16 on its way to the weight, nor written in bf16. Beside float64."""
    monkeypatch.setattr(linear, "_takes_copies", lambda x: True)  # which a CPU has no operator for
    generator = torch.Generator().manual_seed(3)
    module = linear.Linear(48, 40)
    initialise(module, 1, 0.2)
    x, upstream = (torch.randn(T, size, generator=generator).bfloat16() for size in (48, 40))
    RoundedWeights([module])
    with torch.autocast("cpu", torch.bfloat16):
        result = module(x.requires_grad_())
    result.backward(upstream)
    exact = upstream.double().t() @ x.double()
    for found, expected in ((module.weight.grad, exact), (module.bias.grad, upstream.double().sum(0))):
        assert found.dtype == torch.float32
        # fp32's rounding, 6e-8, for each of T numbers in a sum; one of bf16's, 2e-3, is far more.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=6e-8 * T * expected.abs().max().item())
    assert x.grad.dtype == result.dtype == torch.bfloat16
    copies = torch.nn.functional.linear(x, module.weight.bfloat16(), module.bias.bfloat16())
    assert torch.equal(result, copies)


def test_rounded_weights_convert_no_gradient_on_gpu():
    with FakeTensorMode(), as_on_a_gpu():
        module = linear.Linear(48, 40)
        RoundedWeights([module])
        x = torch.empty(T, 48, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            result = module(x)
        with counted() as work:
            result.sum().backward()
    assert module.weight.grad.dtype == torch.float32
    assert work.matmuls == {(40, 48, T): 1, (T, 48, 40): 1}
    assert set(work.by_operator) <= {"sum", "expand", "ones_like"}, work.by_operator


def test_rounded_weights_skip_experts():
    kept = RoundedWeights(decoder(experts=2).layers)
    assert len(kept.weights) == 2 * 2  # of attention


def test_rounded_weights_are_graph_inputs():
    """Not as constants: those of the second step are others."""
    results = []
    for compiled in (False, True):
        model = esm2()
        kept = RoundedWeights(model.layers)
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()  # of this process, whoever has compiled in it
            compile_layers(model, "cpu", "aot_eager")
        passes(model, 1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
                weight.grad = None
        kept.refresh()
        results.append(passes(model, 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
