"""TensorBoard's event files and W&B's offline ones: one run through all restarts, each step once, no step missing."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import struct
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread, imsave
from transformers.integrations.integration_utils import rewrite_logs

from common.distributed.world import World
from common.training.run_logger import RunLogger, Tracker
from extras.publish.trackers import grouped, open_tracker
from tests.forked import run_script
from tests.patience import Limit, wait_until
from tests.training_fixtures import arguments, environment, flags_of, on_ranks, rows

FLAGS = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "save_final_model": False}
BLOCK = 32768  # of the log files that W&B writes, a format of LevelDB's
PROJECT = "proteins"


def nothing_is_installed(name: str) -> None:
    """In place of importlib's find_spec."""


@pytest.fixture
def settings(tmp_path) -> dict[str, str]:
    """An environment in which W&B writes files only, knows no account, and finds none of the user's settings."""
    told = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    places = {f"WANDB_{name}_DIR": str(tmp_path / "wandb-own") for name in ("CONFIG", "CACHE", "DATA")}
    told |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "NETRC": "/dev/null"}
    # Without the list of installed packages, which takes as long to read as the run.
    return told | places | {"WANDB_PROJECT": PROJECT, "HOME": str(tmp_path), "WANDB__SAVE_REQUIREMENTS": "false"}


def tracked(dataset, output_dir, env: dict, report_to: str, expect: int = 0, **flags) -> str:
    """Train; returns standard error."""
    if report_to == "tensorboard":
        time.sleep(1)  # event files are ordered by the second in their names: a start takes longer in real life
    done = run_script("train_ddp.py", *flags_of(dataset, output_dir, **FLAGS | flags, report_to=report_to), env=env)
    assert done.returncode == expect, done.stderr
    return done.stderr


# ---- TensorBoard --------------------------------------------------------------------------------------------


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} of all event files together, as TensorBoard reads them; each step once."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(directory))
    found.Reload()
    values = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    twice = {tag for tag, points in values.items() if max(Counter(step for step, _ in points).values()) > 1}
    assert not twice, f"steps more than once: {twice}"
    return {tag: dict(points) for tag, points in values.items()}


def test_tensorboard_resume_has_each_step_once(dataset, tmp_path):
    """Killed after step 4, whose checkpoint is lost; then started once more when all was done."""
    pytest.importorskip("tensorboard")
    out, flags = tmp_path / "out", {"do_eval": True, "eval_steps": 2}
    tracked(dataset, out, environment(), "tensorboard", stop_at_step=4, **flags)
    before = scalars(out / "logs")
    assert list(before["train/loss"]) == [1, 2, 3, 4]
    assert list(before["train/train_loss"]) == list(before["test/loss"]) == [4]
    shutil.rmtree(out / "checkpoint-4")
    (events,) = (out / "logs").iterdir()
    events.write_bytes(events.read_bytes()[:-5])  # torn
    for _ in range(2):
        tracked(dataset, out, environment(), "tensorboard", **flags)
    after = scalars(out / "logs")
    for tag, name in {
        "train/loss": "loss",
        "train/step_loss": "step_loss",
        "train/train_perplexity": "train_perplexity",
        "perf/tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
        "perf/step_seconds": "step_seconds",
        "train/grad_norm": "grad_norm",
        "eval/loss": "eval_loss",
        "eval/unigram_loss_masked": "eval_unigram_loss_masked",
        "eval/perplexity": "perplexity",
    }.items():
        assert after[tag] == pytest.approx({row["step"]: row[name] for row in rows(out) if name in row}), tag
    assert list(after["eval/loss"]) == [2, 4, 6]
    results = json.loads((out / "all_results.json").read_text())
    for tag, name in (("train/train_loss", "train_loss"), ("test/loss", "test_loss")):
        assert after[tag] == pytest.approx({6: results[name]}), tag
    assert {tag.partition("/")[0] for tag in after} == {"train", "eval", "test", "perf"}


def test_tensorboard_hides_rows_of_overwritten_run(dataset, tmp_path):
    pytest.importorskip("tensorboard")
    tracked(dataset, tmp_path, environment(), "tensorboard", stop_at_step=4)
    tracked(dataset, tmp_path, environment(), "tensorboard", stop_at_step=2, resume_from_checkpoint="false")
    found = scalars(tmp_path / "logs")
    assert {tag: max(steps) for tag, steps in found.items()} == dict.fromkeys(found, 2)
    assert list(found["train/loss"]) == [1, 2]


def _write_a_row_and_die(directory: Path, row: dict) -> None:
    tracker = open_tracker(arguments(directory, report_to="tensorboard").log, {}, directory, 0, anew=True)
    tracker.write(row)
    os.kill(os.getpid(), signal.SIGKILL)


def test_tensorboard_flushes_each_row(tmp_path):
    """A killed run resumes after its checkpoint: rows before it are not logged again."""
    pytest.importorskip("tensorboard")
    numbers = {f"number {n}": n / 2 for n in range(20)}
    row = numbers | {"step": 3, "slowest_host": "a name"}
    codes, said = on_ranks(1, _write_a_row_and_die, tmp_path, row)
    assert codes == [-signal.SIGKILL], said
    assert scalars(tmp_path / "logs") == {f"train/{name}": {3: value} for name, value in numbers.items()}


# ---- W&B ----------------------------------------------------------------------------------------------------


def records(path: Path) -> list:
    """Of a W&B transaction log: after 7 bytes, pieces of records (CRC-32, length, kind), none across a block's end."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, found, record, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last piece
            found.append(internal.Record.FromString(record))
            record = b""
    return found


class Start:
    """What one start of a run has told W&B."""

    def __init__(self, path: Path):
        everything = records(path)
        (self.run,) = (record.run for record in everything if record.HasField("run"))
        (self.status,) = (record.exit.exit_code for record in everything if record.HasField("exit"))
        self.preempted = any(record.HasField("preempting") for record in everything)
        self.over = {r.metric.glob_name: r.metric.step_metric for r in everything if r.metric.glob_name}
        of_rows = [record.history.item for record in everything if record.HasField("history")]
        self.rows = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items} for items in of_rows
        ]

    def values(self, key: str) -> dict[int, float]:
        """By step; each at most once."""
        found = [(row["train/global_step"], row[key]) for row in self.rows if key in row]
        assert len(dict(found)) == len(found)
        return dict(found)


def starts(output_dir: Path) -> list[Start]:
    """Oldest first. W&B's own process may still be writing when a run's has ended."""
    paths = sorted(output_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    wait_until(lambda: all(any(r.HasField("exit") for r in records(path)) for path in paths))
    return [Start(path) for path in paths]


def test_wandb_resume_continues_same_run(dataset, tmp_path, settings):
    pytest.importorskip("wandb")
    out = tmp_path / "out"
    tracked(dataset, out, settings, "wandb", stop_at_step=4, run_name="first")
    shutil.rmtree(out / "checkpoint-4")  # as if killed after step 4, before its checkpoint
    for _ in range(2):  # and once more when all is done
        tracked(dataset, out, settings, "wandb")
    first, second, third = starts(out)
    run_id = json.loads((out / "wandb_run.json").read_text())["id"]
    assert {start.run.run_id for start in (first, second, third)} == {run_id}
    assert {start.run.project for start in (first, second)} == {PROJECT}
    assert first.run.display_name == "first"
    assert all(start.over == {"*": "train/global_step"} for start in (first, second))
    assert list(first.values("train/loss")) == [1, 2, 3, 4]
    # 1 and 2 once more as well: of one that is killed, W&B may lose the newest rows before a checkpoint, too.
    for key in ("train/loss", "train/step_loss", "train/grad_norm", "perf/unpadded_tokens_per_second_per_gpu"):
        assert second.values(key) == {row["step"]: row[key.partition("/")[2]] for row in rows(out)}, key
    seen = first.values("train/loss").items()
    assert second.values("train/loss").items() > seen, "seen twice: the same numbers, same place"
    assert list(second.values("train/train_loss")) == [6]
    assert not third.values("train/train_loss"), "told before"
    config = {item.key: json.loads(item.value_json) for item in second.run.config.update}
    assert config["learning_rate"] == 1e-3


@pytest.mark.slow
def test_wandb_start_over_is_new_run(dataset, tmp_path, settings):
    pytest.importorskip("wandb")
    out, flags = tmp_path / "out", {"max_steps": 2}
    tracked(dataset, out, settings, "wandb", **flags)
    tracked(dataset, out, settings, "wandb", **flags, resume_from_checkpoint="false")
    assert json.loads((out / "wandb_run.json").read_text()) == {"id": starts(out)[1].run.run_id}
    tracked(dataset, out, settings, "wandb", **flags, overwrite_output_dir=True)
    ids = [start.run.run_id for start in starts(out)]
    assert len(set(ids)) == 3
    tracked(dataset, out, settings, "none", **flags, overwrite_output_dir=True)
    assert not (out / "wandb_run.json").exists()


@pytest.mark.slow
def test_wandb_restart_before_checkpoint_keeps_run(dataset, tmp_path, settings):
    pytest.importorskip("wandb")
    out, job = tmp_path / "out", settings | {"SLURM_JOB_ID": "7"}
    for environ in (job, job, job | {"SLURM_JOB_ID": "8"}):
        tracked(dataset, out, environ, "wandb", stop_at_step=1, overwrite_output_dir=True)
        for path in (*out.glob("checkpoint-*"), *out.glob(".saved"), *out.glob("*_results.json")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    first, again, other = (start.run.run_id for start in starts(out))
    assert first == again != other


def test_wandb_environment_overrides_defaults(dataset, tmp_path, settings):
    pytest.importorskip("wandb")
    out, flags = tmp_path / "out", {"max_steps": 2}
    mine = {"WANDB_RUN_ID": "mine", "WANDB_DIR": str(tmp_path), "WANDB_RUN_GROUP": "ours", "WANDB_NAME": "named"}
    tracked(dataset, out, settings | mine, "wandb", **flags, stop_at_step=1)
    tracked(dataset, out, settings, "wandb", **flags)
    ((theirs,), (next_one,)) = starts(tmp_path), starts(out)
    assert (theirs.run.run_id, theirs.run.run_group, theirs.run.display_name) == ("mine", "ours", "named")
    assert next_one.run.run_id == "mine", "kept for a start that does not say it again"


def test_wandb_evaluation_keeps_run_id(dataset, tmp_path, settings):
    pytest.importorskip("wandb")
    out, flags = tmp_path / "out", {"max_steps": 2}
    tracked(dataset, out, settings, "wandb", **flags)
    alone = flags | {"do_train": False, "do_eval": True}
    tracked(dataset, out, settings, "wandb", **alone)
    tracked(dataset, out, settings, "wandb", **alone, resume_from_checkpoint="false")
    trained, of_it, of_none = starts(out)
    assert trained.run.run_id == of_it.run.run_id != of_none.run.run_id
    assert list(of_it.values("eval/loss")) == [2]
    assert json.loads((out / "wandb_run.json").read_text()) == {"id": trained.run.run_id}


@pytest.mark.parametrize(
    ("settings_of_user", "status", "line"),
    [
        ({"WANDB_MODE": "online"}, 2, "error: --report_to wandb: No API key configured."),
        ({"WANDB_MODE": "sometimes"}, 2, "error: --report_to wandb: "),
        (
            {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
            | {"WANDB_INIT_TIMEOUT": "1"},
            1,
            "error: --report_to wandb: ",
        ),
    ],
    ids=["no account", "no such mode", "no server"],
)
def test_wandb_refusal_is_one_line(dataset, tmp_path, settings, settings_of_user, status, line):
    pytest.importorskip("wandb")
    said = tracked(dataset, tmp_path / "out", settings | settings_of_user, "wandb", expect=status)
    assert "Traceback" not in said
    last = [text for text in said.splitlines() if text.startswith("error: ")]
    assert len(last) == 1
    assert last[0].startswith(line)
    assert "WANDB_MODE=offline" in last[0]
    assert not (tmp_path / "out" / "wandb_run.json").exists()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def _write_to_wandb_that_has_died(environ: dict, directory: Path) -> None:
    os.environ.clear()
    os.environ.update(environ)
    tracker = open_tracker(arguments(directory, report_to="wandb").log, {}, directory, 0, anew=True)
    tracker.write({"step": 1, "loss": 3.0})
    ours = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    for pid in [pid for pid in ours if "wandb" in Path(f"/proc/{pid}/cmdline").read_text()]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print("killed")
    limit = Limit(60)
    while type(tracker.trackers["--report_to wandb"]) is not Tracker and not limit.passed():
        tracker.write({"step": 2, "loss": 2.0})
    tracker.write({"step": 3, "loss": 2.0})
    tracker.close(0)
    print("done")


def test_wandb_death_does_not_stop_run(tmp_path, settings):
    """A batch system's SIGTERM reaches W&B's process as well: the run has still to save."""
    pytest.importorskip("wandb")
    (code,), (said,) = on_ranks(1, _write_to_wandb_that_has_died, settings, tmp_path)
    assert code == 0, said
    assert (said.count("killed\n"), said.count("done\n")) == (1, 1)
    assert said.count("--report_to wandb: given up: ") == 1
    assert "Traceback" not in said


def test_wandb_failed_run_is_not_finished(tmp_path, settings):
    pytest.importorskip("wandb")
    for status in (0, 75, 1):
        code, said = on_ranks(1, _open_and_close, settings, tmp_path / str(status), status)
        assert code == [0], said
        (start,) = starts(tmp_path / str(status))
        assert (start.status, start.preempted) == (status, status == 75)


def _open_and_close(environ: dict, directory: Path, status: int) -> None:
    directory.mkdir()
    os.environ.clear()
    os.environ.update(environ)
    open_tracker(arguments(directory, report_to="wandb").log, {}, directory, 0, anew=True).close(status)


# ---- either -------------------------------------------------------------------------------------------------


class Pictures(Tracker):
    def __init__(self) -> None:
        self.shown: list[tuple[str, int]] = []

    def picture(self, path: Path, step: int) -> None:
        self.shown.append((path.name, step))


def test_run_logger_shows_the_curves_at_the_end(tmp_path):
    log = RunLogger(arguments(tmp_path).log, tmp_path, World(0, 0, 1, torch.device("cpu")), bf16=False)
    log.tracker = Pictures()
    log.begin(1, None, 0, {}, str)
    row = {"loss": 2.5, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 5.0}
    log.row(row | {"step": 1})
    log.row(row | {"step": 7})
    log.draw_last()
    assert log.tracker.shown == [("training_curves.png", 7)]


def _show_a_picture(environ: dict, directory: Path, report_to: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    tracker = open_tracker(arguments(directory, report_to=report_to).log, {}, directory, 0, anew=True)
    imsave(directory / "training_curves.png", np.linspace(0, 1, 30 * 50 * 3).reshape(30, 50, 3))
    tracker.picture(directory / "training_curves.png", 7)
    tracker.close(0)


@pytest.mark.parametrize("report_to", ["tensorboard", "wandb"])
def test_tracker_shows_a_picture(tmp_path, settings, report_to):
    pytest.importorskip(report_to)
    codes, said = on_ranks(1, _show_a_picture, settings, tmp_path, report_to)
    assert codes == [0], said
    assert "given up" not in said[0]
    if report_to == "wandb":
        assert len(starts(tmp_path)) == 1  # W&B's process has ended
        (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        items = [item for record in records(path) for item in record.history.item if len(item.nested_key) == 2]
        picture = {item.nested_key[1]: json.loads(item.value_json) for item in items}
        assert {item.nested_key[0] for item in items} == {"train/curves"}
        assert (picture["_type"], picture["height"], picture["width"]) == ("image-file", 30, 50)
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    (event,) = found.Images("train/curves")
    assert (event.step, event.height, event.width) == (7, 30, 50)
    shown = imread(io.BytesIO(event.encoded_image_string))[..., :3]
    assert np.abs(shown - imread(tmp_path / "training_curves.png")[..., :3]).max() < 1 / 200


def test_tracker_names_are_the_trainers_where_they_mean_the_same():
    shared = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_accuracy", "eval_runtime", "test_loss")
    shared += ("eval_samples_per_second", "eval_steps_per_second", "train_loss", "train_runtime", "total_flos")
    row = dict.fromkeys((*shared, "train_samples_per_second", "train_steps_per_second"), 1.0)
    assert grouped(row | {"step": 3}) == rewrite_logs(row)


def test_tracker_groups_speeds_and_downstream_evaluations():
    row = {"tokens_per_second": 1.0, "data_wait_seconds": 2.0, "rank_seconds_max": 3.0, "mfu": 0.4, "slowest_rank": 1}
    assert grouped(row) == {f"perf/{name}": value for name, value in row.items()}
    assert grouped({"eval_contacts_long_L": 0.5, "eval_probe_x_r2": 0.1, "slowest_host": "a"}) == {
        "downstream/contacts_long_L": 0.5,
        "downstream/probe_x_r2": 0.1,
    }
    assert grouped({"quant_stats/a.b/mse": 0.5}) == {"quant_stats/a.b/mse": 0.5}


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_tracker_not_installed_is_one_line(dataset, tmp_path, name):
    flags = flags_of(dataset, tmp_path / "out", report_to=name, max_steps=1)
    absent = {"common.training.run_logger.find_spec": nothing_is_installed}
    done = run_script("train_ddp.py", *flags, env=environment(), settings=absent)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: --report_to {name}: not installed: ./install.sh --trackers"
    assert not (tmp_path / "out").exists()
