"""What only a GPU can show. Skipped without one: see docs/hardware.md for what has run where."""

from __future__ import annotations

import pytest
import torch

from common.data.collators import FillingCollator
from common.distributed.strategy import ReplicaFlags, replicate
from common.distributed.world import World
from common.models.esm2.alphabet import PAD
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.compiling import compile_layers
from common.models.layers.initialise import initialise
from common.models.layers.linear import Linear, RoundedWeights
from extras.speed import fused_gelu
from tests.models.reference import ours_like, packed, random_batch, reference_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
LENGTHS = [1, 2, 3, 40, 129, 17, 64, 300]


def on_gpu(batch: dict) -> dict:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm()).item()


def test_fp32_equals_the_reference_on_the_same_gpu():
    reference = reference_model(esm2_config(3, 320, 20)).cuda()
    model = ours_like(reference.cpu()).cuda()
    reference.cuda()
    batch = random_batch(LENGTHS)
    keep = batch["attention_mask"].bool()
    inputs = on_gpu({k: v for k, v in packed(batch).items() if k != "labels"})
    with torch.no_grad():
        theirs = reference(**on_gpu({k: batch[k] for k in ("input_ids", "attention_mask")})).logits[keep.cuda()]
        ours = model(**inputs).logits
    assert ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item() < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused GELU"])
def test_bf16_layers_equal_fp32_on_the_cpu(compiled, fused):
    """Logits, loss and gradients; bf16 has 8 bits, so a few per cent after three layers and a backward pass."""
    config = esm2_config(3, 320, 20)
    exact, model = build_model(config, seed=0), build_model(config, seed=0, device="cuda")
    if fused:
        if lack := fused_gelu.lacking(torch.device("cuda")):
            pytest.skip(lack)
        assert fused_gelu.failure((config.hidden_size, config.intermediate_size), torch.device("cuda")) is None
        fused_gelu.with_fused_gelu(lambda: model)
    if compiled:
        compile_layers(model, "cuda")
    batch = packed(random_batch(LENGTHS))
    expected = exact(**batch).loss_sum
    expected.backward()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**on_gpu(batch)).loss_sum
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 5e-3
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours.grad, theirs.grad) < 0.05, name


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_filled_packs_equal_fp32_on_the_cpu(cuda_graphs):
    """Three steps of two micro-batches, compiled for one shape; bf16 as above."""
    config, world = esm2_config(3, 320, 20), World(0, 0, 1, torch.device("cuda"))
    exact, model = build_model(config, seed=0), build_model(config, seed=0, device="cuda")
    compile_layers(model, "cuda", static_shape=True, cuda_graphs=cuda_graphs)
    strategy = replicate(model, world, ReplicaFlags(cuda_graphs=cuda_graphs))
    for step in range(3):
        for number in range(2):
            batch = packed(random_batch(LENGTHS[step + number :], seed=number))
            filled = FillingCollator(lambda *_, batch=batch: batch, 640, 16, 300, 0, PAD)(None, None)
            exact(**batch).loss_sum.backward()
            with torch.autocast("cuda", torch.bfloat16):
                model(**on_gpu(filled)).loss_sum.backward()
        for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert relative(ours.grad, theirs.grad) < 0.05, (step, name)
        exact.zero_grad()
        strategy.clear_gradients()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_bf16_weights_are_fp32_from_the_matmul_on(compiled):
    """Of one layer's matmuls, beside float64 matmuls of the same operands."""
    module, x = Linear(320, 960).cuda(), torch.randn(512, 320, device="cuda").bfloat16()
    initialise(module, 1, 0.1)
    RoundedWeights([module])
    upstream = torch.randn(512, 960, device="cuda").bfloat16()
    multiply = torch.compile(module) if compiled else module
    with torch.autocast("cuda", torch.bfloat16):
        result = multiply(x)
    result.backward(upstream)
    exact = upstream.double().t() @ x.double()
    assert module.weight.grad.dtype == torch.float32
    # fp32's rounding of 512 numbers in a sum; bf16's of the result would be 2e-3.
    assert (module.weight.grad.double() - exact).norm() / exact.norm() < 1e-5
    torch.testing.assert_close(module.bias.grad.double(), upstream.double().sum(0), rtol=1e-5, atol=1e-3)


def test_initial_weights_do_not_depend_on_the_device():
    config = esm2_config(2, 64, 4)
    for a, b in zip(build_model(config, 3).parameters(), build_model(config, 3, "cuda").parameters(), strict=True):
        assert torch.equal(a, b.cpu())
