"""Gradients that are exchanged in bf16 are rounded before the sum, and the sum once more; those kept are the same."""

from __future__ import annotations

import torch
import torch.distributed as dist

from common.distributed.strategy import ReplicaFlags, replicate
from common.distributed.world import World
from tests.training_fixtures import on_ranks

# Kept until the process ends. A gloo thread takes the GIL after a hook's all-reduce; destroying a group, which
# comes with the last model's, holds the GIL and waits for that thread (torch 2.13): for ever, if it comes right after.
kept = []


def _check_gradients() -> None:
    """By hand: half of either rank's gradient, rounded; their sum, rounded; kept in fp32."""
    dist.init_process_group("gloo")
    world = World.from_environment(use_cpu=True)
    generator = torch.Generator().manual_seed(1)
    inputs, start = torch.randn(2, 40, 6, generator=generator), torch.randn(3, 6, generator=generator)
    gradients = [(x @ start.T).T @ x for x in inputs]  # of half the sum of the squares of x W^T
    for dtype in ("fp32", "bf16"):
        model = torch.nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(start)
        strategy = replicate(model, world, ReplicaFlags(ddp_bucket_dtype=dtype))
        kept.append(strategy)
        strategy.model(inputs[world.rank]).pow(2).mul(0.5).sum().backward()
        exact = (gradients[0] + gradients[1]) / 2
        assert model.weight.grad.dtype == torch.float32
        if dtype == "fp32":
            torch.testing.assert_close(model.weight.grad, exact, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(model.weight.grad, model.weight.grad.bfloat16().float())
            half = [gradient.bfloat16() / 2 for gradient in gradients]
            # Matmuls may sum in another order: now and then a number falls on the other side of a rounding.
            bound = 2**-7 * (half[0].abs() + half[1].abs()).float()
            assert ((model.weight.grad - (half[0] + half[1]).float()).abs() <= bound).all()
            assert not torch.allclose(model.weight.grad, exact, rtol=1e-5, atol=1e-5)
    _check_kept(world, inputs, start, gradients)
    dist.destroy_process_group()


def _check_kept(world: World, inputs: torch.Tensor, start: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Three steps of two micro-batches, into the same memory, which no backward pass made."""
    model = torch.nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(start)
    strategy = replicate(model, world, ReplicaFlags(cuda_graphs=True))
    kept.append(strategy)
    places = []
    for _ in range(3):
        for last in (False, True):
            made = []
            hook = model.weight.register_hook(lambda gradient, made=made: made.append(gradient.data_ptr()))
            with strategy.micro_batch(last):
                strategy.model(inputs[world.rank]).pow(2).mul(0.5).sum().backward()
            hook.remove()
            assert model.weight.grad.data_ptr() not in made
        torch.testing.assert_close(model.weight.grad, gradients[0] + gradients[1], rtol=1e-5, atol=1e-5)
        places.append(model.weight.grad.data_ptr())
        strategy.clear_gradients()
        assert not model.weight.grad.any()
    assert places[1] == places[2]  # DDP makes its buckets in the first


def test_replicate_all_reduces_in_bf16():
    codes, said = on_ranks(2, _check_gradients)
    assert codes == [0, 0], "\n".join(said)
