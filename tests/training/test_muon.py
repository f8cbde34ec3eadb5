"""--optim muon: every strategy on any number of ranks takes the steps of one process, and resumes as it was."""

from __future__ import annotations

import functools
import signal

import pytest

from tests.live_runs import LiveRun, assert_same_run, newest_step, outcome
from tests.training_fixtures import final_weights, losses, relative_difference, rows, train

DDP, CP, FSDP2, MFSDP = "train_ddp.py", "train_ddp_cp.py", "train_fsdp2.py", "train_mfsdp.py"
STEPS = 8
RUN = {"optim": "muon", "max_steps": STEPS, "packs_per_step": 12, "tokens_per_pack": 128, "save_steps": 100}
LOSS, NORM, WEIGHTS = 1e-6, 2e-5, 3e-6  # as in test_mfsdp.py


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """Packs in a step -> a run of one process."""

    @functools.cache
    def run(packs: int):
        out = tmp_path_factory.mktemp("alone")
        train(dataset, out, **RUN | {"packs_per_step": packs})
        return out

    return run


def assert_same(out, alone) -> None:
    assert losses(out) == pytest.approx(losses(alone), rel=LOSS)
    norms = [[row["grad_norm"] for row in rows(run)] for run in (out, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=NORM)
    assert relative_difference(final_weights(out), final_weights(alone)) < WEIGHTS


HYBRID = {"hsdp_shard_size": 2}


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(2, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        (3, {}),
        pytest.param(2, {"script": CP}, marks=pytest.mark.slow),
        pytest.param(2, {"script": FSDP2, "cpu_offload": True}, marks=pytest.mark.slow),
        pytest.param(3, {"script": FSDP2, "sharding_strategy": "grad_op"}, marks=pytest.mark.slow),
        (4, {"script": FSDP2, "sharding_strategy": "hybrid"} | HYBRID),
        pytest.param(3, {"script": MFSDP}, marks=pytest.mark.slow),
        pytest.param(2, {"script": MFSDP, "zero_dp_strategy": "optim_grads"}, marks=pytest.mark.slow),
        pytest.param(4, {"script": MFSDP, "zero_dp_strategy": "optim"} | HYBRID, marks=pytest.mark.slow),
        pytest.param(2, {"script": MFSDP, "zero_dp_strategy": "no_shard"}, marks=pytest.mark.slow),
    ],
)
def test_muon_every_strategy_equals_one_process(dataset, tmp_path, alone, nproc, flags):
    packs = 4 if nproc == 4 else 6
    train(dataset, tmp_path, nproc, **RUN | {"packs_per_step": packs} | flags)
    assert_same(tmp_path, alone(packs))


@pytest.mark.slow
def test_muon_more_ranks_than_matrices_and_rows(dataset, tmp_path):
    """Replicas without a matrix of their own, and shards without a row: six ranks, matrices of two rows."""
    sizes = "num_hidden_layers=1,hidden_size=2,num_attention_heads=1,intermediate_size=2"
    flags = RUN | {"max_steps": 3, "config_overrides": sizes}
    train(dataset, tmp_path / "alone", **flags)
    for shards in (6, 3):
        more = {"script": FSDP2, "sharding_strategy": "hybrid", "hsdp_shard_size": shards}
        train(dataset, tmp_path / f"{shards}", 6, **flags | more)
        assert_same(tmp_path / f"{shards}", tmp_path / "alone")


@pytest.mark.slow
def test_muon_checkpoint_of_any_strategy_resumes_on_any_other(dataset, tmp_path):
    """One run that changes strategy and ranks seven times, and one process that does not: weights and all state."""
    run = RUN | {"save_steps": STEPS}
    legs = [
        (2, {}),
        (3, {"script": MFSDP}),
        (2, {"script": FSDP2}),
        (4, {"script": MFSDP, "zero_dp_strategy": "optim"} | HYBRID),
        (2, {"script": CP}),
        (2, {"script": MFSDP, "zero_dp_strategy": "no_shard"}),
        (4, {"script": FSDP2, "sharding_strategy": "hybrid", "async_save": False} | HYBRID),
        (1, {}),
    ]
    out, alone = tmp_path / "out", tmp_path / "alone"
    for number, (nproc, flags) in enumerate(legs, 1):
        train(dataset, out, nproc, **run | flags, stop_at_step=number)
    train(dataset, alone, **run)
    assert_same(out, alone)
    found, expected = (outcome(each, STEPS, tmp_path) for each in (out, alone))
    assert found.keys() == expected.keys()
    for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq", "step"):
        some = [{k: v for k, v in state.items() if k.endswith(f"/{kind}")} for state in (found, expected)]
        assert some[0], kind
        assert relative_difference(*some) < 1e-5, kind


@pytest.mark.parametrize(
    ("nproc", "script"),
    [(2, DDP), pytest.param(3, FSDP2, marks=pytest.mark.slow), pytest.param(2, MFSDP, marks=pytest.mark.slow)],
)
def test_muon_resume_after_kill_is_same_run(dataset, tmp_path, nproc, script):
    steps = 12  # enough that it is under way when it is killed
    flags = RUN | {"script": script, "bf16": script == DDP, "packs_per_step": nproc, "max_steps": steps}
    whole, out = tmp_path / "whole", tmp_path / "out"
    train(dataset, whole, nproc, **flags)
    with LiveRun(dataset, out, tmp_path / "logs", nproc, **flags | {"save_steps": 3}) as run:
        run.until(lambda: newest_step(out) > 0)
        run.signal(signal.SIGKILL)
        run.end()
    train(dataset, out, nproc, **flags)
    assert_same_run(out, whole, steps, tmp_path)


@pytest.mark.slow
def test_muon_layers_in_other_formats_take_the_same_steps(dataset, tmp_path, alone):
    """Compiled, recomputed, with an unpadded batch of transformers' layers: the optimiser sees the same gradients."""
    compiled = {"torch_compile": True, "compiler": "aot_eager", "gradient_checkpointing": True}
    for name, flags in {"compiled": compiled, "hf": {"backend": "hf"}}.items():
        out = tmp_path / name
        train(dataset, out, **RUN | {"packs_per_step": 4, "stop_at_step": 3, "save_final_model": False} | flags)
        assert losses(out) == pytest.approx(losses(alone(4))[:3], rel=3e-6)


def test_muon_refuses_the_state_of_adamw(dataset, tmp_path):
    train(dataset, tmp_path, max_steps=4, stop_at_step=1)
    for flags in ({"optim": "muon"}, {"optim": "muon", "script": FSDP2}):
        said = train(dataset, tmp_path, max_steps=4, expect=2, **flags)
        assert "--optim muon: the checkpoint has the state of adamw_torch_fused: resume with" in said
    assert newest_step(tmp_path) == 1
