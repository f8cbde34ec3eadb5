"""--fused_gelu over a stand-in of QuACK's two kernels (quack_on_cpu.py): the layer is the unfused one, forward and
backward, compiled, recomputed or sharded. What a CPU cannot show is the kernels (tests/gpu/test_training.py)."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from benchmarks.measuring import file_first
from common.cli import UserError
from common.distributed.world import World
from common.models.esm2.config import esm2_config
from common.models.esm2.family import FAMILY
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from common.models.layers import linear
from common.models.layers.compiling import compile_layers
from common.models.layers.initialise import initialise
from common.models.layers.linear import RoundedWeights
from common.models.layers.recompute import save_activations
from common.training.command_line import parse_run
from extras.speed import fused_gelu
from tests.data_fixtures import load_script
from tests.extras.speed import quack_on_cpu
from tests.models.reference import packed, random_batch

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)
CONFIG = esm2_config(layers=2, hidden_size=32, heads=2)
BATCH = packed(random_batch([30, 17, 18]))


@pytest.fixture(autouse=True)
def quack(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack_on_cpu)


def test_fused_mlp_is_the_unfused_one_in_float64():
    generator = torch.Generator().manual_seed(0)
    shapes = (20, 32), (48, 32), (48,), (32, 48), (32,)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    grad = torch.randn(20, 32, generator=generator, dtype=torch.float64)
    fused = fused_gelu.FusedMLP.apply(*leaves, *(x.detach() for x in leaves[1:]))
    x, fc1_weight, fc1_bias, fc2_weight, fc2_bias = leaves
    apart = F.linear(F.gelu(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)
    torch.testing.assert_close(fused, apart, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, grad) for y in (fused, apart)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def gradients(
    fused: bool, bf16: bool = True, recompute: str = "none", compiled: list | None = None
) -> list[torch.Tensor]:
    """Of a tiny model's loss. compiled: its layers are, and their graphs are added to it."""
    model = build_model(CONFIG, seed=1)
    if fused:
        fused_gelu.with_fused_gelu(lambda: model)
    for layer in model.layers:
        with torch.no_grad():
            layer.layernorm_mlp.fc1_weight.mul_(10)  # sums of about 1, where GELU bends
    if bf16:
        RoundedWeights(model.layers)
    save_activations(list(model.layers), recompute)
    if compiled is not None:
        compile_layers(model, "cpu", lambda graph, _: compiled.append(graph) or graph.forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(**BATCH).loss_sum
    loss.backward()
    return [p.grad for p in model.parameters()]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> torch.Tensor:
    """Of each parameter's gradient, by its norm."""
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(ours, theirs, strict=True)])


def test_fused_gelu_in_bf16_is_no_further_from_fp32_than_unfused(monkeypatch):
    monkeypatch.setattr(linear, "_takes_copies", lambda x: True)  # as a GPU: fp32 gradients of bf16 weights
    exact, fused, apart = gradients(False, bf16=False), gradients(True), gradients(False)
    assert all(x.dtype == torch.float32 for x in fused)
    assert distance(apart, exact).max() > 1e-3, "bf16 shows"
    assert distance(fused, exact).mean() < 1.1 * distance(apart, exact).mean()
    assert distance(fused, exact).max() < 1.5 * distance(apart, exact).max()


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_fused_gelu_recomputes(recompute):
    assert distance(gradients(True, recompute=recompute), gradients(True)).max() < 1e-6


def test_fused_gelu_compiles_to_one_graph():
    torch.compiler.reset()
    graphs: list = []
    assert distance(gradients(True, compiled=graphs), gradients(True)).max() < 1e-6
    assert len(graphs) == 1, "of all layers"


def test_fused_gelu_takes_sharded_weights():
    """Layers gathered in bf16 for the forward pass, and again for the backward pass."""
    script, found = load_script("train_fsdp2.py"), []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for fused in (True, False):
        with torch.device("meta"):
            model = Esm2ForMaskedLM(CONFIG)
        if fused:
            fused_gelu.with_fused_gelu(lambda made=model: made)
        script.shard(model, ALONE, script.FsdpFlags(), bf16=True)
        model.to_empty(device="cpu")
        initialise(model, 1, 0.2)
        with torch.autocast("cpu", torch.bfloat16):
            model(**BATCH).loss_sum.backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    torch.distributed.destroy_process_group()
    assert 0 < distance(*found).max() < 0.03


WORDS = ("--config_name=facebook/esm2_t6_8M_UR50D", "--dataset_dir=x", "--output_dir=y")


class DryRun(World):
    is_dry_run = True


def chosen(
    *words: str,
    script: tuple[str, str] = ("train_ddp.py", "DdpFlags"),
    world: type[World] = DryRun,
    **keys: bool,
):
    """keys: of the file of flags, beside fused_gelu."""
    file, _ = file_first({"fused_gelu": True} | keys)
    args = parse_run("", getattr(load_script(script[0]), script[1]), [*file, *WORDS, *words])
    return FAMILY.choose(args, world(0, 0, 1, CPU), (), {})


def test_fused_gelu_is_chosen_for_every_layer():
    spec = chosen("--bf16")
    assert spec.remarks[-1] == "GELU: exact, in the MLP's matmuls (--fused_gelu)"
    with torch.device("meta"):
        assert all(layer.layernorm_mlp.fused is fused_gelu.fused_mlp for layer in spec.make().layers)


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["--bf16", "--gelu=tanh"], {}, "it is the exact GELU, and this run's is the tanh approximation: give --gelu"),
        ([], {}, "it computes in bf16: add --bf16"),
        (["--bf16", "--fp8", "--emulate_precision"], {}, "--fp8 and --fp4 have matmuls of their own: drop those"),
        (
            ["--bf16", "--config_overrides=intermediate_size=100"],
            {},
            "hidden_size 320 and intermediate_size 100",
        ),
        (["--bf16"], {"script": ("train_mfsdp.py", "MegatronFlags")}, "no one has tried it with train_mfsdp.py"),
        (["--bf16"], {"cuda_graphs": True}, "no one has replayed it by --cuda_graphs"),
        (["--bf16"], {"world": World}, "QuACK needs an NVIDIA GPU, and this run is on a CPU: run on one, or drop"),
    ],
)
def test_fused_gelu_refuses_what_it_cannot_do(words, options, said):
    with pytest.raises(UserError, match=f"--fused_gelu: {said}"):
        chosen(*words, **options)


def test_fused_gelu_says_what_is_lacking(monkeypatch):
    device, versions = torch.device("cuda"), {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "9.x or 10.x, and this device has 8.0" in fused_gelu.lacking(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(metadata, "version", lambda name: versions[name])
    versions["quack-kernels"] = "0.6.2"
    assert fused_gelu.lacking(device) == "quack-kernels is 0.6.2, without it: install 0.6.3 or later"
    versions["quack-kernels"] = "0.6.5"
    assert fused_gelu.lacking(device) is None


def test_fused_gelu_tries_the_kernels_first(monkeypatch):
    assert fused_gelu.failure((64, 64), CPU) is None
    right = quack_on_cpu.gemm_dact
    monkeypatch.setattr(quack_on_cpu, "gemm_dact", lambda grad, *args, **options: right(grad * 1.1, *args, **options))
    assert "its results differ from fp32's by 1" in fused_gelu.failure((64, 256), CPU)
    monkeypatch.delattr(quack_on_cpu, "gemm_dact")
    assert "QuACK's kernels fail here (ImportError: " in fused_gelu.failure((64, 256), CPU)
