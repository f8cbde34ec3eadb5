"""benchmarks/speedrun.sh and what it starts: clock, held-out set, row; and the table of attempts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.dry_run import parsed
from benchmarks.energy import Energy
from benchmarks.speedrun import HEADER, Clock
from common.cli import UserError
from extras.compare.losses_file import read_losses
from extras.prepare.sample import write_sample
from tests.forked import ROOT, run_script
from tests.training_fixtures import environment
from tests.warm_python import programs
from tests.warm_python import python as warm_python

SCRIPT = ROOT / "benchmarks" / "speedrun.sh"
BUSY = "import time\nwhile time.process_time() < 0.5: pass"
NUMBER = r"\d+\.\d+"
CELLS = {  # column: what a row may say
    "date": r"\d{4}-\d\d-\d\d",
    "commit": r"[0-9a-f]{7,}(-dirty)?|unknown",
    "hardware": r".*\d+ cores, .+",
    "hours": NUMBER,
    "CPU-hours": NUMBER,
    "energy": rf"not measured|{NUMBER} kWh \(CPU packages\)",
    "price": rf"not given|{NUMBER}",
    "loss ± error": rf"{NUMBER} ± {NUMBER}",
    "below residue frequencies": rf"-?{NUMBER} ± {NUMBER}",
    "held-out set": r"[0-9a-f]{12}",
    "command": r"`.+`",
}


def check_row(line: str) -> dict[str, str]:
    """{column: cell} of a line of the table."""
    cells = dict(zip(HEADER.split(" | "), line.strip("| \n").split(" | "), strict=True))
    assert cells.keys() == CELLS.keys()
    for column, cell in cells.items():
        assert re.fullmatch(CELLS[column], cell), (column, cell)
    return cells


@pytest.fixture(scope="module")
def attempt(dataset, tmp_path_factory):
    """Two steps by the module alone: what it printed, and its directory."""
    out = tmp_path_factory.mktemp("speedrun")
    return speedrun(dataset, out), out


def speedrun(dataset: Path, out: Path, held_out: str = "any", target: float = 9, steps: int = 2):
    recipe = f"--config_name facebook/esm2_t6_8M_UR50D --tokens_per_pack 256 --max_seq_length 128 --max_steps {steps}"
    command = [warm_python(), "train_ddp.py", *recipe.split()]
    places = ["--dataset_dir", dataset, "--output_dir", out, "--max_eval_samples", 10]
    how = {"env": environment(), "settings": {"sys.executable": warm_python()}}
    asked = ["--held_out", held_out, "--target", target, "--price_per_hour", 3600]
    return run_script("benchmarks.speedrun", *places, *asked, "--", *command, **how)


def test_speedrun_prints_the_row_of_its_own_evaluation(attempt):
    done, out = attempt
    assert done.returncode == 0, done.stderr
    header, line = done.stdout.splitlines()[-2:]
    assert header == f"| {HEADER} |"
    cells = check_row(line)
    losses, _ = read_losses(out / "run" / "judged" / "eval_losses.parquet")
    loss = losses.loss_sum.sum() / losses.masked.sum()
    # Cochran's ratio, as a jackknife over the proteins: leave out one at a time
    left_out = (losses.loss_sum.sum() - losses.loss_sum) / (losses.masked.sum() - losses.masked)
    jackknife = np.sqrt((len(left_out) - 1) / len(left_out) * ((left_out - left_out.mean()) ** 2).sum())
    shown, error = map(float, cells["loss ± error"].split(" ± "))
    assert shown == pytest.approx(loss, abs=1e-4)
    assert error == pytest.approx(jackknife, rel=0.2)
    assert cells["held-out set"] == losses.questions[:12]
    (start,) = json.loads((out / "clock.json").read_text())["starts"]
    assert float(cells["price"]) == pytest.approx(start["seconds"], abs=0.001)
    assert float(cells["hours"]) == pytest.approx(start["seconds"] / 3600, abs=0.001)


def test_speedrun_refuses_another_held_out_set_before_it_trains(attempt, dataset, tmp_path):
    first, out = attempt
    shutil.copytree(out / "untrained", tmp_path / "untrained")  # evaluated already
    done = speedrun(dataset, tmp_path, held_out="0123456789ab")
    assert done.returncode == 2
    found = check_row(first.stdout.splitlines()[-1])["held-out set"]
    assert f"held-out set {found}, not the leaderboard's 0123456789ab" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_speedrun_of_a_finished_run_trains_no_more_and_judges(attempt, dataset):
    """The target is asked again; another command is another attempt."""
    first, out = attempt
    again = speedrun(dataset, out, target=0.5)
    assert again.returncode == 2
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert "is above the target of 0.5: no entry" in again.stderr.splitlines()[-1]
    other = speedrun(dataset, out, steps=3)
    assert "an attempt of another command" in other.stderr.splitlines()[-1]


def test_clock_adds_up_the_starts_of_a_command(tmp_path):
    (tmp_path / "run").mkdir()
    again = [sys.executable, "-c", f"{BUSY}\nimport sys; sys.exit({'{}'})"]
    fails, ends = ([*again[:2], again[2].format(status)] for status in (3, 0))
    clock = Clock(tmp_path / "clock.json", ["train"], tmp_path / "run")
    with pytest.raises(UserError, match="ended with status 3; started again it resumes"):
        clock.time(fails)
    clock = Clock(tmp_path / "clock.json", ["train"], tmp_path / "run")
    clock.time(ends)
    clock.time(fails)  # it has ended: nothing is run
    assert len(clock.state["starts"]) == 2
    assert 1.0 <= clock.total("cpu_seconds") < 10
    assert clock.total("seconds") >= 1.0


def test_clock_keeps_the_time_of_a_start_that_is_killed(tmp_path):
    """SIGKILL leaves what was noted; SIGTERM ends the command, too."""
    out = tmp_path / "clock.json"
    code = (
        "import sys, extras; from pathlib import Path\n"
        "from benchmarks.speedrun import Clock; from common.cli import run\n"
        f"path = Path({str(out)!r}); command = [sys.executable, '-c', 'while True: pass']\n"
        "run(lambda: Clock(path, command, path).time(command), resumable=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        while not out.exists() or json.loads(out.read_text())["starts"][0]["cpu_seconds"] < 0.2:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    (start,) = json.loads(out.read_text())["starts"]
    assert start["seconds"] >= start["cpu_seconds"] / 2 > 0.1
    busy = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"while True: pass" in read(path)]
    assert busy == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_energy_adds_packages_over_a_wrap_of_their_counters(tmp_path):
    def count(package: int, microjoules: int) -> None:
        directory = tmp_path / f"intel-rapl:{package}"
        directory.mkdir(exist_ok=True)
        (directory / "energy_uj").write_text(f"{microjoules}\n")
        (directory / "max_energy_range_uj").write_text("10000000\n")

    assert Energy(tmp_path).joules() is None
    count(0, 9_000_000)
    count(1, 0)
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of package 0
    energy = Energy(tmp_path)
    count(0, 1_000_000)
    count(1, 500_000)
    assert energy.joules() == pytest.approx(2.5)
    count(1, 750_000)
    assert energy.joules() == pytest.approx(2.75)


def test_leaderboard_rows_are_complete():
    text = (ROOT / "benchmarks" / "results" / "speedrun.md").read_text()
    tables = [block for block in text.split("\n\n") if block.startswith(f"| {HEADER} |")]
    assert len(tables) == 2, "two cores, and GPUs"
    for table in tables:
        for line in table.splitlines()[2:]:
            check_row(line)
    script = SCRIPT.read_text()
    held_out, target = re.search(r"held-out set `(\w{12})`, target (\d\.\d+)", text).groups()
    assert f'--target {target} --held_out "${{held_out:-{held_out}}}"' in script
    assert {check_row(line)["held-out set"] for line in tables[0].splitlines()[2:]} <= {held_out}


@pytest.mark.parametrize("form", [["--fasta", "x.fasta"], ["--gpu"]], ids=["cpu", "gpu"])
def test_script_trains_by_flags_that_exist(tmp_path, form):
    """What each form starts: an interpreter that only writes its words down."""
    (tmp_path / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    (tmp_path / "python").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [SCRIPT, *form, "--output", tmp_path, "--seed", "7", "--", "--max_steps", "9"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    flags = words[words.index("train_ddp.py") + 1 :]
    args = parsed("train_ddp", 1, [*flags, f"--dataset_dir={tmp_path}", f"--output_dir={tmp_path}"])
    assert args.data.seed == 7
    assert args.data.max_steps == 9


@pytest.mark.slow
def test_script_goes_from_fasta_to_a_row(tmp_path):
    if not shutil.which("mmseqs"):
        pytest.skip("MMseqs2 is not installed")
    fasta = tmp_path / "proteins.fasta"
    write_sample(fasta, num_proteins=1000, families=250)
    env = environment() | {"PATH": f"{programs()}:{os.environ['PATH']}"}
    command = [SCRIPT, "--fasta", "proteins.fasta", "--output", "out", "--held_out", "any"]
    command += ["--max_eval_samples", "10"]
    command += ["--", "--max_steps", "2", "--tokens_per_pack", "512"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr  # two steps do not reach the target
    assert "above the target of " in done.stderr.splitlines()[-1]
    cells = check_row(done.stdout.splitlines()[-1])
    assert cells["command"] == "`benchmarks/speedrun.sh --fasta proteins.fasta -- --max_steps 2 --tokens_per_pack 512`"
