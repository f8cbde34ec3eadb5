"""Bad input to train_ddp.py: status 2, one line that says what, where and what to do, nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path

import datasets
import pytest
import yaml

from common.cli import UserError
from common.models.esm2 import alphabet
from common.models.esm2.config import ESM2_SIZES
from common.training import run_directory, same_run
from tests.data_fixtures import numbered, write_fasta
from tests.forked import run_script
from tests.patience import receive
from tests.small_disk import fill, small_disk
from tests.training_fixtures import flags_of, losses, run_forked, train

MISSING = "add, say, --config_name facebook/esm2_t6_8M_UR50D {} --output_dir out"
NO_LENGTH = MISSING.format("--max_steps 1000")


def error_of(said: str) -> str:
    """The one error line; there must be no traceback and no second one."""
    assert "Traceback" not in said, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    return errors[0]


def refused(dataset_dir, output_dir, **flags) -> str:
    return error_of(train(dataset_dir, output_dir, expect=2, **flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"frobnicate": 1}, "--frobnicate"),
        ({"max_step": 3}, "--max_step"),  # an abbreviation is an unknown flag
        ({"bf16": "maybe"}, "--bf16"),
        ({"max_steps": "ten"}, "--max_steps"),
        ({"output_dir": ""}, "missing: --output_dir (where the results go): add, say, --output_dir out"),
        ({"dataset_dir": ""}, "missing: --dataset_dir ("),
        ({"config_name": None}, "missing: --config_name ("),
        ({"config_name": None, "dataset_dir": "", "output_dir": ""}, MISSING.format("--dataset_dir processed/arrow")),
        (
            {"config_name": None, "dataset_dir": None, "dataset": "a.csv", "max_steps": None, "output_dir": ""},
            NO_LENGTH,
        ),
        ({"config_name": "facebook/esm2_t6_8M_UR50D", "model_name_or_path": "./none"}, "./none: no such model"),
        ({"config_name": "facebook/esm3"}, next(iter(ESM2_SIZES))),
        ({"config_name": "./no/such/directory"}, next(iter(ESM2_SIZES))),
        ({"config_overrides": "hidden_size=big"}, "hidden_size=big"),
        ({"config_overrides": "hidden_size=60,num_attention_heads=7"}, "multiple"),
        ({"tokenizer_name": "gpt2"}, "--tokenizer_name gpt2"),
        ({"tokens_per_pack": 100, "max_seq_length": 128}, "--tokens_per_pack 100"),
        ({"pad_to_max_length": True, "tokens_per_pack": 4096}, "--tokens_per_pack"),
        ({"pad_to_max_length": True, "sequence_packing": True}, "exclude"),
        ({"mlm_probability": 1.5}, "--mlm_probability"),
        ({"eval_mlm_probability": 0}, "--eval_mlm_probability 0.0: must be between 0 and 1"),
        (
            {"mlm_probability_end": 0.2},
            "--mlm_probability_end 0.2: must be above 0 and at most --mlm_probability 0.15",
        ),
        ({"mask_replace_prob": -0.1}, "--mask_replace_prob -0.1: a fraction, 0 to 1"),
        ({"mask_replace_prob": 0.95}, "--mask_replace_prob 0.95 and --random_replace_prob 0.1: more than 1 in sum"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps"),
        ({"eval_steps": 10}, "--do_eval"),
        ({"do_preprocess": True}, "1.tokenize_uniref_csv.py"),
        ({"lr_scheduler_type": "sawtooth"}, "--lr_scheduler_type sawtooth"),
        ({"report_to": "carrier-pigeon"}, "--report_to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_train_refuses_bad_flags_by_name(dataset, tmp_path, flags, message):
    flags = {"dataset_dir": dataset, "output_dir": tmp_path / "out"} | flags
    assert message in refused(**flags)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_dataset_dir_without_dataset_is_refused(dataset, tmp_path):
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "nowhere"):
        assert str(directory) in refused(directory, tmp_path / "out")
    (tmp_path / "a.csv").write_text("id,text\n")
    assert "a file, not the directory that 1.tokenize_uniref_csv.py writes: train on it by --dataset" in refused(
        tmp_path / "a.csv", tmp_path / "out"
    )
    only_test = tmp_path / "only_test"
    only_test.mkdir()
    (only_test / "test").symlink_to(dataset / "test")
    assert "train" in refused(only_test, tmp_path / "out")


def test_dataset_without_validation_split_is_refused(dataset, tmp_path):
    only_train = tmp_path / "only_train"
    only_train.mkdir()
    (only_train / "train").symlink_to(dataset / "train")
    assert "validation" in refused(only_train, tmp_path / "out", do_eval=True)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_dataset_with_unknown_token_ids_is_refused(tmp_path):
    rows = {"input_ids": [[0, 5, 40, 2]] * 50}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "data" / "train")
    assert "40" in refused(tmp_path / "data", tmp_path / "out")


def test_dataset_padded_by_datasets_map_is_accepted(dataset, tmp_path):
    """Padded to 512 with attention_mask and special_tokens_mask, int64 or int32, as datasets.map writes them."""
    columns: dict[str, list] = {"input_ids": [], "attention_mask": [], "special_tokens_mask": []}
    for row in datasets.load_from_disk(str(dataset / "train")).select(range(60)):
        ids = row["input_ids"][:511] + ([alphabet.EOS] if len(row["input_ids"]) > 511 else [])
        padding = 512 - len(ids)
        columns["input_ids"].append(ids + [alphabet.PAD] * padding)
        columns["attention_mask"].append([1] * len(ids) + [0] * padding)
        columns["special_tokens_mask"].append([int(i in (0, 2)) for i in ids] + [1] * padding)
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "data" / "train")
    train(tmp_path / "data", tmp_path / "out", max_steps=3)
    assert len(losses(tmp_path / "out")) == 3


@pytest.mark.parametrize("kind", ["a file in its place", "a file above it"])
def test_output_dir_under_a_file_is_refused(dataset, tmp_path, kind):
    blocker = tmp_path / "out"
    blocker.write_text("mine")
    target = blocker if kind == "a file in its place" else blocker / "deeper"
    assert str(blocker) in refused(dataset, target)
    assert blocker.read_text() == "mine"


def test_output_dir_read_only_is_refused(dataset):
    assert "/proc" in refused(dataset, Path("/proc/no_such_output"))


def test_output_dir_on_full_disk_is_removed(dataset, tmp_path):
    with small_disk(tmp_path, "64k") as disk:
        fill(disk)
        assert f"{disk}/new/out: No space left on device: make room" in refused(dataset, disk / "new/out")
        assert [path.name for path in disk.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "begun", "left"),
    [("there", False, []), ("new/out", False, None), ("kept", True, [".run", "metrics.jsonl"])],
)
def test_run_directory_removes_what_a_failed_start_made(tmp_path, name, begun, left):
    """And once it has something to keep, all of it."""
    path = tmp_path / name
    (tmp_path / "there").mkdir()

    def run():
        with run_directory.RunDirectory(path) as directory:
            directory.claim()
            if name != "there":
                (path / "metrics.jsonl").touch()
            if begun:
                directory.keep()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        run()
    assert (sorted(p.name for p in path.iterdir()) if path.exists() else None) == left
    assert not (tmp_path / "new").exists()


def test_run_directory_lock_of_removed_file_is_taken_anew(tmp_path):
    """A failed run removes the file that it locked; who waited must lock the file that the next run opens."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()

    def hold_next():
        told.put("waiting")
        with closing(run_directory.hold(tmp_path / "out" / ".run")):
            told.put((tmp_path / "out" / ".run").exists())

    other = context.Process(target=hold_next)

    def run():
        with run_directory.RunDirectory(tmp_path / "out"):
            other.start()
            assert receive(told) == "waiting"
            time.sleep(0.5)  # it has opened the file
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        run()
    assert receive(told) is True
    other.join()


def test_packs_per_step_not_divisible_by_ranks_is_refused_of_streams(tmp_path):
    """Their packs belong to ranks; prepared data take any number."""
    fasta = write_fasta(tmp_path / "proteins.fasta", numbered(8))
    message = refused(None, tmp_path / "out", nproc=2, packs_per_step=3, dataset=fasta)
    assert "3 packs" in message
    assert re.search(r"use 1, 3 ranks, or 2 or 4 packs", message), message


def test_model_larger_than_memory_is_refused(dataset, tmp_path):
    sizes = "hidden_size=65536,num_hidden_layers=100,num_attention_heads=512,intermediate_size=64"
    said = refused(dataset, tmp_path / "out", config_overrides=sizes)
    # 401 matrices of 2^16 x 2^16, four fp32 numbers a weight: 27.56 TB, and a little.
    assert re.search(r"of the 1 rank on this machine need 27,5\d\d GB, and it has \d+:", said), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_flags_file_is_read_and_checked(dataset, tmp_path, suffix):
    flags = dict(flag[2:].split("=", 1) for flag in flags_of(dataset, tmp_path / "out", max_steps=2))
    typed = {k: yaml.safe_load(v) for k, v in flags.items()}
    write = json.dumps if suffix == "json" else yaml.safe_dump

    def run(values: dict) -> subprocess.CompletedProcess:
        file = tmp_path / f"flags.{suffix}"
        file.write_text(write(values))
        return run_script("train_ddp.py", str(file))

    bad = run(typed | {"frobnicate": 1})
    assert bad.returncode == 2
    assert "frobnicate" in error_of(bad.stderr)
    good = run(typed)
    assert good.returncode == 0, good.stderr
    assert len(losses(tmp_path / "out")) == 2
    missing = run_script("train_ddp.py", f"nowhere.{suffix}")
    assert missing.returncode == 2
    assert "nowhere" in error_of(missing.stderr)


def test_overwrite_output_dir_keeps_other_files(dataset, tmp_path):
    """In the guides the output directory is often the data directory."""
    out = tmp_path / "out"
    (out / "csv").mkdir(parents=True)
    (out / "csv" / "x000.csv").write_text("id,text\n")
    (out / "processed" / "arrow").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    train(dataset, out, max_steps=2, save_steps=1)
    train(dataset, out, max_steps=1, overwrite_output_dir=True)
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-1"]
    assert len(losses(out)) == 1
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "csv" / "x000.csv").exists()
    assert (out / "processed" / "arrow").is_dir()


def test_overwrite_output_dir_resumes_restarted_job(dataset, tmp_path, monkeypatch):
    """A hundred restarts come with the same command line; the guides' runs started over each time."""
    flags = {"overwrite_output_dir": True, "max_steps": 4}
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    first = run_forked(dataset, tmp_path / "out", stop_at_step=2, **flags)
    assert first.returncode == 0, first.stderr
    again = run_forked(dataset, tmp_path / "out", **flags)
    assert "Resuming after step 2" in again.stderr
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    other = run_forked(dataset, tmp_path / "out", stop_at_step=2, **flags)
    assert other.returncode == 0, other.stderr
    assert "Resuming" not in other.stderr


def test_run_directory_new_torchrun_of_same_rdzv_id_is_new_job(tmp_path, monkeypatch):
    """On one machine only the user starts torchrun again; an operator, or several nodes, restart the same job."""
    for name, value in (("TORCHELASTIC_RUN_ID", "esm2"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    parent = "A"
    monkeypatch.setattr(same_run, "_launcher", lambda: parent)
    out = tmp_path / "out"

    def restarted() -> bool:
        with closing(run_directory.RunDirectory(out)) as directory:
            directory.claim()
            return directory.restarted

    assert not restarted()
    assert restarted(), "a restart within one torchrun"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert restarted()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "esm2")
    assert restarted()
    parent = "B"
    assert not restarted(), "another torchrun with the same id"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    parent = "C"
    assert restarted(), "a pod that the operator has started again"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    monkeypatch.setenv("WORLD_SIZE", "2")
    parent = "D"
    assert restarted(), "the first rank is on another node now"


def test_run_directory_identifies_job_by_uid_flags_or_time(tmp_path, monkeypatch):
    """As with the guides' constant rendezvous id, or env_vars.sh sourced once for two jobs."""
    for name, value in (("TORCHELASTIC_RUN_ID", "esm2"), ("KUBERNETES_SERVICE_HOST", "10.0.0.1")):
        monkeypatch.setenv(name, value)
    pods = count()
    monkeypatch.setattr(same_run, "_launcher", lambda: str(next(pods)))

    def restarted(done: bool = False) -> bool:
        with closing(run_directory.RunDirectory(tmp_path)) as directory:
            directory.claim()
            if done:
                directory.done()
            return directory.restarted

    assert not restarted()
    assert restarted(done=True)
    assert restarted(done=True), "a pod that is started again while the job ends"
    monkeypatch.setattr(same_run, "DONE_FOR_S", -1.0)
    assert not restarted()
    assert restarted()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--learning_rate=1"])
    assert not restarted()
    # With a UID flags count for nothing; where the API did not answer, it does not count.
    for uid, more, known in (
        ("1", "", False),
        ("1", "-x", True),
        ("2", "-x", False),
        ("", "-x", True),
        ("2", "", False),
    ):
        monkeypatch.setenv("JOB_UID", uid)
        monkeypatch.setattr(sys, "argv", ["train_ddp.py", more])
        assert restarted() is known, (uid, more)


def _try(path, told) -> None:
    with pytest.raises(UserError, match="another run is writing here"):
        run_directory.hold(path, patience_s=0.3)
    told.put(True)


def test_run_directory_lock_is_held_until_close(tmp_path):
    """POSIX locks go with any handle of the file that is closed."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with closing(run_directory.RunDirectory(tmp_path)) as directory:
        directory.claim()
        other = context.Process(target=_try, args=(tmp_path / ".run", told))
        other.start()
        assert receive(told)
        other.join()
