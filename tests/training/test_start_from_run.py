"""--model_name_or_path of the train scripts: a run's directory and its checkpoints, as their final_model/."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.decoder_fixtures import train_decoder, write_text
from tests.training.checkpoint_fixtures import shard
from tests.training_fixtures import losses, train

FLAGS = {"max_steps": 4, "save_steps": 2, "max_seq_length": 64}


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    """A run on two ranks with checkpoints 2 and 4, of which the last is its final_model/."""
    out = tmp_path_factory.mktemp("finished") / "out"
    train(dataset, out, 2, script="train_fsdp2.py", **FLAGS)
    return out


def started_from(model: Path | str, dataset, out: Path, **flags) -> list:
    """The losses of two steps."""
    flags = FLAGS | {"max_steps": 2, "save_final_model": False} | flags
    train(dataset, out, model_name_or_path=model, **flags)
    return losses(out)


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py", "train_mfsdp.py"])
def test_run_directory_stands_for_its_final_model(dataset, finished, tmp_path, script):
    expected = started_from(finished / "final_model", dataset, tmp_path / "a", script=script)
    assert started_from(finished, dataset, tmp_path / "b", script=script) == expected
    assert started_from(f"{finished}/checkpoint-4/", dataset, tmp_path / "c", script=script) == expected
    assert started_from(finished / "checkpoint-2", dataset, tmp_path / "d", script=script) != expected


def test_run_without_final_model_stands_for_its_newest_whole_checkpoint(dataset, finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(run / "final_model")
    newest = started_from(finished / "checkpoint-4", dataset, tmp_path / "a")
    assert started_from(run, dataset, tmp_path / "b") == newest
    train(dataset, tmp_path / "b", model_name_or_path=run, **FLAGS | {"max_steps": 3})  # the run resumes by that name
    shard(run / "checkpoint-4").write_bytes(b"damaged")
    said = train(dataset, tmp_path / "c", model_name_or_path=run, **FLAGS | {"max_steps": 2})
    assert "checkpoint-4: skipped" in said
    assert losses(tmp_path / "c") == started_from(finished / "checkpoint-2", dataset, tmp_path / "d")
    said = train(dataset, tmp_path / "e", expect=2, model_name_or_path=run / "checkpoint-4", **FLAGS)
    assert f"error: --model_name_or_path {run / 'checkpoint-4'}: " in said


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
def test_decoder_starts_from_a_run(tmp_path, script):
    """final_model/ says on which contexts it was trained: now and before."""
    text, run = write_text(tmp_path / "text"), tmp_path / "run"
    train_decoder(text, run, checkpoint_freq=3, max_steps=3)
    sizes = ("hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    flags = dict.fromkeys((*sizes, "model_type", "initializer_range")) | {"max_steps": 2, "script": script}
    found = []
    for n, model in enumerate((run / "final_model", run, run / "checkpoint-3")):
        train_decoder(text, tmp_path / str(n), model_name_or_path=model, **flags)
        found.append(losses(tmp_path / str(n)))
    assert found[0] == found[1] == found[2]
    # its tokenizer, too
    train_decoder(text, tmp_path / "t", model_name_or_path=run, tokenizer="model", **flags)
    assert losses(tmp_path / "t") == found[0]
    for width in (16, 48):
        train_decoder(text, tmp_path / f"w{width}", model_name_or_path=run, **flags | {"max_context_width": width})
    for out, context in ((run, 32), (tmp_path / "w16", 32), (tmp_path / "w48", 48)):
        config = AutoConfig.from_pretrained(out / "final_model")
        assert config.trained_context == context
