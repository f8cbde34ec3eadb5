"""--save_hf: each checkpoint is also a directory that transformers' from_pretrained opens."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from common.checkpoint.files import damage_of
from common.distributed.world import World
from tests.decoder_fixtures import train_decoder, write_text
from tests.small_disk import small_disk
from tests.training.checkpoint_fixtures import exported, files_of, names
from tests.training_fixtures import _main, final_weights, flags_of, on_ranks, same_bits, train

FLAGS = {"max_steps": 2, "save_steps": 1, "max_seq_length": 64, "packs_per_step": 2, "save_hf": True}
SHARDED_BF16 = {"bf16": True, "param_dtype": "bf16"}


def assert_models(out: Path, scratch: Path, model_class: type) -> None:
    """checkpoint-2 has final_model's files; checkpoint-1 those that an export of it has; logits are the same."""
    whole, last = files_of(out / "checkpoint-2"), files_of(out / "final_model")
    assert {"model.safetensors", "config.json", "tokenizer_config.json"} <= last.keys()
    assert {name: whole.get(name) for name in last} == last
    ids = torch.tensor([[0, 5, 12, 20, 7, 2]])
    with torch.no_grad():
        logits = [model_class.from_pretrained(out / name)(ids).logits for name in ("checkpoint-2", "final_model")]
    assert torch.equal(*logits)
    assert AutoModel.from_pretrained(out / "checkpoint-2").num_parameters() > 0
    AutoTokenizer.from_pretrained(out / "checkpoint-2")
    first, again = files_of(out / "checkpoint-1"), files_of(exported(out / "checkpoint-1", scratch / "exported"))
    assert {name: first.get(name) for name in again} == again
    assert first["model.safetensors"] != whole["model.safetensors"]
    for name in ("checkpoint-1", "checkpoint-2"):
        assert damage_of(out / name, World(0, 0, 1, torch.device("cpu"))) is None


@pytest.mark.parametrize(
    ("script", "ranks", "flags"),
    [
        ("train_ddp.py", 1, {"async_save": False}),
        ("train_ddp.py", 2, {"bf16": True}),
        ("train_fsdp2.py", 2, SHARDED_BF16),
        pytest.param("train_mfsdp.py", 2, {}, marks=pytest.mark.slow),
        pytest.param("train_ddp_cp.py", 2, {"cp_size": 2, "packs_per_step": 1}, marks=pytest.mark.slow),
    ],
)
def test_save_hf_checkpoint_is_the_model_of_its_step(dataset, tmp_path, script, ranks, flags):
    train(dataset, tmp_path / "out", ranks, script=script, **FLAGS | flags)
    assert_models(tmp_path / "out", tmp_path, AutoModelForMaskedLM)


def test_save_hf_of_decoder_has_its_tokenizer(tmp_path):
    text = write_text(tmp_path / "text")
    train_decoder(text, tmp_path / "out", 2, max_steps=2, checkpoint_freq=1, save_hf=True)
    assert_models(tmp_path / "out", tmp_path, AutoModelForCausalLM)


@pytest.fixture(scope="module")
def uninterrupted(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    train(dataset, out, script="train_fsdp2.py", **FLAGS)
    return out


def _die_when(path: Path, argv: list[str]) -> None:
    """Train, and die by SIGKILL as soon as a path exists."""

    def watch() -> None:
        while not path.exists():
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _main(argv, "train_fsdp2.py")


def test_save_hf_killed_while_writing_the_model_resumes(dataset, uninterrupted, tmp_path):
    argv = flags_of(dataset, tmp_path, **FLAGS)
    codes, said = on_ranks(1, _die_when, tmp_path / "tmp-checkpoint-2" / "model.partial", argv)
    assert codes == [-signal.SIGKILL], said
    assert names(tmp_path) == ["checkpoint-1", "tmp-checkpoint-2"]
    said = train(dataset, tmp_path, script="train_fsdp2.py", **FLAGS)
    assert "Resuming after step 1" in said
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert same_bits(final_weights(tmp_path), final_weights(uninterrupted))


def test_save_hf_files_are_not_needed_to_resume(dataset, uninterrupted, tmp_path):
    """Somebody removes them to free space; a later start does without the flag. Old ones go with their checkpoint."""
    out = Path(shutil.copytree(uninterrupted, tmp_path / "out"))
    (out / "checkpoint-2" / "model.safetensors").unlink()
    train(dataset, out, script="train_fsdp2.py", **FLAGS | {"save_hf": False, "save_total_limit": 1, "max_steps": 3})
    assert names(out) == ["checkpoint-3"]
    assert not (out / "checkpoint-3" / "model.safetensors").exists()


def test_save_hf_full_disk_keeps_the_last_checkpoint(dataset, uninterrupted, tmp_path):
    sizes = {path.name: path.stat().st_size for path in (uninterrupted / "checkpoint-2").iterdir()}
    with small_disk(tmp_path, "8m") as disk:
        out = disk / "out"
        train(dataset, out, script="train_fsdp2.py", **FLAGS | {"stop_at_step": 1})
        room = sum(sizes.values()) - sizes["model.safetensors"] // 2
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - room))
        said = train(dataset, out, expect=2, script="train_fsdp2.py", **FLAGS)
        assert [line.partition(": ")[2] for line in said.splitlines() if line.startswith("error: ")][0].startswith(
            f"{out}: checkpoint not saved: "
        )
        assert names(out) == ["checkpoint-1"]
        (disk / "ballast").unlink()
        train(dataset, out, script="train_fsdp2.py", **FLAGS)
        assert names(out) == ["checkpoint-1", "checkpoint-2"]
