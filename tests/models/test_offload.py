"""Activations in host memory: the same gradients, what the device keeps meanwhile, and the order of streams on CUDA.

Nothing here copies on a GPU: a model goes a GPU's ways on the CPU, memory is not page-locked, and in the last test
streams and events only note what they are told.
"""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn

from common.models.layers.cpu import as_on_a_gpu
from common.models.layers.recompute import MODES, save_activations
from extras.speed import offload

empty_like = torch.empty_like


@pytest.fixture
def calls(monkeypatch):
    """The calls of layers, for as long as something needs what they saved."""
    made = []

    def call(*args):
        made.append(weakref.ref(new := Call(*args)))
        return new

    Call = offload._Call
    monkeypatch.setattr(offload, "_Call", call)
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs))
    with as_on_a_gpu():
        yield made


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("mode", MODES)
def test_offloading_keeps_bits_and_two_layers_on_device(calls, mode):
    torch.manual_seed(0)
    layers = [Layer() for _ in range(5)]
    gradients = []
    for offloaded in (False, True):
        if offloaded:
            save_activations(layers, mode)
            offload.offload_activations(layers)
        for seed in (1, 2):  # two micro-batches
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            for layer in layers:
                x = layer(x)
            if offloaded:
                kept = [call().on_device for call in calls]
                there = [sum(tensor.numel() for tensor in call().on_host) for call in calls]
                # `selective` keeps matmul outputs itself; a layer's input is 4 x 8, that of GELU 4 x 16
                assert there == [{"none": 4 * (8 + 16 + 16), "full": 4 * 8}.get(mode, there[0])] * 5
                assert [len(of) > 0 for of in kept] == [False] * 3 + [True] * 2
                del kept
            x.square().sum().backward()
            assert not [call for call in calls if call() is not None], "nothing outlives the backward pass"
            calls.clear()
        gradients.append([p.grad.clone() for layer in layers for p in layer.parameters()])
        for layer in layers:
            layer.zero_grad()
    assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        layers[0](torch.ones(1, 8))
    assert not calls


@pytest.mark.parametrize("mode", MODES)
def test_offloading_works_on_compiled_layers(calls, mode):
    """Compiled as a run compiles them (common.models.layers.compiling), but for what the graphs become."""
    torch.manual_seed(0)
    layers, x = [Layer() for _ in range(4)], torch.randn(4, 8)
    gradients = []
    for compiled in (False, True):
        if compiled:
            for layer in layers:
                layer.compile(dynamic=True, backend="aot_eager")
            save_activations(layers, mode)
            offload.offload_activations(layers)
        out = x
        for layer in layers:
            out = layer(out)
        if compiled:
            assert [bool(call().on_host) for call in calls] == [True] * 4
            assert [bool(call().on_device) for call in calls] == [False] * 2 + [True] * 2
        out.square().sum().backward()
        assert not [call for call in calls if call() is not None]
        gradients.append([p.grad.clone() for layer in layers for p in layer.parameters()])
        for layer in layers:
            layer.zero_grad()
    torch._dynamo.reset()
    for eager, graph in zip(*gradients, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-6)


def test_offloading_orders_cuda_streams(calls, monkeypatch):
    told = []

    class Noted:
        def __init__(self, name: str):
            self.name = name

        def wait_stream(self, other) -> None:
            told.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            told.append(f"{self.name} records {len(told)}")
            return len(told) - 1

        def wait_event(self, event) -> None:
            told.append(f"{self.name} waits for {event}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Noted("computing"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    offloading = offload.Offloading()
    offloading._stream = Noted("beside")
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]  # each saves its input, and its weights, which stay
    x = torch.ones(2, 4)
    for layer in layers:
        layer.forward = offloading.forward(layer)
        x = layer(x)
    out = ["beside waits for computing", "beside records 1", "beside waits for computing", "beside records 3"]
    # The first layer's copy has left before the third begins: its memory is free from there on.
    out += ["computing waits for 1", "beside waits for computing", "beside records 6"]
    assert told == out
    x.sum().backward()
    # The last two are still there, and no copy from them may run when they are let go; the first is fetched meanwhile.
    back = ["computing waits for 6", "computing waits for 3", "beside waits for computing", "beside records 10"]
    assert told == [*out, *back, "computing waits for 10"]
