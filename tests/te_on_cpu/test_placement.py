"""Tensors of the CPU and of the GPU do not mix where all are on a CPU: what a GPU's build refuses is refused."""

from __future__ import annotations

import pytest
import torch

from tests.training_fixtures import on_ranks


def _in_a_process_of_its_own() -> None:
    from tests.te_on_cpu import device

    device.install((9, 0))
    here, there = torch.arange(6.0), torch.arange(6.0, device="cuda")
    assert (str(here.device), str(there.device), there.is_cuda, here.is_cuda) == ("cpu", "cuda:0", True, False)
    assert there.get_device() == 0
    # What is computed lies where its operands do; a copy where it was asked for, in a storage of its own.
    assert [x.is_cuda for x in (there * 2, there[1:], there.new_zeros(3), torch.zeros_like(there))] == [True] * 4
    assert torch.equal(there.cpu(), here)
    moved = here.to("cuda")
    moved.zero_()
    assert here.sum() == 15
    assert there.to("cuda") is there
    assert there.to(torch.float16).is_cuda
    assert not there.to("cpu", torch.float16).is_cuda
    assert not torch.empty_like(there, device="cpu").is_cuda
    model = torch.nn.Linear(6, 2).cuda()
    model(there).sum().backward()
    assert all(p.is_cuda and p.grad.is_cuda for p in model.parameters())
    # A number may come from the CPU, and an index.
    assert (there * torch.tensor(2.0)).is_cuda
    assert there[torch.tensor([0, 2])].tolist() == [0.0, 2.0]
    there.copy_(here)
    for mixed in (
        lambda: here + there,
        lambda: model(here),
        lambda: torch.cat([here, there]),
        lambda: here.index_select(0, torch.tensor([1], device="cuda")),
        lambda: here.mul_(torch.tensor(2.0, device="cuda")),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), model.weight),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mixed()
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()
    _capture(here, there)


def _capture(here: torch.Tensor, there: torch.Tensor) -> None:
    """A replay computes from what its inputs hold by then; the host cannot wait for what is only recorded."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = there * 2
        doubled += 1
        for wait in (
            there.tolist,
            there.sum().item,
            lambda: there.nonzero(),
            lambda: bool(there.any()),
            lambda: there.copy_(here),
        ):
            with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
                wait()
    there.fill_(5)
    graph.replay()
    assert doubled.tolist() == [11] * 6


def test_placement_refuses_mixed_devices():
    codes, said = on_ranks(1, _in_a_process_of_its_own)
    assert codes == [0], said[0]
