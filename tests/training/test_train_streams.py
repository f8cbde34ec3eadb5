"""train_ddp.py --dataset: proteins as they are, no preparation; the same run whatever interrupts it."""

from __future__ import annotations

import json
import random

import pytest

from common.files.safe_files import read_json_lines
from extras.prepare.sources.find_files import open_source, with_contents
from tests.data.stream_fixtures import proteins, write
from tests.data_fixtures import REAL_SAMPLE, edit_unnoticed, needs_real_sample
from tests.forked import run_script
from tests.live_runs import assert_same_run, newest_step
from tests.training.test_resume import killed_again_and_again
from tests.training_fixtures import environment, final_weights, flags_of, losses, rows, same_bits, train

FLAGS = {"max_steps": 24, "gradient_accumulation_steps": 2, "save_steps": 1, "save_total_limit": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Parquet files with enough row groups for two lanes of two streams, and a held-out file."""
    root = tmp_path_factory.mktemp("source")
    for number in range(2):
        write(root / f"train-{number}.parquet", proteins(300, seed=number), row_group=60)
    write(root / "validation.fasta", proteins(30, seed=9))
    return root


def test_streamed_resume_after_kill_is_bit_identical(source, tmp_path):
    flags = FLAGS | {"dataset": source, "dataloader_num_workers": 2, "do_eval": True, "eval_steps": 5}
    train(None, tmp_path / "whole", **flags)
    killed = tmp_path / "killed"
    killed_again_and_again(None, killed, tmp_path / "logs", 1, 3, random.Random(4), **flags)
    assert 0 < newest_step(killed) < 24
    train(None, killed, **flags)
    assert_same_run(killed, tmp_path / "whole", 24, tmp_path)
    assert same_bits(final_weights(killed), final_weights(tmp_path / "whole"))
    results = json.loads((killed / "eval_results.json").read_text())
    assert results["eval_samples"] == 30
    assert 2.7 < results["eval_unigram_loss_masked"] < 3.1


def test_streamed_run_is_independent_of_ranks(source, tmp_path):
    """Two ranks x 1, stopped half way, then one process x 2: the losses of one process x 2."""
    flags = {"dataset": source, "max_steps": 24}
    train(None, tmp_path / "whole", gradient_accumulation_steps=2, **flags)
    out = tmp_path / "moved"
    train(None, out, nproc=2, stop_at_step=11, **flags)
    train(None, out, **flags)
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    epochs = [row["epoch"] for row in rows(tmp_path / "whole")]
    assert [row["epoch"] for row in rows(out)] == epochs, "of all ranks, through a restart"
    sequences = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())["sequences"]
    assert epochs[-1] == sequences / 600
    steps = [after - before for before, after in zip([0, *epochs], epochs, strict=False)]
    assert max(steps) < 3 * min(steps), "it moves with every step"


def test_streamed_resume_refuses_other_dataset(source, tmp_path):
    train(None, tmp_path / "out", dataset=source, max_steps=4, stop_at_step=2)
    said = train(None, tmp_path / "out", expect=2, dataset=write(tmp_path / "b.csv", proteins(90)), max_steps=4)
    assert "the data have changed since the checkpoint" in said


def test_streamed_resume_identifies_data_by_content(tmp_path):
    """Copied under another name they are the same; edited in place, to the same size and time, they are not."""
    path, out = write(tmp_path / "a.csv", proteins(90)), tmp_path / "out"
    train(None, out, dataset=path, max_steps=6, stop_at_step=2)
    copy = tmp_path / "b.csv"
    copy.write_bytes(path.read_bytes())
    train(None, out, dataset=copy, max_steps=6, stop_at_step=4)
    last = path.read_bytes()[-9:-1]
    edit_unnoticed(path, last, last[::-1])
    said = train(None, out, expect=2, dataset=path, max_steps=6)
    assert "error: the data have changed since the checkpoint" in said
    source = with_contents(open_source(str(copy), False), "train")
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["data"]["dataset"] == source.identity("train")


@needs_real_sample
def test_streamed_run_reads_real_fasta(tmp_path):
    """The command line of a user, --streaming included, which says nothing about a local file."""
    flags = flags_of(
        None, tmp_path, dataset=REAL_SAMPLE, eval_dataset=REAL_SAMPLE, do_eval=True, max_eval_samples=20, max_steps=3
    )
    done = run_script("train_ddp.py", *flags, "--streaming", env=environment())
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_samples"] == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_steps": None}, "missing: --max_steps (a --dataset has no length known"),
        ({"do_eval": True}, "no validation files in it: give --eval_dataset, or drop --do_eval"),
        ({"dataset": "missing.csv"}, "--dataset missing.csv: neither a file, directory or glob, nor a Hub dataset"),
        ({"dataset_dir": "x"}, "--dataset (files as they are) excludes --dataset_dir"),
        ({"max_train_samples": 5}, "--max_train_samples needs --dataset_dir"),
        ({"dataset": None, "dataset_dir": "x", "streaming": True}, "missing: --dataset (--streaming goes with it)"),
    ],
)
def test_streamed_run_refuses_bad_input(tmp_path, flags, message):
    flags = {"dataset": write(tmp_path / "a.csv", proteins(20))} | flags
    said = train(flags.pop("dataset_dir", None), tmp_path / "out", expect=2, **flags)
    assert message in said
    assert not (tmp_path / "out").exists()


def test_streamed_resume_refuses_other_packs_per_step(source, tmp_path):
    out, flags = tmp_path / "out", {"dataset": source, "max_steps": 6}
    train(None, out, **flags, packs_per_step=2, stop_at_step=3)
    said = train(None, out, expect=2, **flags, packs_per_step=4)
    assert "--packs_per_step 4: the checkpoint's position is for streams of 2 packs a step" in said
    assert "Resuming after step 3" in train(None, out, **flags, packs_per_step=2)
