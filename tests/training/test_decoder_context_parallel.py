"""Runs of decoders whose ranks share packs: the reference is one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decoder_fixtures import train_decoder, write_text
from tests.training_fixtures import final_weights, relative_difference, rows

MIXTRAL = {"model_type": "mixtral", "activation_checkpointing": "none"}
EMULATED = {"fp8": 1, "emulate_precision": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "documents")


@pytest.mark.parametrize(
    ("script", "family"),
    [
        ("train_fsdp2.py", MIXTRAL),
        pytest.param("train_fsdp2.py", {"model_type": "mistral"}, marks=pytest.mark.slow),
        ("train_mfsdp.py", {}),
        pytest.param("train_mfsdp.py", MIXTRAL, marks=pytest.mark.slow),
    ],
    ids=["mixtral", "mistral", "mfsdp", "mfsdp mixtral"],
)
def test_decoder_with_shared_documents_equals_one_process(text, tmp_path, script, family):
    """Documents of any length, each cut into chunks by itself: losses with the router's, evaluation, weights."""
    if script == "train_mfsdp.py":
        pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    flags = family | {"document_masks": 1, "max_steps": 3, "validation_freq": 3}
    runs = {1: tmp_path / "alone", 2: tmp_path / "shared"}
    for cp_size, out in runs.items():
        train_decoder(
            text, out, cp_size, script="train_fsdp2.py" if cp_size == 1 else script, cp_size=cp_size, **flags
        )
    alone, shared = (rows(out) for out in runs.values())
    assert len(shared) == len(alone) == 3
    for one, other in zip(shared, alone, strict=True):
        assert (one["tokens"], one["epoch"]) == (other["tokens"], other["epoch"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert shared[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=1e-5)
    assert relative_difference(*(final_weights(out) for out in runs.values())) < 1e-5


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        pytest.param({}, "delayed", marks=pytest.mark.slow),
        ({}, "current"),
        pytest.param({}, "mxfp8", marks=pytest.mark.slow),
        pytest.param({}, "nvfp4", marks=pytest.mark.slow),
        pytest.param(MIXTRAL, "delayed", marks=pytest.mark.slow),
    ],
    ids=["delayed", "current", "mxfp8", "nvfp4", "mixtral"],
)
def test_decoder_emulated_formats_scale_by_whole_pack(text, tmp_path, family, recipe):
    """As of one process, to fp32's rounding, but for NVFP4: its scale of a tensor is of a rank's own tokens."""
    flags = {"hidden_width": 64, "num_heads": 4, "intermediate_size": 96, "document_masks": 1, "max_steps": 2}
    flags |= EMULATED | ({"fp8": 0, "fp4": 1} if recipe == "nvfp4" else {"fp8_recipe": recipe})
    flags |= family | {"lr": 0, "min_lr": 0, "save_final_model": False}
    train_decoder(text, tmp_path / "alone", **flags)
    train_decoder(text, tmp_path / "shared", 2, cp_size=2, **flags)
    for one, other in zip(rows(tmp_path / "shared"), rows(tmp_path / "alone"), strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2 if recipe == "nvfp4" else 5e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-2 if recipe == "nvfp4" else 5e-3)
