"""0.download_data.py killed at any moment and started again: the same bytes, nothing done twice, nothing left over."""

import random
import shutil
import signal
import subprocess

import pytest

from extras.prepare.output_directory import Journal
from extras.prepare.partitions import SCATTERED
from tests.data_fixtures import DOWNLOAD, call, command, environment, everything_in, numbered, write_fasta
from tests.extras.prepare.killed_runs import run_killed_at
from tests.forked import run_script
from tests.patience import wait_until
from tests.small_disk import enlarge, small_disk

SCRIPT = "0.download_data.py"
# Of 75,000 bytes: the shuffle goes through files.
IN_FILES = {
    "extras.prepare.partitions.MEMORY_BYTES": 20_000,
    "extras.prepare.partitions.BUCKET_BITS": 3,
    "extras.prepare.partitions.BUCKETS": 8,
}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (("--save_arrow", "--save_fasta", "--save_parquet"), {}),
        pytest.param(("--save_arrow", "--save_fasta", "--save_parquet"), IN_FILES, marks=pytest.mark.slow),
        pytest.param(("--shuffle", "False"), {}, marks=pytest.mark.slow),
    ],
    ids=["in memory", "through files", "in the order of the input"],
)
def test_download_data_resumes_after_a_kill_anywhere(tmp_path, flags, settings):
    """Before every touch of the disk in turn where there are few, else before a random choice and the last of them."""
    source = write_fasta(tmp_path / "in.fasta", numbered(300))
    flags = ("--source", source, "--max_records_per_partition", 90, *flags, "--output_dir")
    touches = run_killed_at(None, SCRIPT, tmp_path / "a", *flags, tmp_path / "a", settings=settings)
    expected = everything_in(tmp_path / "a")
    assert sum(name.startswith("csv/x") for name in expected) == 4
    moments = {*random.Random(0).sample(range(touches), min(touches, 12)), *range(touches - 5, touches)}
    for moment in sorted(moments):
        out = tmp_path / str(moment)
        run_killed_at(moment, SCRIPT, out, *flags, out, settings=settings)
        for path in out.glob("[!.]*"):  # published outputs are complete
            assert (
                everything_in(path).items()
                <= {name.removeprefix(f"{path.name}/"): content for name, content in expected.items()}.items()
            ), moment
        run_killed_at(None, SCRIPT, out, *flags, out, settings=settings)
        assert everything_in(out) == expected, moment
        assert sorted(path.name for path in out.iterdir()) == sorted({name.split("/")[0] for name in expected})


def test_download_data_resumes_after_repeated_kills(tmp_path):
    """Every run gets a little further than the one before, and the last one is through."""
    source = write_fasta(tmp_path / "in.fasta", numbered(300))
    flags = ("--source", source, "--max_records_per_partition", 30, "--output_dir")
    touches = run_killed_at(None, SCRIPT, tmp_path / "a", *flags, tmp_path / "a", settings=IN_FILES)
    out, runs = tmp_path / "b", 0
    while not (out / "csv").exists():
        run_killed_at(touches * 9 // 10, SCRIPT, out, *flags, out, settings=IN_FILES)
        runs += 1
        assert runs < 20
    assert runs > 1
    assert everything_in(out) == everything_in(tmp_path / "a")


def stamps(directory) -> dict:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.glob("x*.csv")}


def test_download_data_resume_repeats_no_finished_work(tmp_path):
    """A run that resumes after the scatter neither reads the source nor writes finished partitions again."""
    source = write_fasta(tmp_path / "in.fasta", numbered(300))
    out = tmp_path / "out"
    flags = ("--source", source, "--output_dir", out, "--max_records_per_partition", 30)
    while True:
        run_killed_at("csv/x006.csv", SCRIPT, out, *flags, settings=IN_FILES)
        if Journal(out / ".building/journal.jsonl").done(SCATTERED):
            break
        shutil.rmtree(out)  # it takes the disk a moment to have the temporary files
    finished = stamps(out / ".building/csv")
    assert sorted(finished) == [f"x{number:03d}.csv" for number in range(6)]
    del finished["x005.csv"]  # likewise
    # Reading its records fails from now on.
    run_killed_at(None, SCRIPT, out, *flags, "--max_record_length", 1, settings=IN_FILES)
    after = stamps(out / "csv")
    assert len(after) == 10
    assert finished.items() <= after.items()


@pytest.mark.parametrize("size", ["400k", "900k", "1300k"])
def test_download_data_keeps_finished_partitions_on_a_full_disk(tmp_path, size):
    """Full while records are scattered, and while partitions are written. With space it resumes."""
    records = [(f"P{number}", "MKVLAGTYRR" * 30) for number in range(2000)]  # 0.6 MB
    source = write_fasta(tmp_path / "in.fasta", records)
    with small_disk(tmp_path, size) as disk:
        (disk / "mine").write_bytes(b"stays")
        flags = ("--max_records_per_partition", "300", "--save_parquet", "--save_arrow")
        settings = {"extras.prepare.partitions.MEMORY_BYTES": 100_000}
        whole = run_script(SCRIPT, "--source", source, "--output_dir", tmp_path / "whole", *flags, settings=settings)
        assert whole.returncode == 0
        arguments = ("--source", source, "--output_dir", disk / "out", *flags)
        done = run_script(SCRIPT, *arguments, env=environment(), settings=settings)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("error: "), done.stderr
        assert "No space left on device" in last
        assert sorted(path.name for path in disk.glob("*/*")) in ([], [".building"])
        notes = Journal(disk / "out/.building/journal.jsonl")
        assert notes.holds_work == (disk / "out").exists()
        enlarge(disk, "20m")
        done = run_script(SCRIPT, *arguments, env=environment(), settings=settings)
        assert done.returncode == 0, done.stderr
        assert ("Resuming from what an interrupted run left" in done.stderr) == notes.holds_work
        assert everything_in(disk / "out") == everything_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "stopped as asked: the same command resumes from there"),
    ],
)
def test_download_data_resumes_after_sigint_and_sigterm(tmp_path, number, status, line):
    """The first process of a container is deaf to SIGTERM unless it listens."""
    source = write_fasta(tmp_path / "in.fasta", [(f"P{number}", "MKVLAGTY" * 30) for number in range(100_000)])
    flags = ("--source", source, "--max_records_per_partition", 10_000, "--output_dir")
    process = subprocess.Popen(
        command(SCRIPT, *flags, tmp_path / "out"), stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_until((tmp_path / "out/.building/csv/x002.csv").exists, lambda: process.poll() is None, poll=0.002)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == status, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == line
    assert not (tmp_path / "out/csv").exists()
    call(DOWNLOAD, *flags, tmp_path / "out")
    call(DOWNLOAD, *flags, tmp_path / "undisturbed")
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "undisturbed")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["csv"]
