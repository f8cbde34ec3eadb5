"""Preflight reads the job's own command, and sizes the model that it will train."""

from __future__ import annotations

import json

import pytest

from common.cli import UserError
from common.models.esm2.config import load_config
from common.models.layers.config_base import override
from common.models.layers.initialise import count_parameters
from extras.preflight.command import flags_of, model_of, split_command

TINY = "--config_overrides=num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=256"
# Embedding; of each of 2 layers the attention, the feed-forward part and two norms; the last norm; the head.
SMALL = 33 * 64 + 2 * (4 * (64 * 64 + 64) + 2 * 64 * 256 + 64 + 256 + 4 * 64) + 2 * 64 + (64 * 64 + 64 + 2 * 64 + 33)


@pytest.mark.parametrize(
    ("command", "parameters"),
    [
        (["train_ddp.py", "--config_name=facebook/esm2_t6_8M_UR50D"], 7_512_353),
        (["train_fsdp2.py", "--config_name=facebook/esm2_t36_3B_UR50D", TINY, "--sharding_strategy=full"], SMALL),
        (["train_ddp.py", "{flags}", "--model_name_or_path={export}"], SMALL),
        (["train_mfsdp.py", "{flags}"], 7_512_353),
        # 2 x (4 x 64^2 + 3 x 64 x 128 + 2 x 64) in layers, two embeddings of 128,256, and the last norm
        (
            ["train_fsdp2.py", "--model=llama3_1_8b", "--tokenizer=bytes", "--hidden_width=64", "--num_layers=2"]
            + ["--num_heads=4", "--num_key_value_heads=4", "--intermediate_size=128"],
            2 * 41_088 + 2 * 128_256 * 64 + 64,
        ),
        (["train_ddp.py", "--config_name=some/model"], None),
    ],
)
def test_preflight_sizes_the_model_of_the_jobs_own_command(tmp_path, command, parameters):
    """By its file of flags, size overrides, weights and a decoder's sizes."""
    export = tmp_path / "export"
    (tmp_path / "flags.yaml").write_text("config_name: facebook/esm2_t6_8M_UR50D\n")
    export.mkdir()
    tiny = override(load_config("facebook/esm2_t6_8M_UR50D"), TINY.partition("=")[2])
    (export / "config.json").write_text(json.dumps(tiny.content()))
    words = [word.format(flags=tmp_path / "flags.yaml", export=export) for word in command]
    argv = ["--gpus_per_node=8", *words, "--dataset=x", "--max_steps=1", "--output_dir=out", "--save_total_limit=7"]
    own, run = split_command(argv)
    assert own == ["--gpus_per_node=8"]
    made = model_of(run)
    assert (made if made is None else count_parameters(made)) == parameters
    found = flags_of(run)
    assert (found["output_dir"], found["save_total_limit"]) == ("out", 7)
    assert found["dataset"] == (None if "--model=llama3_1_8b" in command else "x")


def test_preflight_refuses_what_the_job_would():
    with pytest.raises(UserError, match="unknown flag --no_such_flag"):
        split_command(["train_ddp.py", "--no_such_flag"])
    with pytest.raises(UserError, match=r"give that first: train_ddp\.py FILE\.yaml$"):
        split_command(["train_ddp.py", "--straggler_every=5"])
