"""train_fsdp2.py: sharded or not, on however many ranks, it is the same run."""

from __future__ import annotations

import pytest
import torch

from common.distributed.process_group import distributed_run
from common.distributed.world import World
from common.models.layers.initialise import count_parameters
from common.training.load_model import load_model
from tests.data_fixtures import load_script
from tests.training_fixtures import (
    TINY_OVERRIDES,
    final_weights,
    flags_of,
    losses,
    on_ranks,
    relative_difference,
    rows,
    same_bits,
    train,
)

FSDP = "train_fsdp2.py"
STEPS = 6
# Sums in another order, fp32, after 6 steps. A gradient averaged twice, a shard left out or a stale weight differs by
# more than 1e-3 within a few steps.
LOSS, WEIGHTS = 3e-6, 2e-6


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """One process, four packs a step."""
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, gradient_accumulation_steps=4, max_steps=STEPS)
    return out


def assert_same(out, alone) -> None:
    assert losses(out) == pytest.approx(losses(alone), rel=LOSS)
    assert [r["grad_norm"] for r in rows(out)] == pytest.approx([r["grad_norm"] for r in rows(alone)], rel=1e-4)
    assert relative_difference(final_weights(out), final_weights(alone)) < WEIGHTS


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (1, {"gradient_accumulation_steps": 4}),
        pytest.param(2, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param(
            2, {"gradient_accumulation_steps": 2, "activation_checkpointing": "full"}, marks=pytest.mark.slow
        ),
        (2, {"gradient_accumulation_steps": 2, "activation_checkpointing": "selective", "forward_prefetch": 0}),
        pytest.param(
            2,
            {"gradient_accumulation_steps": 2, "sharding_strategy": "grad_op", "offload_activations": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            {"gradient_accumulation_steps": 2, "cpu_offload": True, "forward_prefetch": 2, "sync_each_batch": True},
            marks=pytest.mark.slow,
        ),
        (4, {}),
        pytest.param(
            4,
            {"sharding_strategy": "hybrid", "hsdp_shard_size": 2, "activation_checkpointing": "full"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fsdp2_every_layout_equals_one_process(dataset, tmp_path, alone, nproc, flags):
    train(dataset, tmp_path, nproc, script=FSDP, max_steps=STEPS, **flags)
    assert_same(tmp_path, alone)


@pytest.mark.slow
def test_fsdp2_compiled_layers_take_the_same_steps(dataset, tmp_path, alone):
    flags = {"activation_checkpointing": "selective", "torch_compile": True, "stop_at_step": 3}
    flags["compiler"] = "aot_eager"
    train(dataset, tmp_path, 1, script=FSDP, packs_per_step=4, max_steps=STEPS, **flags)
    assert losses(tmp_path) == pytest.approx(losses(alone)[:3], rel=LOSS)


def test_fsdp2_bf16_follows_ddp_with_fp32_master_weights(dataset, tmp_path):
    flags = {"bf16": True, "max_steps": 6, "gradient_accumulation_steps": 2}
    train(dataset, tmp_path / "ddp", 2, **flags)
    train(dataset, tmp_path / "fsdp", 2, script=FSDP, **flags)
    train(dataset, tmp_path / "small", 2, script=FSDP, param_dtype="bf16", **flags)
    expected = losses(tmp_path / "ddp")
    # bf16 has 8 bits: both differ from fp32 by a few 1e-4 in the loss, and no more than that from each other
    assert losses(tmp_path / "fsdp") == pytest.approx(expected, rel=2e-3)
    assert losses(tmp_path / "small") == pytest.approx(expected, rel=3e-2)
    weights = final_weights(tmp_path / "fsdp")["esm.encoder.layer.0.intermediate.dense.weight"]
    assert not torch.equal(weights, weights.bfloat16().float()), "the master weights are bf16"


def test_fsdp2_emulated_fp8_equals_ddp(dataset, tmp_path):
    flags = {"fp8": True, "emulate_precision": True, "bf16": True, "max_steps": 3}
    train(dataset, tmp_path / "ddp", 2, **flags)
    said = train(dataset, tmp_path / "fsdp", 2, script=FSDP, **flags)
    assert "Warning" not in said
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-3)


def _inspect(argv: list[str], path: str) -> None:
    """On a rank: the sharded model before training, and what of it is here."""
    script = load_script(FSDP)
    args = script.parse_run("", script.FsdpFlags, argv)
    with distributed_run(args.process) as world:
        model = load_model(
            args, world, shard=lambda model: script.shard(model, world, args.strategy, args.precision.bf16)
        ).model
        parameters = {k: (p.full_tensor(), p.to_local().clone()) for k, p in model.named_parameters()}
        torch.save((parameters, count_parameters(model)), f"{path}.{world.rank}")


@pytest.mark.parametrize(("nproc", "hybrid"), [(2, False), (3, False), (4, True)])
def test_fsdp2_initial_weights_equal_unsharded(dataset, tmp_path, nproc, hybrid):
    flags = {"sharding_strategy": "hybrid", "hsdp_shard_size": 2} if hybrid else {}
    argv = flags_of(dataset, tmp_path / "out", config_overrides=TINY_OVERRIDES, **flags)
    codes, said = on_ranks(nproc, _inspect, argv, str(tmp_path / "rank"))
    assert codes == [0] * nproc, "\n".join(said)
    ranks = [torch.load(f"{tmp_path}/rank.{rank}", weights_only=False) for rank in range(nproc)]
    args = load_script(FSDP).parse_run("", load_script(FSDP).FsdpFlags, argv)
    whole = load_model(args, World(0, 0, 1, torch.device("cpu"))).model
    assert {k for k, _ in whole.named_parameters()} == set(ranks[0][0])
    shards = 2 if hybrid else nproc
    for name, parameter in whole.named_parameters():
        assert all(torch.equal(r[0][name][0], parameter) for r in ranks), name
        assert sum(r[0][name][1].numel() for r in ranks[:shards]) == parameter.numel(), f"{name} is replicated"
    assert {r[1] for r in ranks} == {count_parameters(whole)}


def test_fsdp2_export_equals_unsharded(dataset, tmp_path):
    for name, nproc, script in (("ddp", 1, "train_ddp.py"), ("fsdp", 2, FSDP)):
        flags = {"max_steps": 2, "stop_at_step": 1, "learning_rate": 0, "save_final_model": True}
        train(dataset, tmp_path / name, nproc, script=script, packs_per_step=2, **flags)
    assert same_bits(final_weights(tmp_path / "fsdp"), final_weights(tmp_path / "ddp"))


def test_fsdp2_trains_from_an_exported_model(dataset, tmp_path):
    train(dataset, tmp_path / "first", 2, script=FSDP, max_steps=5)
    start = {"model_name_or_path": tmp_path / "first" / "final_model", "max_steps": 5, "packs_per_step": 2}
    train(dataset, tmp_path / "fsdp", 2, script=FSDP, **start)
    train(dataset, tmp_path / "ddp", 1, **start)
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=LOSS)


def test_fsdp2_checkpoint_of_any_layout_resumes_on_any_other(dataset, tmp_path, alone):
    """One run that changes strategy and number of ranks five times; the uninterrupted one tells what it should be."""
    hybrid = {"sharding_strategy": "hybrid", "hsdp_shard_size": 2, "script": FSDP}
    legs = [(2, {}), (4, {"script": FSDP}), (1, {}), (4, hybrid), (2, {"script": FSDP}), (1, {"script": FSDP})]
    for number, (nproc, flags) in enumerate(legs, 1):
        train(dataset, tmp_path, nproc, max_steps=STEPS, packs_per_step=4, stop_at_step=number, **flags)
    assert_same(tmp_path, alone)


@pytest.mark.slow
def test_fsdp2_resume_on_same_layout_is_bit_identical(dataset, tmp_path):
    flags = {"script": FSDP, "packs_per_step": 4, "max_steps": 6, "activation_checkpointing": "selective"}
    train(dataset, tmp_path / "whole", 2, **flags)
    for stop in (3, 6):
        train(dataset, tmp_path / "parts", 2, **flags, stop_at_step=stop)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_bits(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sharding_strategy": "shard"}, "--sharding_strategy shard: choose full, grad_op, hybrid"),
        ({"param_dtype": "bf16"}, "missing: --bf16 (--param_dtype bf16 stores what it computes with)"),
        ({"hsdp_shard_size": 2}, "missing: --sharding_strategy (--hsdp_shard_size goes with hybrid)"),
        ({"activation_checkpointing": "some"}, "--activation_checkpointing some: choose none, selective, full"),
    ],
)
def test_fsdp2_refuses_bad_flags(dataset, tmp_path, flags, message):
    assert message in train(dataset, tmp_path / "out", expect=2, script=FSDP, **flags)


def test_fsdp2_shard_size_not_dividing_ranks_is_refused(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", 2, expect=2, script=FSDP, sharding_strategy="hybrid", hsdp_shard_size=3)
    assert "--hsdp_shard_size 3 does not divide 2 ranks: choose 1, 2" in said
