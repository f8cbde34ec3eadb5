"""Flags that a decoder refuses."""

from __future__ import annotations

import pytest

from tests.data_fixtures import expect_error, numbered, write_fasta
from tests.decoder_fixtures import train_decoder, write_text

MIXTRAL = {"model_type": "mixtral", "activation_checkpointing": "none"}
EMULATED = {"fp8": 1, "emulate_precision": 1}


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("train_ddp_cp.py", {"cp_layout": "contiguous"}, "--cp_layout contiguous: causal attention would leave"),
        ("train_ddp_cp.py", {"cp_comm_type": "a2a"}, "--cp_comm_type a2a: decoders have no all-to-all"),
        (
            "train_ddp_cp.py",
            EMULATED | {"model_type": "mixtral", "hidden_width": 64, "num_heads": 4, "fp8_recipe": "current"},
            "--fp8_recipe current: with --cp_size a rank may have no token of an expert",
        ),
        ("train_fsdp2.py", {"model_type": "gpt_neox"}, "--model_type gpt_neox: its layers"),
        ("train_fsdp2.py", {"vocab_size": 200}, "its 259 tokens do not fit into the model's vocabulary of 200"),
        ("train_fsdp2.py", {"num_heads": 5}, "--model_type llama_v3 (as llama3_1_8b): hidden_size 48 is not"),
        (
            "train_fsdp2.py",
            {"model": "llama9"},
            "--model llama9: no such model: neither a directory nor one of llama2_7b",
        ),
        ("train_fsdp2.py", {"fp8": 1, "bf16": 1}, "FP8, delayed scaling needs a GPU"),
        (
            "train_fsdp2.py",
            {"fp8": 1, "emulate_precision": 1, "intermediate_size": 40},
            "is 40: --intermediate_size 48",
        ),
        (
            "train_fsdp2.py",
            MIXTRAL | EMULATED | {"hidden_width": 64, "num_heads": 4, "quant_stats": 1},
            "--quant_stats: not of a layer with experts",
        ),
        ("train_fsdp2.py", {"backend": "te"}, "it needs an NVIDIA GPU, and this run is on a CPU"),
        ("train_fsdp2.py", {"lr_decay_style": "sawtooth"}, "--lr_scheduler_type sawtooth: choose constant, linear"),
        ("train_fsdp2.py", {"plateau": 0.2}, "--plateau 0.2: goes with --lr_scheduler_type plateau, not cosine"),
        ("train_fsdp2.py", {"min_lr": 1}, "--min_lr 1.0: must lie between 0 and --lr 0.001"),
    ],
)
def test_decoder_refuses_unsupported_flags_in_one_line(tmp_path, script, flags, said):
    ranks = 2 if script == "train_ddp_cp.py" else 1
    printed = train_decoder(
        write_text(tmp_path / "documents"), tmp_path / "out", ranks, expect=2, script=script, **flags
    )
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["embed.py", "contacts.py", "finetune.py", "probe.py"])
def test_scripts_for_encoders_refuse_a_decoder_as_one(tmp_path, script):
    """Before they read the rest of their input."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    fasta = write_fasta(tmp_path / "my.fasta", numbered(3))
    (tmp_path / "labels.csv").write_text("id,label\n1,2\n")
    data = {"finetune.py": ("--dataset", tmp_path / "labels.csv"), "probe.py": ("--labels", tmp_path / "labels.csv")}
    given = ("--model_name_or_path", tmp_path / "model", "--fasta", fasta, "--output_dir", tmp_path / "out")
    said = expect_error(script, *given, *data.get(script, ()))
    assert "model: a decoder, where an encoder is read: score.py and generate.py take decoders" in said
    assert not (tmp_path / "out").exists()
