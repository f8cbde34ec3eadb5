"""A run says which weights it starts from, and warns of those that lie in a directory and are not loaded."""

from __future__ import annotations

import pytest

from common.distributed.strategy import ReplicaFlags
from common.training.command_line import parse_run
from common.training.results import describe_weights, warn_of_unused_weights
from tests.training_fixtures import train

RUN = {"max_steps": 2, "stop_at_step": 1, "save_final_model": True}


def test_announce_names_initial_weights(dataset, tmp_path):
    """MODEL=DIR of a job script is --config_name DIR: its weights were left out without a word."""
    said = train(dataset, tmp_path / "first", **RUN)
    assert "Weights: random, seed 42\n" in said
    assert "WARNING" not in said
    model = tmp_path / "first" / "final_model"
    said = train(dataset, tmp_path / "configuration", config_name=model, **RUN)
    assert "Weights: random, seed 42\n" in said
    assert f"WARNING - {model} has weights (model.safetensors), which are not loaded: training starts" in said
    said = train(dataset, tmp_path / "weights", model_name_or_path=model, **RUN)
    assert f"Weights: from {model} (model.safetensors)\n" in said
    said = train(dataset, tmp_path / "weights", model_name_or_path=model, max_steps=2)
    assert "Weights: from checkpoint-1\n" in said
    assert "has weights" not in said


@pytest.mark.parametrize("flag", ["config_name", "model"])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], " and 1 more"),
        (["pytorch_model.bin"], "pytorch_model.bin"),
        (["__0_0.distcp", "__1_0.distcp"], "__0_0.distcp and 1 more"),
        (["config.json", "training_args.bin"], None),
    ],
)
def test_warn_of_unused_weights_finds_any_format(tmp_path, flag, files, named):
    for name in files:
        (tmp_path / name).touch()
    argv = ["--dataset=x", "--max_steps=1", "--output_dir=out"]
    args = parse_run("", ReplicaFlags, [*argv, f"--{flag}={tmp_path}"])
    warning = warn_of_unused_weights(args.model.model_name_or_path, args.model_named)
    assert (warning is None) == (named is None)
    if named:
        assert f"{named})" in warning
        assert warning.endswith(f"give --model_name_or_path {tmp_path}")
    assert describe_weights(args.model.model_name_or_path, args.data.seed, 0) == f"random, seed {args.data.seed}"
    given = parse_run("", ReplicaFlags, [*argv, "--config_name=x", f"--model_name_or_path={tmp_path}"])
    assert warn_of_unused_weights(given.model.model_name_or_path, given.model_named) is None
