"""Ranks with different flags or output directories end before training; a resumed run logs what has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.checkpoint import files as checkpoint_files
from common.cli import UserError
from common.distributed.world import World
from common.files.safe_files import read_json, write_json
from common.flags import with_flags
from common.models.layers.backend import choose_backend
from common.training.resume import plan_resume
from extras.prepare.output_directory import size_and_crc
from tests.live_runs import assert_same_run, outcome
from tests.training.checkpoint_fixtures import DAMAGES
from tests.training_fixtures import _main, arguments, flags_of, make_dataset, on_ranks, rows, train

FLAGS = {"max_steps": 6, "save_final_model": False}


def error_of(said: list[str]) -> str:
    """The one line that the ranks have said."""
    (error,) = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
    assert not any("Traceback" in text for text in said)
    return error


def _main_of_each(argvs: list[list[str]], script: str, torch_of_1: str | None = None) -> None:
    rank = int(os.environ["RANK"])
    if torch_of_1 and rank == 1:
        torch.__version__ = torch_of_1
    _main(argvs[rank], script)


@pytest.fixture(scope="module")
def other_dataset(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("other"), 60, 10, 5, seed=8)


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
@pytest.mark.parametrize(
    ("others", "differing"),
    [
        ({"seed": 43}, "seed 43, not 42"),
        ({"max_seq_length": 64}, "max_seq_length 64, not 128"),
        ({"learning_rate": 2e-3, "bf16": True}, "learning_rate 0.002, not 0.001"),
        ({"dataset_dir": None}, "dataset '"),
        ({"torch": "2.0"}, "torch '2.0', not "),
        ({"gelu": "tanh"}, "gelu 'tanh', not 'exact'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_check_agreement_names_ranks_with_other_flags(dataset, other_dataset, tmp_path, others, differing, script):
    out = tmp_path / "out"
    others = dict(others)
    version, where = others.pop("torch", None), dataset
    if "dataset_dir" in others:
        where = other_dataset
        del others["dataset_dir"]
    argvs = [flags_of(dataset, out, **FLAGS), flags_of(where, out, **FLAGS | others)]
    codes, said = on_ranks(2, _main_of_each, argvs, script, version)
    assert codes == [2, 2], said
    error = error_of(said)
    assert error.startswith("error: rank 1 (host ")
    assert differing in error
    assert not list(out.glob("*")), "something was written"


def test_check_agreement_allows_other_number_of_workers(dataset, tmp_path):
    argvs = [flags_of(dataset, tmp_path, **FLAGS | more) for more in ({}, {"dataloader_num_workers": 1})]
    codes, said = on_ranks(2, _main_of_each, argvs, "train_ddp.py")
    assert codes == [0, 0], said


def _main_somewhere(argv: list[str], directories: list[Path], script: str, patience: float) -> None:
    checkpoint_files.SHARED_PATIENCE_S = patience
    os.chdir(directories[int(os.environ["RANK"])])
    _main(argv, script)


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
def test_save_fails_if_nodes_share_no_output_directory(dataset, tmp_path, script, async_save):
    """--output_dir out, on two nodes with a disk each."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    argv = flags_of(dataset, Path("out"), **FLAGS, save_steps=2, async_save=async_save)
    codes, said = on_ranks(2, _main_somewhere, argv, nodes, script, 0.5)
    assert codes == [2, 2], said
    error = error_of(said)
    assert "what rank 1 wrote there is not to be seen from rank 0 (host " in error
    assert "--output_dir must be one directory for all nodes" in error
    assert not any("Saved" in text for text in said)
    for node in nodes:
        assert not list(node.glob("out/*checkpoint-*"))


def test_see_all_waits_for_a_slow_file_server(tmp_path):
    written = {"__0_0.distcp": [3, 0], "__1_0.distcp": [4, 0], "metadata.json": [2, 0]}
    for name, (size, _) in written.items():
        (tmp_path / name).write_bytes(bytes(size))
    checkpoint_files.wait_for_shards(tmp_path, written)
    (tmp_path / "__1_0.distcp").write_bytes(b"")  # as a client sees a file before its attributes are new
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (tmp_path / "__1_0.distcp").write_bytes(b"four")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files.time, "sleep", sleep)
        checkpoint_files.wait_for_shards(tmp_path, written)
    assert len(looks) == 3


# ---- what a resumed run logs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nproc", "script"), [(1, "train_ddp.py"), pytest.param(2, "train_fsdp2.py", marks=pytest.mark.slow)]
)
def test_optimizer_flags_take_effect_on_resume(dataset, tmp_path, nproc, script):
    out = tmp_path / "out"
    usual = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    changed = {"weight_decay": 100.0, "adam_beta1": 0.7, "adam_beta2": 0.95, "adam_epsilon": 1e-4}
    train(dataset, out, nproc, script=script, **FLAGS, **usual, stop_at_step=3)
    before = outcome(out, 3, tmp_path)
    train(dataset, out, nproc, script=script, **FLAGS, **changed, stop_at_step=4)
    after = outcome(out, 4, tmp_path)
    # AdamW by hand: m and v hold the step's gradient, so that only the hyperparameters are to be told.
    names = [name.removeprefix("model/") for name in after if name.startswith("model/")]
    assert len(names) > 20
    lr = float(rows(out)[3]["learning_rate"])
    for name in names:
        old = before[f"model/{name}"].double()
        m, v = (after[f"optimizer/state/{name}/{part}"].double() for part in ("exp_avg", "exp_avg_sq"))
        step = m / (1 - 0.7**4) / ((v / (1 - 0.95**4)).sqrt() + 1e-4)
        decayed = old * (1 - lr * (100.0 if old.dim() > 1 else 0.0))
        torch.testing.assert_close(after[f"model/{name}"].double(), decayed - lr * step, rtol=1e-4, atol=1e-6)


def test_resume_keeps_gelu_and_refuses_another(dataset, tmp_path):
    flags = FLAGS | {"save_steps": 3}
    train(dataset, tmp_path / "whole", gelu="tanh", **flags)
    out = tmp_path / "out"
    train(dataset, out, gelu="tanh", **flags, stop_at_step=3)
    said = train(dataset, out, gelu="exact", expect=2, **flags)
    assert (
        "checkpoint-3: the checkpoint is of another model: hidden_act (--gelu) 'gelu_pytorch_tanh' (now 'gelu')"
        in said
    )
    assert "GELU: the tanh approximation" in train(dataset, out, **flags)
    assert_same_run(out, tmp_path / "whole", 6, tmp_path)
    said = train(dataset, out, **flags, overwrite_output_dir=True, stop_at_step=1)
    assert "GELU" not in said, "a new run begins with the default"


def test_resume_takes_gelu_from_the_older_checkpoint_if_the_newest_is_damaged(dataset, tmp_path):
    """The state and what fixes the model come from one and the same checkpoint."""
    flags = FLAGS | {"save_steps": 2}
    train(dataset, tmp_path / "whole", gelu="tanh", **flags)
    out = tmp_path / "out"
    train(dataset, out, gelu="tanh", **flags, stop_at_step=2)
    train(dataset, tmp_path / "other", gelu="exact", **flags, stop_at_step=4)
    newest = Path(shutil.copytree(tmp_path / "other" / "checkpoint-4", out / "checkpoint-4"))
    DAMAGES["a flipped byte"](newest)
    said = train(dataset, out, **flags)
    assert "checkpoint-4: skipped: " in said
    assert "GELU: the tanh approximation" in said
    assert "Resuming after step 2" in said
    assert_same_run(out, tmp_path / "whole", 6, tmp_path)


def test_plan_resume_takes_backend_and_state_from_one_checkpoint(dataset, tmp_path):
    train(dataset, tmp_path, **FLAGS, save_steps=2)
    (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-8")
    for step, backend in ((4, "torch"), (8, "te")):
        path = tmp_path / f"checkpoint-{step}"
        state, manifest = (read_json(path / name) for name in ("trainer_state.json", "manifest.json"))
        write_json(path / "trainer_state.json", state | {"arguments": state["arguments"] | {"backend": backend}})
        manifest["files"]["trainer_state.json"] = size_and_crc(path / "trainer_state.json")
        write_json(path / "manifest.json", manifest)
    args = with_flags(arguments(dataset, **FLAGS), output_dir=str(tmp_path))
    alone = World(0, 0, 1, torch.device("cpu"))
    plan = plan_resume(args.checkpoint, args.do_train, False, alone)
    assert (plan.checkpoint.name, plan.implementation["backend"]) == ("checkpoint-8", "te")
    DAMAGES["a flipped byte"](tmp_path / "checkpoint-8")
    plan = plan_resume(args.checkpoint, args.do_train, False, alone)
    assert (plan.checkpoint.name, plan.state.step) == ("checkpoint-4", 4)
    assert plan.implementation == {"backend": "torch", "gelu": "exact", "bf16_residual": "False"}


def test_plan_resume_refuses_to_overwrite_the_checkpoint_it_resumes_from(dataset, tmp_path):
    train(dataset, tmp_path, **FLAGS)
    flags = {"resume_from_checkpoint": tmp_path / "checkpoint-6", "overwrite_output_dir": True}
    said = train(dataset, tmp_path, **FLAGS, **flags, expect=2)
    assert f"--resume_from_checkpoint {tmp_path / 'checkpoint-6'}: --overwrite_output_dir would remove it" in said
    assert (tmp_path / "checkpoint-6").exists()


def test_choose_backend_keeps_backend_on_resume(dataset, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(UserError, match=r"has used Transformer Engine so far, and now cannot: .*--backend torch"):
        choose_backend(arguments(dataset).model, cpu, bf16=True, previous="te")
    assert choose_backend(arguments(dataset, backend="torch").model, cpu, True, previous="te") == (
        "torch",
        "--backend torch",
    )
    monkeypatch.setattr("common.models.layers.backend.te_missing", lambda device: None)
    assert choose_backend(arguments(dataset).model, gpu, True, previous="torch") == ("torch", "as this run so far")
    assert choose_backend(arguments(dataset, backend="te").model, gpu, True, previous="torch") == (
        "te",
        "--backend te",
    )
    assert choose_backend(arguments(dataset).model, gpu, True, previous="te")[0] == "te"


def _main_out_of_memory(argv: list[str]) -> None:
    def exhausted(optimizer, *_) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"
        )

    register_optimizer_step_pre_hook(exhausted)
    _main(argv)


def test_train_out_of_memory_is_one_line(dataset, tmp_path):
    codes, said = on_ranks(1, _main_out_of_memory, flags_of(dataset, tmp_path, **FLAGS))
    assert codes == [2], said
    assert error_of(said).startswith("error: out of memory on cpu: CUDA out of memory: lower --tokens_per_pack")


def test_ddp_bucket_size_0_is_refused(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", 2, expect=2, ddp_bucket_cap_mb=0)
    assert said == "error: --ddp_bucket_cap_mb 0: must be at least 1\n"
