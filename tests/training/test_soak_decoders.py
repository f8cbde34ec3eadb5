"""Decoders under DDP, killed again and again at random moments: bit for bit the run that was never killed.

The long form: pytest tests/training/test_soak_decoders.py -s --soak-rounds 30 [--soak-seed N]
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from common.checkpoint.files import PARTIAL
from tests.data_fixtures import call, load_script
from tests.decoder_fixtures import decoder_flags, write_text
from tests.live_runs import assert_same_run
from tests.soak import Subject, soak
from tests.training_fixtures import final_weights, same_bits

pytestmark = pytest.mark.soak
STEPS = 30
FLAGS = {"max_steps": STEPS, "checkpoint_freq": 2, "save_total_limit": 3, "dataloader_num_workers": 1}
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_ddp.py"]


def training_command(out: Path, **data: Path | None) -> list[str]:
    return [*LAUNCHER, *decoder_flags(data.pop("dataset", None), out, **FLAGS, **data)]


def writes_a_checkpoint(out: Path) -> bool:
    return out.exists() and any(name.startswith(PARTIAL) for name in os.listdir(out))


def assert_same_results(scratch: Path, killed: Path, whole: Path) -> None:
    """Each step once, the same losses, weights and optimiser state, and the same exported model."""
    assert_same_run(killed, whole, STEPS, scratch)
    assert same_bits(final_weights(killed), final_weights(whole))
    assert not writes_a_checkpoint(killed)


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "streamed"])
def test_soak_killed_decoder_is_bit_identical(tmp_path, rounds, generator, prepared):
    if prepared and not rounds:
        pytest.skip("in the long form alone (--soak-rounds)")
    data = {"dataset": write_text(tmp_path / "text")}
    if prepared:
        prepare = load_script("1.tokenize_text.py")
        given = ("--dataset", data["dataset"], "--preprocessing_num_workers", 1)
        call(prepare, *given, "--output_dir", tmp_path / "prepared")
        data = {"dataset_dir": tmp_path / "prepared" / "text"}
    command, compare = partial(training_command, **data), partial(assert_same_results, tmp_path)
    soak(Subject(command, compare, writes_a_checkpoint), tmp_path, rounds or 1, generator)
