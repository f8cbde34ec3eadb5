"""Transformer Engine beside the torch backend and transformers, on a GPU that has it (docs/hardware.md: which).
Tolerances follow from the formats' precision."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from common.cli import UserError
from common.distributed.world import World
from common.models.esm2.config import HIDDEN_ACT, esm2_config
from common.models.esm2.family import NO_KERNEL
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from common.models.layers.recompute import save_activations
from extras.formats.emulation import Emulation
from extras.formats.fp8_block import BlockScaling
from extras.formats.fp8_current import CurrentScaling
from extras.formats.fp8_delayed import DelayedScaling
from extras.formats.mxfp8 import MXFP8BlockScaling
from extras.formats.nvfp4 import NVFP4BlockScaling
from tests.gpu import test_training
from tests.gpu.test_training import on_gpu, relative
from tests.models.reference import ours_like, packed, random_batch, reference_model
from tests.training_fixtures import same_bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]
TANH = {"hidden_act": HIDDEN_ACT["tanh"]}
# Over a stand-in on a CPU (tests/te_on_cpu) the same, with less to compute.
SMALL = "GPU_TESTS_SMALL" in os.environ
CONFIG = (3, 64, 4) if SMALL else (3, 320, 20)
LENGTHS = [1, 2, 3, 40, 17, 65] if SMALL else test_training.LENGTHS
STEPS, FEW_STEPS = (4, 2) if SMALL else (20, 6)
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="FP8 needs Hopper"
)
RECIPES = {"delayed": DelayedScaling(amax_history_len=16), "current": CurrentScaling(), "block": BlockScaling("e4m3")}


def te_like(model: Esm2ForMaskedLM) -> Esm2ForMaskedLM:
    """The same weights with Transformer Engine's layers."""
    other = build_model(model.config, seed=1, device="cuda", backend="te")
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("_extra_state") for name in missing)
    return other


def loss_and_gradients(model, batch: dict, bf16: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        loss = model(**on_gpu(batch)).loss_sum
    loss.backward()
    return loss.item(), {name: p.grad.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def forget():
    """Call it between two FP8 models: Transformer Engine updates the scales of all that have equal recipes at once."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    return FP8GlobalStateManager.reset


@contextmanager
def process_group():
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_names_and_shapes_are_those_of_the_torch_backend():
    config = esm2_config(*CONFIG, **TANH)
    shapes = [
        {name: tuple(p.shape) for name, p in build_model(config, 0, "cuda", backend).named_parameters()}
        for backend in ("torch", "te")
    ]
    assert shapes[0] == shapes[1]
    weights = [dict(build_model(config, 0, "cuda", backend).named_parameters()) for backend in ("torch", "te")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_fp32_equals_the_torch_backend():
    """Transformer Engine multiplies fp32 in TF32 (10 bits) unless NVIDIA_TF32_OVERRIDE=0: see tests/gpu/README.md."""
    model = build_model(esm2_config(*CONFIG, **TANH), 0, "cuda")
    batch = packed(random_batch(LENGTHS))
    loss, gradients = loss_and_gradients(model, batch, bf16=False)
    theirs, other = loss_and_gradients(te_like(model), batch, bf16=False)
    assert abs(theirs / loss - 1) < 1e-4
    for name, gradient in gradients.items():
        assert relative(other[name], gradient) < 5e-3, name


def test_logits_equal_transformers_but_for_gelu():
    reference = reference_model(esm2_config(*CONFIG))
    reference.config.hidden_act = HIDDEN_ACT["tanh"]
    model = te_like(ours_like(reference).cuda())
    batch = random_batch(LENGTHS)
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        theirs = reference.cuda()(**on_gpu({k: batch[k] for k in ("input_ids", "attention_mask")})).logits[keep.cuda()]
        ours = model(**on_gpu({k: v for k, v in packed(batch).items() if k != "labels"})).logits
    assert ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item() < 2e-3


@pytest.mark.parametrize("attention", ["theirs", "ours"])
def test_bf16_equals_fp32(attention, monkeypatch):
    from common.models.esm2 import layers_te

    if attention == "ours":
        monkeypatch.setattr(layers_te, "has_kernel", lambda heads, head_dim: False)
    elif not layers_te.has_kernel(CONFIG[2], CONFIG[1] // CONFIG[2]):
        pytest.skip(NO_KERNEL)
    model = build_model(esm2_config(*CONFIG, **TANH), 0, "cuda")
    batch = packed(random_batch(LENGTHS))
    loss, gradients = loss_and_gradients(model, batch, bf16=False)
    theirs, other = loss_and_gradients(te_like(model), batch, bf16=True)
    assert abs(theirs / loss - 1) < 5e-3
    for name, gradient in gradients.items():
        assert other[name].dtype == torch.float32
        assert relative(other[name], gradient) < 0.05, name


def test_sequences_of_a_pack_do_not_see_each_other():
    model = te_like(build_model(esm2_config(*CONFIG, **TANH), 0, "cuda"))
    batch = {k: v for k, v in packed(random_batch([40, 129, 17])).items() if k != "labels"}
    alone = {"input_ids": batch["input_ids"][40:169], "cu_seqlens": torch.tensor([0, 129]).int(), "max_seqlen": 129}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        together = model(**on_gpu(batch)).logits[40:169]
        assert relative(model(**on_gpu(alone)).logits, together) < 0.02


def test_recipes_have_the_fields_that_were_asked_for():
    from extras.formats.te import te_recipe

    delayed = te_recipe(DelayedScaling("e4m3", margin=1, amax_history_len=16, amax_compute_algo="most_recent"))
    assert (delayed.margin, delayed.amax_history_len, delayed.amax_compute_algo) == (1, 16, "most_recent")
    assert delayed.fp8_format.name == "E4M3"
    assert te_recipe(CurrentScaling(use_power_2_scales=True)).fp8_quant_bwd_grad.power_2_scale
    assert not te_recipe(CurrentScaling()).fp8_quant_bwd_grad.power_2_scale
    assert not te_recipe(BlockScaling("e4m3", use_f32_scales=True)).fp8_quant_fwd_inp.power_2_scale
    assert te_recipe(BlockScaling("e4m3")).fp8_quant_fwd_inp.power_2_scale
    fp4 = te_recipe(NVFP4BlockScaling("e4m3", disable_rht=True))
    assert not fp4.fp4_quant_fwd_inp.random_hadamard_transform
    assert fp4.fp4_quant_bwd_grad.stochastic_rounding
    if torch.cuda.get_device_capability() < (10, 0):
        with pytest.raises(UserError, match="MXFP8: Transformer Engine says: .* choose another --fp8_recipe"):
            te_recipe(MXFP8BlockScaling())


@HOPPER
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_params_are_the_same_training_with_weights_quantised_once_a_step(name, forget, monkeypatch):
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    from extras.formats.te import Quantised

    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    start = build_model(esm2_config(*CONFIG, **TANH), 0, "cuda")
    plan = (RECIPES[name], None, RECIPES[name])

    def losses(fp8_params: bool, ddp: bool = False) -> list[float]:
        forget()
        with torch.device("meta"):
            model = Esm2ForMaskedLM(start.config, "te")
        quantised = Quantised(model, plan, fp8_params)
        model.to_empty(device="cuda")
        with torch.no_grad():
            for name, theirs in start.named_parameters():
                model.get_parameter(name).copy_(theirs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if fp8_params:
            masters = quantised.quantise_weights()
            assert sum(isinstance(p, QuantizedTensor) for p in model.parameters()) == 2 * 4
            weights = dict(masters.weights.named_parameters())
            assert same_bits(weights, dict(start.named_parameters()))
            optimizer = torch.optim.AdamW(masters.weights.parameters(), lr=1e-3, fused=True)
            masters.attach(optimizer)
        if ddp:
            model = DistributedDataParallel(model, [0], init_sync=False, gradient_as_bucket_view=True)
        found = []
        for step in range(FEW_STEPS):
            loss, gradients = loss_and_gradients(model, packed(random_batch(LENGTHS, seed=step)), bf16=True)
            assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss)
        return found

    expected = losses(False)
    assert losses(True) == pytest.approx(expected, rel=1e-4)
    with process_group():
        assert losses(True, ddp=True) == pytest.approx(expected, rel=1e-4)


@HOPPER
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_training_stays_close_to_bf16_and_to_its_emulation(name):
    """STEPS steps: Transformer Engine in BF16, in FP8, and the torch backend that emulates FP8."""
    from extras.formats.te import Quantised

    start = build_model(esm2_config(*CONFIG, **TANH), 0, "cuda")
    plan = (RECIPES[name],) * 2 + (None,)
    plain, quantised = te_like(start), te_like(start)
    Quantised(quantised, plan)
    emulated = copy.deepcopy(start)
    emulation = Emulation(emulated, plan, seed=0, device="cuda")
    losses = {}
    for kind, model in (("bf16", plain), ("fp8", quantised), ("emulated", emulated)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses[kind] = []
        for step in range(STEPS):
            if kind == "emulated":
                emulation.begin_pack(step, 0)
            batch = packed(random_batch(LENGTHS, seed=step % 4))
            loss, _ = loss_and_gradients(model, batch, bf16=True)
            optimizer.step()
            if kind == "emulated":
                emulation.end_step(World(0, 0, 1, torch.device("cuda")), skipped=False)
            losses[kind].append(loss / (batch["labels"] != -100).sum().item())
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"][-1] < losses["fp8"][0]
    for other in ("bf16", "emulated"):
        assert max(abs(a - b) for a, b in zip(losses["fp8"], losses[other], strict=True)) < 0.1, losses


@HOPPER
def test_delayed_scaling_resumes_bit_exactly_and_rolls_once_a_step(forget, monkeypatch, request):
    from extras.formats.te import Quantised

    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    plan = (RECIPES["delayed"], None, RECIPES["delayed"])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # as --deterministic: torch's attention, too
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    batches = [packed(random_batch(LENGTHS, seed=n)) for n in range(4)]
    first = te_like(build_model(esm2_config(*CONFIG, **TANH), 0, "cuda"))
    scales = Quantised(first, plan)
    assert len(scales.state) == 2 * 3 * 4  # layers x modules x (scale and history, forward and backward)
    for batch in batches[:2]:
        loss_and_gradients(first, batch, bf16=True)
    history = next(v for k, v in scales.state.items() if k.endswith("qkv.scaling_bwd.amax_history"))
    assert int((history[:, 0] != 0).sum()) == 2, "one entry a step"
    saved = {name: tensor.clone() for name, tensor in scales.state.items()}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        first(**on_gpu(batches[3]))
    assert all(torch.equal(saved[name], tensor) for name, tensor in scales.state.items()), "evaluation left a trace"
    history[3, 0] = torch.inf
    scales.end_step(World(0, 0, 1, torch.device("cuda")), skipped=True)
    assert all(torch.equal(saved[name], tensor) for name, tensor in scales.state.items())
    expected = [loss_and_gradients(first, batch, bf16=True) for batch in batches[2:]]

    forget()
    second = te_like(first)
    restored = Quantised(second, plan)
    for name, tensor in restored.state.items():
        tensor.copy_(saved[name])
    for batch, (loss, gradients) in zip(batches[2:], expected, strict=True):
        ours, found = loss_and_gradients(second, batch, bf16=True)
        assert ours == loss
        assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert all(torch.equal(restored.state[name], tensor) for name, tensor in scales.state.items())


@HOPPER
def test_layers_of_another_recipe_do_not_age_the_histories():
    """One row a step, the newest last, in whatever order the recipes come; the first is for the step to come. Scales
    follow the newest where that is asked for, beside a layer in BF16, too."""
    from extras.formats.te import Quantised

    # As long as Transformer Engine's default: it tells recipes apart by a name in which amax_compute_algo is not.
    delayed = replace(RECIPES["delayed"], amax_compute_algo="most_recent", amax_history_len=1024)
    model = te_like(build_model(esm2_config(*CONFIG, **TANH), 0, "cuda"))
    scales = Quantised(model, (RECIPES["current"], None, delayed))
    for seed in range(3):
        loss_and_gradients(model, packed(random_batch(LENGTHS, seed=seed)), bf16=True)
    histories = {name: tensor for name, tensor in scales.state.items() if name.endswith("history")}
    assert len(histories) == 3 * 2
    fallen = 0
    for name, history in histories.items():
        assert (history[:, 0] != 0).nonzero().flatten().tolist() == [1021, 1022, 1023], name
        newest, scale = history[-1].double(), scales.state[name.replace("amax_history", "scale")].double()
        used, largest = newest != 0, 57344 if "_bwd" in name else 448
        assert torch.allclose(scale[used], largest / newest[used], rtol=1e-6, atol=0), name
        fallen += int((newest < history.amax(0)).sum())
    assert fallen, "the newest are the largest: nothing is shown"


@HOPPER
@pytest.mark.parametrize("fp8", [False, True])
def test_fsdp2_and_recomputation_change_nothing(fp8, forget):
    from extras.formats.te import Quantised

    batch = packed(random_batch(LENGTHS))
    start = te_like(build_model(esm2_config(*CONFIG, **TANH), 0, "cuda"))
    with torch.no_grad():  # what bf16 holds: FSDP2 gathers weights in it, and FP8 numbers are made from those
        for parameter in start.parameters():
            parameter.copy_(parameter.bfloat16())

    def three_steps(change, fp8: bool = fp8) -> list[tuple[float, dict]]:
        forget()
        model = te_like(start)
        change(model)
        scales = Quantised(model, (RECIPES["delayed"],) * 3) if fp8 else None
        found = [loss_and_gradients(model, batch, bf16=True) for _ in range(3)]
        if fp8:  # one row a step, the newest last; the first is for the step to come
            for name, history in scales.state.items():
                if name.endswith("qkv.scaling_fwd.amax_history"):
                    assert (history[:, 0] != 0).nonzero().flatten().tolist() == [13, 14, 15], name
        return found

    def shard(model) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.encoder.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)

    def recompute(model) -> None:
        save_activations(list(model.encoder.layers), "full")

    with process_group():
        expected, in_bf16 = three_steps(lambda model: None), three_steps(lambda model: None, fp8=False)
        for change in (shard, recompute):
            for (loss, gradients), (ours, found), (_, plain) in zip(
                expected, three_steps(change), in_bf16, strict=True
            ):
                assert abs(ours / loss - 1) < 2e-3
                for name, gradient in found.items():
                    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                    # Sharded embeddings come in bf16: 2^-9 there moves numbers across a boundary of FP8's grid here
                    # and there, and what that changes is of the size of FP8's own rounding, no larger.
                    by_fp8 = 1.5 * relative(gradients[name], plain[name]) if fp8 and change is shard else 0.0
                    assert relative(whole, gradients[name]) < max(0.03, by_fp8), name
