"""python -m extras.export: the model of any checkpoint, as the run itself would have exported it there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import EsmForMaskedLM

from common.files.safe_files import size_and_crc
from common.models.esm2.config import esm2_config
from common.models.esm2.convert import KEPT
from tests.forked import run_script
from tests.models.reference import reference_model
from tests.small_disk import fill, small_disk
from tests.training.checkpoint_fixtures import exported, files_of, shard
from tests.training_fixtures import final_weights, same_bits, train

CODE = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer"), "evil.Evil")}
FLAGS = {"max_steps": 4, "save_steps": 2, "max_seq_length": 64}


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """Weights like the Hub's: every parameter random, the contact head too; an extra field in config.json, and
    remote code that must not run."""
    directory = tmp_path_factory.mktemp("hub")
    config = esm2_config(2, 64, 4, initializer_range=0.03)
    config.others |= {"esmfold_config": None, "id2label": {"0": "helix", "1": "sheet"}}
    reference_model(config, seed=11).save_pretrained(directory)
    for name, content in (("config.json", config.content()), ("tokenizer_config.json", {})):
        (directory / name).write_text(json.dumps(content | CODE))
    (directory / "evil.py").write_text("raise SystemExit('evil.py was run')")
    return directory


@pytest.fixture(scope="module")
def finished(dataset, hub, tmp_path_factory) -> Path:
    """A run from the Hub's weights, with the other GELU, on one process; checkpoints 2 and 4."""
    out = tmp_path_factory.mktemp("finished") / "out"
    train(dataset, out, model_name_or_path=hub, gelu="tanh", **FLAGS)
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def refused(*arguments) -> str:
    """What the command says, in one line, with status 2."""
    done = run_script("extras.export", *arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert done.stderr.endswith(f"{errors[0]}\n")
    return errors[0]


def test_export_of_last_step_equals_final_model(finished, hub, tmp_path):
    """config.json (GELU, the Hub's own fields), tokenizer, and the contact head, which no checkpoint trains."""
    out = exported(finished / "checkpoint-4", tmp_path / "new" / "model")
    assert files_of(out) == files_of(finished / "final_model")
    assert {path.stat().st_mode for path in out.iterdir()} == {(out / "config.json").stat().st_mode}
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_act"], config["initializer_range"]) == ("gelu_pytorch_tanh", 0.03)
    ours, theirs = (EsmForMaskedLM.from_pretrained(where).state_dict() for where in (out, hub))
    same = {name for name in ours if torch.equal(ours[name], theirs[name])}
    assert {name for name in ours if "contact_head" in name} <= same
    assert len(same) < len(ours) / 2
    card = (out / "README.md").read_text()
    assert KEPT[1:] in card
    assert "| training steps | 4 |\n" in card
    assert str(hub) not in card


def test_export_drops_remote_code(finished, hub):
    """Whoever opens an export is not asked to run what the directory that its run began from named."""
    assert "evil" in (hub / "config.json").read_text()
    written = [*finished.glob("checkpoint-*/*.json"), *(finished / "final_model").iterdir()]
    assert len(written) > 8
    for path in written:
        assert not re.search(b"auto_map|evil", path.read_bytes()), path


@pytest.mark.parametrize(
    ("script", "flags"),
    [("train_ddp.py", {}), ("train_fsdp2.py", {"param_dtype": "bf16", "bf16": True})],
)
def test_export_of_sharded_or_bf16_equals_final_model(dataset, tmp_path, script, flags):
    train(dataset, tmp_path / "run", 2, script=script, **FLAGS | {"max_steps": 2}, **flags)
    assert len([*(tmp_path / "run" / "checkpoint-2").glob("*.distcp")]) == 2
    out = exported(tmp_path / "run" / "checkpoint-2", tmp_path / "model")
    assert files_of(out) == files_of(tmp_path / "run" / "final_model")


def test_export_of_earlier_step_equals_run_export(dataset, finished, hub, tmp_path):
    flags = FLAGS | {"model_name_or_path": hub, "gelu": "tanh", "stop_at_step": 2, "save_final_model": True}
    train(dataset, tmp_path / "stopped", **flags)
    out = exported(finished / "checkpoint-2", tmp_path / "model")
    assert files_of(out) == files_of(tmp_path / "stopped" / "final_model")
    assert not same_bits(final_weights(tmp_path / "stopped"), final_weights(finished))


def test_export_takes_newest_intact_checkpoint(run, tmp_path):
    two = files_of(exported(run / "checkpoint-2", tmp_path / "two"))
    shard(run / "checkpoint-4").write_bytes(b"torn")
    done = run_script("extras.export", run, tmp_path / "model")
    assert done.returncode == 0
    assert f"{run}/checkpoint-4: skipped: __0_0.distcp is damaged" in done.stderr
    assert f"{run}: its newest whole checkpoint is checkpoint-2" in done.stderr
    assert files_of(tmp_path / "model") == two
    (run / "checkpoint-2" / "metadata.json").unlink()
    assert "none of its checkpoints is whole" in (said := refused(run, tmp_path / "none"))
    assert said.endswith(": there is nothing to export")
    assert not (tmp_path / "none").exists()


def test_export_refuses_damaged_checkpoint(run, tmp_path):
    out = tmp_path / "new" / "model"
    assert "usage: python -m extras.export CHECKPOINT OUT" in refused(run)
    assert f"{tmp_path}/absent: no such directory" in refused(tmp_path / "absent", out)
    (tmp_path / "empty").mkdir()
    assert "empty: not a checkpoint of this program, or torn" in refused(tmp_path / "empty", out)
    vouched_for = shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4")
    config = json.loads((vouched_for / "config.json").read_text()) | {"intermediate_size": 128}
    (vouched_for / "config.json").write_text(json.dumps(config))
    assert "config.json is damaged" in refused(vouched_for, out)
    manifest = json.loads((vouched_for / "manifest.json").read_text())
    manifest["files"]["config.json"] = size_and_crc(vouched_for / "config.json")
    (vouched_for / "manifest.json").write_text(json.dumps(manifest))
    assert "its weights are not those of its config.json: encoder.layers.0." in refused(vouched_for, out)
    del manifest["files"]["config.json"]
    (vouched_for / "manifest.json").write_text(json.dumps(manifest))
    assert "of an earlier version, without config.json" in refused(vouched_for, out)
    manifest["model"]["alphabet"] = "A B C"
    (vouched_for / "manifest.json").write_text(json.dumps(manifest))
    assert "of another alphabet" in refused(vouched_for, out)
    shard(run / "checkpoint-4").write_bytes(b"torn")
    assert f"{run}/checkpoint-4: __0_0.distcp is damaged" in refused(run / "checkpoint-4", out)
    assert not out.parent.exists()


def test_export_keeps_existing_files(finished, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    for there in (tmp_path / "mine", tmp_path / "mine" / "notes"):
        assert f"{there}: there is something already" in refused(finished, there)
    assert files_of(tmp_path / "mine") == {"notes": b"mine"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert files_of(exported(finished, tmp_path / "link")) == files_of(tmp_path / "empty")
    assert files_of(tmp_path / "empty") == files_of(finished / "final_model")


def test_export_full_disk_leaves_nothing(finished, tmp_path):
    with small_disk(tmp_path, "1m") as disk:
        fill(disk)
        said = refused(finished, disk / "new" / "model")
        assert f"{disk}/new/model: checkpoint-4 not exported: " in said
        assert "No space left on device" in said
        assert [path.name for path in disk.iterdir()] == ["mine"]


@pytest.mark.parametrize("weights", ["final_model", "another"])
def test_export_other_weights_into_run_are_refused(finished, hub, dataset, tmp_path, weights):
    """They would be ignored: the run resumes with its own."""
    given = shutil.copytree(hub, tmp_path / "another") if weights == "another" else finished / "final_model"
    for more in ({}, {"do_train": False, "do_eval": True}):
        said = train(dataset, finished, expect=2, model_name_or_path=given, gelu="tanh", **FLAGS | more)
        assert f"started from {hub} and resumes with its own, not with those of --model_name_or_path {given}" in said
        assert "choose another --output_dir" in said
    assert (finished / "checkpoint-4").is_dir()
