"""What ends a job is started again, or is not: the launcher with ranks that are small scripts, and real ends."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from common.distributed.stopping import PREEMPTED
from extras.launch.__main__ import TRY_AGAIN
from extras.launch.forked_ranks import can_be_prepared
from extras.launch.restarts import FILE, MAX_STARTS, RestartCounter, output_dir_of
from tests.forked import ROOT, Script
from tests.live_runs import wait_until
from tests.patience import run
from tests.training_fixtures import environment

# A rank without torch. It notes its start; `how` it ends, by the number of its start, comes last on its command line.
RANK = """
import os, signal, sys, time
from pathlib import Path
out, how = Path(sys.argv[-2].partition("=")[2]), sys.argv[-1].split(",")
starts = out.parents[1] / "starts"
with open(starts, "a") as file:
    file.write("x")
start = len(starts.read_text())
for word in how[min(start, len(how)) - 1].split("+"):
    if word == "save":
        (out / f"checkpoint-{start}").mkdir(parents=True)
    elif word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "wait":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(75))
        (out.parents[1] / "waiting").touch()
        time.sleep(60)
    else:
        sys.exit(int(word))
"""


def launch(tmp_path: Path, how: str, restarts: int = 10, job: str = "7", **more: str) -> Script:
    (tmp_path / "rank.py").write_text(RANK)
    where = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"--rdzv_id={job}", "--monitor_interval=0.02"]
    script = [str(tmp_path / "rank.py"), f"--output_dir={tmp_path / 'new' / 'out'}", how]
    argv = ["--nnodes=1", "--nproc_per_node=1", f"--max_restarts={restarts}", *where, *script]
    return Script("extras.launch", *argv, env=environment() | more)


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


def until_waiting(tmp_path: Path, script: Script) -> None:
    """The rank is under way."""
    assert wait_until((tmp_path / "waiting").exists, lambda: script.poll() is None, 0.01), script.said()
    (tmp_path / "waiting").unlink()


def error(script: Script) -> str:
    (line,) = [line for line in script.said()[1].splitlines() if line.startswith("error: ")]
    return line


def test_launcher_restarts_while_there_is_progress(tmp_path):
    again = "save+killed,1,save+1,killed,save+1,0"
    script = launch(tmp_path, again)
    assert script.wait() == 0, script.said()
    assert starts(tmp_path) == len(again.split(","))
    assert not (tmp_path / "new" / "out" / FILE).exists()


@pytest.mark.parametrize(
    ("how", "reason"), [("save+1,1,1,1,0", "status 1"), ("save+1,1,1,killed", "killed by SIGKILL")]
)
def test_launcher_stops_after_three_starts_without_checkpoint(tmp_path, how, reason):
    script = launch(tmp_path, how)
    assert script.wait() == 2, script.said()
    assert starts(tmp_path) == 1 + MAX_STARTS
    assert f"{MAX_STARTS} starts of this job in a row made no new checkpoint" in error(script)
    assert "the newest is still checkpoint-1" in error(script)
    assert reason in error(script)


def test_restart_counter_counts_other_launchers_and_resets_for_a_new_job(tmp_path):
    """As by a requeue or a new pod: the launcher itself is gone each time."""
    for start in range(MAX_STARTS):
        script = launch(tmp_path, "1", restarts=0)
        assert script.wait() == (1 if start < MAX_STARTS - 1 else 2)
    assert "there is none" in error(script)
    assert launch(tmp_path, "1", restarts=0, job="8").wait() == 1


def test_restart_counter_file_is_private(tmp_path):
    tmp_path.joinpath(FILE).touch(0o644)  # as earlier versions made it
    RestartCounter(tmp_path, "7").increment()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    RestartCounter(tmp_path, "7").increment()
    assert json.loads((tmp_path / FILE).read_text())["starts"] == 2


def test_restart_counter_knows_when_nodes_have_left_or_returned(tmp_path):
    counter = RestartCounter(tmp_path, "7")
    assert [counter.change_nodes(nodes) for nodes in (4, 4, 3, 3, 4)] == [None, None, 4, None, 3]
    counter.increment()
    (tmp_path / "checkpoint-5").mkdir()
    assert RestartCounter(tmp_path, "7").change_nodes(3) == 4
    assert RestartCounter(tmp_path, "8").change_nodes(4) is None
    (tmp_path / FILE).write_text('{"job": "8", "newest": 5, "starts": 2}')  # as earlier versions made it
    assert RestartCounter(tmp_path, "8").change_nodes(4) is None
    assert json.loads((tmp_path / FILE).read_text())["starts"] == 2


def test_launcher_killed_three_times_does_not_start_again(tmp_path):
    for _ in range(MAX_STARTS):
        script = launch(tmp_path, "wait")
        until_waiting(tmp_path, script)
        script.send_signal(signal.SIGKILL)
        script.wait()
    script = launch(tmp_path, "0")
    assert script.wait() == 2, script.said()
    assert "not started again" in error(script)
    assert starts(tmp_path) == MAX_STARTS


def test_launcher_does_not_restart_after_bad_input(tmp_path):
    script = launch(tmp_path, "2,0")
    assert script.wait() == 2, script.said()
    assert starts(tmp_path) == 1
    assert not (tmp_path / "new").exists()


# Ranks without torch, too, started as train_ddp.py is and without the flags that they need.
WITHOUT_FLAGS = """
from common.data.flags import DataFlags
from common.cli import run
from common.flags import parse_arguments
run(lambda: parse_arguments("", DataFlags))
"""
MISSING = "error: missing: --dataset_dir ("


def without_flags(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The end of a launcher's command line, and its environment."""
    (tmp_path / "rank.py").write_text(WITHOUT_FLAGS)
    return ["--nproc_per_node=2", str(tmp_path / "rank.py")], environment() | {"PYTHONPATH": str(ROOT)}


def test_launcher_prints_the_error_line_only(tmp_path):
    """Torchrun's warning that it sets OMP_NUM_THREADS is not beside it: the launcher sets it."""
    argv, env = without_flags(tmp_path)
    env.pop("OMP_NUM_THREADS")
    script = Script("extras.launch", "--max_restarts=3", *argv, env=env)
    assert script.wait() == 2, script.said()
    (line,) = [*script.said()[0].splitlines(), *script.said()[1].splitlines()]
    assert line.startswith(MISSING)


def test_torchrun_prints_the_error_line_first_and_last(tmp_path):
    """Of what torchrun prints around it a rank can only choose the last words: its own line."""
    argv, env = without_flags(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", *argv]
    done = run(command, env=env)
    lines = [line for line in done.stderr.splitlines() if line.strip("=- ")]
    (at_once,) = [line for line in lines if line.startswith("error: ")]
    assert at_once.startswith(MISSING)
    assert lines[-1].strip() == f"traceback : {at_once}"
    assert done.returncode == 1  # the rank's is 2


def test_torchrun_has_the_defaults_that_our_pages_say(monkeypatch):
    """docs/checkpoints.md, docs/recovery.md: signals, seconds until SIGKILL, restarts, a rendezvous' seconds."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    config, _, _ = torchrun.config_from_args(torchrun.get_args_parser().parse_args(["script.py"]))
    assert (config.max_restarts, config.shutdown_timeout) == (0, 30)
    assert config.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    waits = RendezvousTimeout()
    assert (waits.join.total_seconds(), waits.last_call.total_seconds()) == (600, 30)
    defaults = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    assert [defaults[f"keep_alive_{name}"].default for name in ("interval", "max_attempt")] == [5, 3]


@pytest.mark.parametrize(
    ("number", "pod", "status"),
    [
        (signal.SIGTERM, {}, PREEMPTED),
        (signal.SIGTERM, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, TRY_AGAIN),
        (signal.SIGINT, {}, PREEMPTED),
    ],
)
def test_launcher_does_not_restart_or_count_a_stop(tmp_path, number, pod, status):
    for _ in range(MAX_STARTS + 1):
        script = launch(tmp_path, "wait", **pod)
        until_waiting(tmp_path, script)
        script.send_signal(number)
        assert script.wait() == status
        assert "failed" not in script.said()[1]  # torchrun's word for any status but 0
        assert "closing signal" not in script.said()[1]
    assert starts(tmp_path) == MAX_STARTS + 1


@pytest.mark.parametrize(("how", "status"), [("1", TRY_AGAIN), ("killed", TRY_AGAIN), ("2", 2), ("0", 0)])
def test_launcher_in_a_pod_retries_all_but_bad_input(tmp_path, how, status):
    assert launch(tmp_path, how, restarts=0, KUBERNETES_SERVICE_HOST="10.0.0.1").wait() == status


def test_restart_counter_ignores_unwritable_directory(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(MAX_STARTS + 1):
        RestartCounter(tmp_path / "file" / "out", "7").increment()
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("script", ["embed.py", "predict.py", "proteingym.py"])
def test_scripts_that_go_on_by_parts_get_no_record_of_starts(script):
    """They refuse an --output_dir with anything that is not theirs."""
    assert output_dir_of([script, "--output_dir", "out"]) is None
    assert output_dir_of(["train_ddp.py", "--output_dir", "out"]) == Path("out")


@pytest.mark.parametrize(
    ("words", "script", "threads"),
    [
        ("--nproc_per_node=2 train_ddp.py --bf16", "train_ddp.py", "1"),
        ("--nnodes=2 --nproc-per-node=8 here/train_fsdp2.py", "here/train_fsdp2.py", "1"),
        ("train_ddp.py --nproc_per_node=2", "train_ddp.py", None),
        ("--nproc_per_node=gpu train_ddp.py", "", None),
        ("--nproc_per_node 2 train_ddp.py", "", None),
        ("--start-method=spawn train_ddp.py", "", None),
        ("-m extras.preflight", "", None),
        ("embed.py --output_dir emb", "", None),
    ],
)
def test_launcher_imports_early_where_the_command_line_is_clear(monkeypatch, words, script, threads):
    """The number of threads is set before a library reads it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert can_be_prepared(words.split()) == script
    assert os.environ.pop("OMP_NUM_THREADS", None) == threads


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc_per_node=x", "train_ddp.py"], "Unsupported nproc_per_node value: x"),
        (["--nproc_per_node=0", "train_ddp.py"], "a number of nodes or ranks is not possible"),
        (["--nnodes=2:1", "train_ddp.py"], "a number of nodes or ranks is not possible"),
        (["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:abc", "train_ddp.py"], "'127.0.0.1:abc'"),
        (["nothere.py"], "nothere.py: no such script here"),
        ([], "required: training_script"),
    ],
)
def test_launcher_refuses_a_wrong_command_line_in_one_line(words, said):
    script = Script("extras.launch", *words, env=environment())
    assert script.wait() == 2, script.said()
    (line,) = [line for line in script.said()[1].splitlines() if "error: " in line]
    assert said in line
    assert "Traceback" not in script.said()[1]


def test_launcher_stopped_early_leaves_nothing(tmp_path):
    """Not the directory of the process that ranks are forked off. With a real interpreter: it remembers its own."""
    command = [sys.executable, "-m", "extras.launch", "--nproc_per_node=1", "train_ddp.py", "--output_dir=unused"]
    job = subprocess.Popen(command, env=environment() | {"TMPDIR": str(tmp_path)}, cwd=ROOT)
    assert wait_until(lambda: any(tmp_path.glob("pymp-*")), lambda: job.poll() is None, 0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == PREEMPTED
    assert wait_until(lambda: not any(tmp_path.glob("pymp-*")))
