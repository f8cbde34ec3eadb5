"""extras.speed.triton_adamw: in Triton's interpreter its steps are those of torch's AdamW; it compiles for GPUs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from common.cli import UserError
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.linear import RoundedWeights, copy_of
from common.precision import Precision
from common.training.masked_lm import MaskedLM
from common.training.optim import AdamW, OptimizerFlags, adamw_groups, build_optimizer
from common.training.step import Stepper
from common.training.task import BuiltModel
from tests.training_fixtures import arguments, on_ranks

SITE = Path(os.environ.get("TRITON_SITE", Path(sys.prefix) / "triton"))  # ./install.sh --dev
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None and not (SITE / "triton").exists(), reason="no Triton (./install.sh --dev)"
)
ALONE = World(0, 0, 1, torch.device("cpu"))


def _train(dataset: Path, out: str) -> None:
    """Three steps, of which the second is skipped: by the kernel in the interpreter, and by torch."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(SITE))
    from extras.speed.triton_adamw import TritonAdamW

    flags, found = OptimizerFlags(weight_decay=0.1, adam_epsilon=1e-6), []
    for kind in (TritonAdamW, AdamW):
        model = build_model(esm2_config(layers=1, hidden_size=40, heads=2), seed=1)
        precision = Precision(rounded=RoundedWeights(model.layers))
        task = MaskedLM(BuiltModel(model, "torch", "erf", (), precision, {}), arguments(dataset), ALONE)
        optimizer = kind(adamw_groups(model.parameters(), flags), lr=1e-2, fused=True)
        precision.attach(optimizer)
        stepper = Stepper(task, Strategy(model), precision, optimizer, ALONE, max_grad_norm=0.5)
        torch.manual_seed(0)
        losses = []
        for step in range(3):
            batch = task.example(60)
            if step == 1:
                poison = model.lm_head.dense.weight.register_hook(lambda gradient: gradient * torch.nan)
            result = stepper.step(step, 1e-2, [batch], task.counts([batch]))
            if step == 1:
                poison.remove()
            assert result.skipped == (step == 1)
            assert result.skipped or result.grad_norm > 0.5, "else nothing is clipped"
            losses.append(result.loss)
        named = dict(model.named_parameters())
        options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        states = {name: optimizer.state[p] for name, p in named.items()}
        copies = {name: copy for name, p in named.items() if (copy := copy_of(p)) is not None}
        found.append((options, torch.tensor(losses), {name: p.detach() for name, p in named.items()}, states, copies))
    torch.save(found, out)


@needs_triton
def test_triton_adamw_takes_the_steps_of_torch(dataset, tmp_path):
    codes, said = on_ranks(1, _train, dataset, str(tmp_path / "out"))
    assert codes == [0], said
    (options, losses, weights, states, copies), expected = torch.load(tmp_path / "out", weights_only=True)
    assert options == expected[0]
    torch.testing.assert_close(losses, expected[1], rtol=1e-5, atol=0)
    for name, weight in weights.items():
        # Measured: 1.3e-7 of weights whose two updates are 1e-2 each, 7e-7 of a moment's largest element.
        torch.testing.assert_close(weight, expected[2][name], rtol=0, atol=1e-6)
        state, torchs = states[name], expected[3][name]
        assert (state.keys(), state["step"]) == (torchs.keys(), 2)
        for key in ("exp_avg", "exp_avg_sq"):
            largest = torchs[key].abs().max().item()
            torch.testing.assert_close(state[key], torchs[key], rtol=0, atol=5e-6 * largest)
    assert len(copies) > 6
    for name, copy in copies.items():
        assert torch.equal(copy, weights[name].bfloat16())


def _compile(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    sys.path.append(str(SITE))
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from extras.speed.triton_adamw import BLOCK, update

    types = [*["*i64"] * 3, *["*fp32"] * 3, "i32", *["fp32"] * 5, "constexpr"]
    source = ASTSource(update, dict(zip(update.arg_names, types, strict=True)), {"BLOCK": BLOCK})
    for capability in (80, 90, 100):
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@needs_triton
def test_triton_adamw_compiles_for_gpus(tmp_path):
    codes, said = on_ranks(1, _compile, str(tmp_path))
    assert codes == [0], said


@pytest.mark.parametrize(("installed", "said"), [(True, "it updates fp32 weights on a GPU"), (False, "not installed")])
def test_triton_adamw_is_refused_in_one_line(monkeypatch, installed, said):
    monkeypatch.setattr("common.training.optim.find_spec", lambda name: installed or None)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=f"--triton_adamw: .*{said}.*: drop the flag"):
        build_optimizer(model, {}, OptimizerFlags(triton_adamw=True), Strategy(model), ALONE, False)
    with pytest.raises(UserError, match="--triton_adamw: not with --optim muon: drop one"):
        OptimizerFlags(optim="muon", triton_adamw=True).check()
