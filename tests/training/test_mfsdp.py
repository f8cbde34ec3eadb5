"""train_mfsdp.py: the real megatron-fsdp on CPU tensors, with stand-ins for CUDA and NCCL (tests/megatron_on_cpu.py).

What this shows: how weights lie in buckets and shards, averaging, accumulation, the order of hooks, the optimiser,
checkpoints, dtypes. What it does not: streams, NCCL, Transformer Engine, memory and speed on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from common.distributed.process_group import distributed_run
from common.distributed.world import World
from common.flags import with_flags
from common.training.load_model import load_model
from common.training.step_monitor import digest
from tests import megatron_on_cpu
from tests.data_fixtures import load_script
from tests.live_runs import PREEMPTED, LiveRun, assert_same_run, newest_step, outcome
from tests.training_fixtures import (
    TINY_OVERRIDES,
    _main,
    final_weights,
    flags_of,
    losses,
    on_ranks,
    relative_difference,
    rows,
    same_bits,
    train,
)

pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
DDP, CP, FSDP2, MFSDP = "train_ddp.py", "train_ddp_cp.py", "train_fsdp2.py", "train_mfsdp.py"
STEPS = 10
RUN = {"max_steps": STEPS, "packs_per_step": 4, "tokens_per_pack": 128, "save_steps": 5, "do_eval": True}
# One that 1 to 4 ranks can share, all of them with several packs a step.
SHARED = RUN | {"max_steps": 8, "packs_per_step": 12, "save_steps": 8, "do_eval": False}
# Sums in another order, fp32. AdamW hides a wrong scale in losses and weights, the norms before clipping do not: a
# gradient averaged twice, or one pack left out, changes them by 1e-2 at least.
LOSS, NORM, WEIGHTS, MOMENTS = 1e-6, 2e-5, 3e-6, 1e-5


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """One process."""
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, **RUN)
    return out


@pytest.fixture(scope="module")
def sharded(dataset, tmp_path_factory):
    """train_fsdp2.py."""
    out = tmp_path_factory.mktemp("fsdp2")
    train(dataset, out, 2, script=FSDP2, **RUN)
    return out


@pytest.fixture(scope="module")
def megatron(dataset, tmp_path_factory):
    """train_mfsdp.py, uninterrupted, as it is without flags."""
    out = tmp_path_factory.mktemp("megatron")
    train(dataset, out, 2, script=MFSDP, **RUN)
    return out


def norms(out) -> list[float]:
    return [row["grad_norm"] for row in rows(out)]


def assert_same(out, other, scratch, steps: int = STEPS) -> None:
    assert losses(out) == pytest.approx(losses(other), rel=LOSS)
    assert norms(out) == pytest.approx(norms(other), rel=NORM)
    assert relative_difference(final_weights(out), final_weights(other)) < WEIGHTS
    found, expected = (outcome(run, steps, scratch) for run in (out, other))
    assert found.keys() == expected.keys()
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        some = [{k: v for k, v in state.items() if k.endswith(f"/{kind}")} for state in (found, expected)]
        assert some[0]
        assert relative_difference(*some) < MOMENTS, kind
    evaluated = [row["eval_loss"] for row in rows(other) if "eval_loss" in row]
    assert [row["eval_loss"] for row in rows(out) if "eval_loss" in row] == pytest.approx(evaluated, rel=LOSS)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param(
            {
                "activation_checkpointing": "full",
                "sync_model_each_microbatch": True,
                "zero_dp_strategy": "optim_grads",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"cp_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"calculate_per_token_loss": True, "init_model_with_meta_device": False, "zero_dp_strategy": "optim"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"activation_checkpointing": "selective", "async_save": False, "zero_dp_strategy": "no_shard"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["optim_grads_params", "optim_grads", "cp", "optim", "no_shard"],
)
def test_mfsdp_every_strategy_equals_one_process_and_fsdp2(request, dataset, tmp_path, alone, sharded, flags):
    out = tmp_path / "out" if flags else request.getfixturevalue("megatron")
    if flags:
        train(dataset, out, 2, script=MFSDP, **RUN | flags)
    assert_same(out, alone, tmp_path)
    assert_same(out, sharded, tmp_path)


@pytest.mark.slow
def test_mfsdp_checkpoint_of_any_strategy_resumes_on_any_other(dataset, tmp_path):
    """One run that changes both seven times, and one process that does not: weights, moments and steps."""
    hybrid = {"script": MFSDP, "hsdp_shard_size": 2}
    legs = [
        (2, {}),
        (3, {"script": MFSDP}),
        (2, {"script": FSDP2}),
        (4, hybrid | {"zero_dp_strategy": "optim"}),
        (2, {"script": CP}),
        (2, {"script": MFSDP, "zero_dp_strategy": "no_shard", "cp_size": 2}),
        (4, hybrid | {"activation_checkpointing": "full", "async_save": False}),
        (1, {"script": MFSDP, "init_model_with_meta_device": False}),
    ]
    out, alone = tmp_path / "out", tmp_path / "alone"
    for number, (nproc, flags) in enumerate(legs, 1):
        train(dataset, out, nproc, **SHARED | flags, stop_at_step=number)
    train(dataset, alone, **SHARED)
    assert_same(out, alone, tmp_path, SHARED["max_steps"])


def test_mfsdp_resume_after_kill_and_stop_is_same_run(dataset, tmp_path, megatron):
    out, how = tmp_path / "out", {"script": MFSDP} | RUN
    with LiveRun(dataset, out, tmp_path / "logs", 2, **how | {"save_steps": 3}) as run:
        run.until(lambda: newest_step(out) > 0)
        run.signal(signal.SIGKILL)
        assert run.end() == [-signal.SIGKILL] * 2
    seen = rows(out)[-1]["step"]  # of steps that were not saved, too: only a later one is the next start's
    with LiveRun(dataset, out, tmp_path / "logs", 2, **how | {"save_steps": 100}) as run:
        run.until_step(seen + 1)
        run.signal(signal.SIGTERM, 1)
        assert run.end() == [PREEMPTED] * 2
    assert newest_step(out) < STEPS
    train(dataset, out, 2, **how)
    assert_same_run(out, megatron, STEPS, tmp_path)
    assert same_bits(final_weights(out), final_weights(megatron))


# ---- bf16, other formats ----------------------------------------------------------------------------------------

BF16 = {"bf16": True, "max_steps": 4, "packs_per_step": 6, "tokens_per_pack": 128}


@pytest.fixture(scope="module")
def in_bf16(dataset, tmp_path_factory):
    """(ranks, --param_dtype) -> a run of train_fsdp2.py."""

    @functools.cache
    def run(nproc: int, param_dtype: str):
        out = tmp_path_factory.mktemp("fsdp2")
        train(dataset, out, nproc, script=FSDP2, param_dtype=param_dtype, **BF16)
        return out

    return run


@pytest.mark.parametrize(
    ("nproc", "like", "flags", "loss", "norm"),
    [
        # The same arithmetic: gradients of a pack in bf16, summed in fp32, weights rounded from fp32 masters. Losses
        # are equal until a master at the edge of a rounding tips it over, 4e-3 of that weight.
        (2, (2, "fp32"), {}, 2e-5, 3e-4),
        pytest.param(
            3,
            (3, "fp32"),
            {"zero_dp_strategy": "optim", "init_model_with_meta_device": False},
            2e-5,
            3e-4,
            marks=pytest.mark.slow,
        ),
        (1, (2, "fp32"), {"grad_reduce_in_fp32": False}, 2e-5, 3e-4),  # nothing travels
        # Sums rounded to bf16, 4e-3, each as it travels: of norms less remains.
        pytest.param(
            2,
            (2, "fp32"),
            {"zero_dp_strategy": "optim_grads", "grad_reduce_in_fp32": False},
            2e-4,
            2e-3,
            marks=pytest.mark.slow,
        ),
        # Weights, gradients and moments rounded at every step; FSDP2's norm is rounded, too.
        pytest.param(
            2,
            (2, "bf16"),
            {"preserve_fp32_weights": False, "zero_dp_strategy": "no_shard"},
            1e-3,
            1e-2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["masters", "three", "one", "reduce", "small"],
)
def test_mfsdp_bf16_equals_fsdp2(dataset, tmp_path, in_bf16, nproc, like, flags, loss, norm):
    train(dataset, tmp_path, nproc, script=MFSDP, **BF16 | flags)
    assert losses(tmp_path) == pytest.approx(losses(in_bf16(*like)), rel=loss)
    assert norms(tmp_path) == pytest.approx(norms(in_bf16(*like)), rel=norm)
    weights = final_weights(tmp_path)["esm.encoder.layer.0.intermediate.dense.weight"]
    assert torch.equal(weights, weights.bfloat16().float()) == (like[1] == "bf16")


@pytest.mark.slow
def test_mfsdp_emulated_formats_equal_fsdp2(dataset, tmp_path):
    formats = {"fp8": True, "fp8_recipe": "delayed", "fp8_layers": 1, "fp4": True, "fp4_layers": 2}
    flags = BF16 | formats | {"emulate_precision": True, "max_steps": 3}
    flags |= {"config_overrides": TINY_OVERRIDES.replace("hidden_size=32", "hidden_size=128")}
    for script in (FSDP2, MFSDP):
        train(dataset, tmp_path / script, 2, script=script, **flags)
    assert losses(tmp_path / MFSDP) == pytest.approx(losses(tmp_path / FSDP2), rel=1e-5)
    assert norms(tmp_path / MFSDP) == pytest.approx(norms(tmp_path / FSDP2), rel=1e-4)


# ---- what would go wrong without a word ------------------------------------------------------------------------


def _without(what: str, argv: list[str]) -> None:
    """On a rank: train_mfsdp.py with one thing left out."""
    if what == "waiting":
        megatron_on_cpu.Late.wait = lambda late: None
    elif what == "averaging":
        megatron_on_cpu.scaled_sum.__code__ = (lambda gradients, factor, config: dist.ReduceOp.SUM).__code__
    elif what == "clearing":
        from megatron_fsdp import param_and_grad_buffer

        param_and_grad_buffer.ParamAndGradBuffer.zero_grad = lambda buffer: None
    _main(argv, MFSDP)


@pytest.mark.parametrize("what", ["nothing", "waiting", "averaging", "clearing"])
def test_mfsdp_comparison_detects_omitted_parts(dataset, tmp_path, alone, what):
    flags = RUN | {"stop_at_step": 2, "do_eval": False, "max_skipped_steps": 5}
    codes, said = on_ranks(2, _without, what, flags_of(dataset, tmp_path / "out", **flags))
    assert codes == [0, 0], said
    found = [row.get("grad_norm", 0.0) for row in rows(tmp_path / "out")]
    with contextlib.nullcontext() if what == "nothing" else pytest.raises(AssertionError):
        assert found == pytest.approx(norms(alone)[:2], rel=NORM)


def _inspect(argv: list[str], path: str) -> None:
    """On a rank: the sharded model before training, and what of it is here."""
    megatron_on_cpu.install()
    script = load_script(MFSDP)
    args = script.parse_run("", script.MegatronFlags, argv)
    with distributed_run(args.process) as world:
        strategy = script.MegatronSharded(args.strategy, args.precision.bf16, world)
        model = load_model(args, world, shard=strategy.shard).model
        assert strategy.clip(1.0) == 0.0, "there are no gradients yet, as for a rank that has no rows"
        named = dict(model.named_parameters())
        parts = {name: (strategy.full_tensor(p), p.to_local().clone()) for name, p in named.items()}
        gathered = {name for name, p in strategy.raw.items() if p.untyped_storage().size()}
        torch.save((parts, gathered, digest(named.values())), f"{path}.{world.rank}")


@pytest.mark.parametrize(("nproc", "replicas"), [(3, 1), (4, 2)], ids=["three", "hybrid"])
def test_mfsdp_initial_rows_equal_unsharded(dataset, tmp_path, nproc, replicas):
    flags = {"hsdp_shard_size": 2} if replicas > 1 else {}
    overrides = "num_hidden_layers=2,hidden_size=48,num_attention_heads=3,intermediate_size=100"  # cut oddly
    argv = flags_of(dataset, tmp_path / "out", config_overrides=overrides, **flags)
    codes, said = on_ranks(nproc, _inspect, argv, str(tmp_path / "rank"))
    assert codes == [0] * nproc, "\n".join(said)
    ranks = [torch.load(f"{tmp_path}/rank.{rank}", weights_only=False) for rank in range(nproc)]
    args = load_script(MFSDP).parse_run("", load_script(MFSDP).MegatronFlags, argv)
    whole = load_model(args, World(0, 0, 1, torch.device("cpu"))).model
    assert {name for name, _ in whole.named_parameters()} == set(ranks[0][0])
    shards = nproc // replicas
    for name, parameter in whole.named_parameters():
        assert all(torch.equal(parts[name][0], parameter) for parts, _, _ in ranks), name
        assert sum(parts[name][1].numel() for parts, _, _ in ranks[:shards]) == parameter.numel(), name
    assert not any(name.startswith("encoder.layers.") for _, gathered, _ in ranks for name in gathered)
    digests = [found for _, _, found in ranks]
    for rank, found in enumerate(digests):
        same = [other for other in range(nproc) if digests[other].keys() & found.keys()]
        assert same == list(range(rank % shards, nproc, shards)), "who holds the same rows"
        assert all(digests[other] == found for other in same)


ONCE, PACKS = 1, 3
# Strategy -> what two ranks hold, bytes a parameter (bf16 weights, fp32 masters, fp32 gradients; moments are as the
# masters, twice), and how often all weights and gradients travel in a step of three packs. docs/distributed.md has it.
COSTS = {
    "no_shard": ((2, 4, 4), {"all_reduce": ONCE}),
    "optim": ((2, 4 / 2, 4), {"gather": ONCE, "reduce_scatter": ONCE}),
    "optim_grads": ((2, 4 / 2, 4 / 2), {"gather": ONCE, "reduce_scatter": PACKS}),
    "optim_grads_params": ((2 / 2, 4 / 2, 4 / 2), {"gather": 2 * PACKS, "reduce_scatter": PACKS}),
}


def _costs(argv: list[str], path: str) -> None:
    """On a rank: what each strategy holds before a step, and what travels in it."""
    megatron_on_cpu.install()
    script = load_script(MFSDP)
    given = script.parse_run("", script.MegatronFlags, argv)
    elements = Counter()

    def counted(call: Callable, what: str, counting: str) -> Callable:
        def count(*args, **kwargs):
            elements[what] += (kwargs.get(counting) if counting in kwargs else args[0]).numel()
            return call(*args, **kwargs)

        return count

    dist.all_gather_into_tensor = counted(dist.all_gather_into_tensor, "gather", "output_tensor")
    dist.reduce_scatter_tensor = counted(dist.reduce_scatter_tensor, "reduce_scatter", "input")
    found = {}
    with distributed_run(given.process) as world:
        for name in COSTS:
            args = with_flags(given, zero_dp_strategy=name)
            strategy = script.MegatronSharded(args.strategy, args.precision.bf16, world)
            model = load_model(args, world, shard=strategy.shard).model
            strategy.sync_model_weights()
            total = sum(p.numel() for p in model.parameters())
            groups = strategy.model.param_and_grad_buffer.parameter_groups
            kinds = ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer")
            buffers = [[getattr(group, kind) for group in groups] for kind in kinds]
            held = [sum(b.data.nbytes for b in of_kind if b) / total for of_kind in buffers]
            if not strategy.flags.shards:
                held[0] = sum(p.nbytes for p in strategy.raw.values()) / total
            ids = torch.randint(4, 24, (64,))
            bounds = torch.tensor([0, 64], dtype=torch.int32)
            reduced = dist.all_reduce
            dist.all_reduce = counted(reduced, "all_reduce", "tensor")
            for number in range(2 * PACKS):
                if number == PACKS:  # the second step, before which things have been gathered and let go once
                    strategy.sync_model_weights()
                    strategy.clear_gradients()
                    elements.clear()
                with strategy.micro_batch((number + 1) % PACKS == 0), torch.autocast("cpu", torch.bfloat16):
                    strategy.model(ids, cu_seqlens=bounds, max_seqlen=64, labels=ids).loss_sum.backward()
            dist.all_reduce = reduced
            found[name] = held, {what: count / total for what, count in elements.items()}
    torch.save(found, f"{path}.{world.rank}")


def test_mfsdp_memory_and_traffic_match_documented_table(dataset, tmp_path):
    larger = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=256"
    argv = flags_of(dataset, tmp_path / "out", bf16=True, config_overrides=larger)
    codes, said = on_ranks(2, _costs, argv, str(tmp_path / "rank"))
    assert codes == [0, 0], "\n".join(said)
    for rank in range(2):
        for name, (held, travelled) in torch.load(f"{tmp_path}/rank.{rank}").items():
            # Buckets are padded, and the few weights outside of layers are gathered once a step.
            assert held == pytest.approx(COSTS[name][0], rel=0.05), name
            assert travelled == pytest.approx(COSTS[name][1], rel=0.1), name
