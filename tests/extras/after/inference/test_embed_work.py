"""embed.py's finished parts: what survives a stop, a kill and a failure; on how many ranks; which model's they are."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from common.cli import UserError
from extras.after.inference.encoder import check_parts, write_part
from extras.launch.restarts import output_dir_of
from tests.data_fixtures import environment, everything_in, write_fasta
from tests.extras.after.inference.embed_fixtures import call_embed, make_model
from tests.forked import Script
from tests.live_runs import LiveRun
from tests.small_disk import fill, small_disk
from tests.training_fixtures import ROOT, on_ranks
from tests.warm_python import python

PARTS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fasta(tmp_path_factory) -> Path:
    proteins = [(f"P{n}", "MKVLAGTYRR" * (10 + n % 7)) for n in range(20 * PARTS)]
    return write_fasta(tmp_path_factory.mktemp("fasta") / "my.fasta", proteins)


@pytest.fixture(scope="module")
def whole(model, fasta, tmp_path_factory) -> dict[str, bytes]:
    """The output of a run that nothing interrupts, with its record."""
    out = tmp_path_factory.mktemp("whole")
    call_embed(model, fasta, out, "--proteins_per_part", 20)
    return everything_in(out)


def flags(model: Path, fasta: Path, out: Path) -> list[str]:
    given = ["--model_name_or_path", model, "--fasta", fasta, "--output_dir", out, "--proteins_per_part", 20]
    return [str(word) for word in given]


def parts_under_way(out: Path) -> dict[str, int]:
    """{name: when it was written} of the parts of an unfinished run."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob(".building/embeddings/part-*.parquet")}


def stop_after(parts: int, out: Path, command: list[str], number: int) -> int:
    """Send the signal once so many parts are there; the exit status."""
    run = Script("embed.py", *command, env=environment())
    deadline = time.monotonic() + 60
    while len(parts_under_way(out)) < parts and time.monotonic() < deadline:
        time.sleep(0.002)
    run.send_signal(number)
    status = run.wait()
    assert parts <= len(parts_under_way(out)) < PARTS, run.said()
    return status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_embed_resumes_a_stopped_run(model, fasta, whole, tmp_path, number, status):
    command = flags(model, fasta, tmp_path)
    assert stop_after(3, tmp_path, command, number) == status
    kept = parts_under_way(tmp_path)
    call_embed(model, fasta, tmp_path, *command[6:])
    assert everything_in(tmp_path) == whole
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("embeddings/part-*.parquet")}
    assert kept.items() <= made.items()


def test_embed_remakes_damaged_parts(model, fasta, whole, tmp_path):
    """Emptied, cut short, a byte changed, one of another protein under its name."""
    stop_after(5, tmp_path, flags(model, fasta, tmp_path), signal.SIGKILL)
    part = [tmp_path / f".building/embeddings/part-0000{number}.parquet" for number in range(5)]
    content = part[2].read_bytes()
    part[0].write_bytes(b"")
    part[1].write_bytes(part[1].read_bytes()[:-100])
    part[2].write_bytes(content[:1500] + bytes([content[1500] ^ 1]) + content[1501:])
    shutil.copy(part[4], part[3])
    call_embed(model, fasta, tmp_path, "--proteins_per_part", 20)
    assert everything_in(tmp_path) == whole


def test_embed_detects_a_model_replaced_in_place(fasta, tmp_path, caplog):
    """Between a kill and the next start, and after completion; its path, size and date are the same."""
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", seed=6)
    out, file = tmp_path / "out", Path("model.safetensors")
    date = (model / file).stat().st_mtime_ns
    stop_after(2, out, flags(model, fasta, out), signal.SIGKILL)
    shutil.copy(model / file, tmp_path / "first")
    shutil.copy(other / file, model / file)
    os.utime(model / file, ns=(date, date))
    call_embed(model, fasta, out, "--proteins_per_part", 20)
    assert "removing the work of an interrupted run for other input or arguments" in caplog.text
    call_embed(other, fasta, tmp_path / "expected", "--proteins_per_part", 20)
    assert everything_in(out) == everything_in(tmp_path / "expected")
    shutil.copy(tmp_path / "first", model / file)
    os.utime(model / file, ns=(date, date))
    with pytest.raises(UserError, match="was made from other input or arguments: give --overwrite"):
        call_embed(model, fasta, out, "--proteins_per_part", 20)


def test_embed_recognises_the_same_content_elsewhere(model, fasta, tmp_path, caplog):
    caplog.set_level("INFO")
    call_embed(model, fasta, tmp_path / "out")
    elsewhere = shutil.copytree(model, tmp_path / "model", copy_function=shutil.copyfile)
    call_embed(elsewhere, shutil.copyfile(fasta, tmp_path / "other.fasta"), tmp_path / "out")
    assert "is complete and was made from the same input and arguments: nothing to do" in caplog.text
    with pytest.raises(UserError, match="was made from other input or arguments: give --overwrite"):
        call_embed(model, write_fasta(tmp_path / "my.fasta", [("P0", "MKVLAH")]), tmp_path / "out")


def test_embed_accepts_earlier_output_unless_the_model_is_newer(fasta, tmp_path):
    """Those versions recorded the model's path, and the input's name, size and date."""
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    call_embed(model, fasta, out)
    record = json.loads((out / "embeddings/.complete.json").read_text())
    source = fasta.stat()
    record["made_from"] = {
        "model_name_or_path": str(model),
        "max_seq_length": 1024,
        "bf16": False,
        "per_residue": False,
        "proteins_per_part": 1000,
        "fasta": fasta.name,
        "size": source.st_size,
        "mtime_ns": source.st_mtime_ns,
    }
    (out / "embeddings/.complete.json").write_text(json.dumps(record))
    before = everything_in(out)
    call_embed(model, fasta, out)
    assert everything_in(out) == before
    with pytest.raises(UserError, match="was made from other input or arguments"):
        call_embed(model, fasta, out, "--per_residue")
    time.sleep(0.01)
    (model / "config.json").touch()
    with pytest.raises(UserError, match="made by an earlier version, and .* may have changed since: give --overwrite"):
        call_embed(model, fasta, out)
    call_embed(model, fasta, out, "--overwrite")
    assert b"model_hash" in (out / "embeddings/.complete.json").read_bytes()


def test_embed_keeps_finished_parts_on_a_full_disk(model, fasta, whole, tmp_path):
    with small_disk(tmp_path, "2m") as disk:
        out = disk / "out"
        stop_after(1, out, flags(model, fasta, out), signal.SIGKILL)
        fill(disk)
        os.truncate(disk / "mine", (disk / "mine").stat().st_size - 60_000)  # space for some parts
        kept = parts_under_way(out)
        with pytest.raises(OSError, match="No space left"):
            call_embed(model, fasta, out, "--proteins_per_part", 20)
        assert kept.items() < parts_under_way(out).items()
        assert not list(out.rglob("*.partial"))
        assert [path.name for path in out.iterdir()] == [".building"]
        kept = parts_under_way(out)
        (disk / "mine").unlink()
        call_embed(model, fasta, out, "--proteins_per_part", 20)
        assert everything_in(out) == whole
        made = {path.name: path.stat().st_mtime_ns for path in out.glob("embeddings/part-*.parquet")}
        assert kept.items() <= made.items()


def test_embed_killed_ranks_resume_with_any_number(model, fasta, whole, tmp_path):
    draw = random.Random(3)
    out, command = tmp_path / "out", flags(model, fasta, tmp_path / "out")
    for ranks, least in ((2, 0), (3, 4), (2, 8)):
        with LiveRun(None, out, tmp_path / "logs", ranks, script="embed.py", argv=command) as run:
            run.until(lambda least=least: len(parts_under_way(out)) >= least)
            time.sleep(draw.random() * 0.2)
            for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
                run.signal(signal.SIGKILL, rank)
        assert not (out / "embeddings").exists()
    assert 8 <= len(parts_under_way(out)) < PARTS
    call_embed(model, fasta, out, "--proteins_per_part", 20)
    assert everything_in(out) == whole


def test_embed_ranks_give_the_same_bytes_and_resume(model, fasta, whole, tmp_path):
    out, command = tmp_path / "out", flags(model, fasta, tmp_path / "out")
    with LiveRun(None, out, tmp_path / "logs", 2, script="embed.py", argv=command) as run:
        run.until(lambda: len(parts_under_way(out)) >= 3)
        run.signal(signal.SIGTERM)
        assert run.end() == [75, 75]
        assert "finished parts are kept: the same command resumes" in run.said()
    for said in ("600 proteins of", "nothing to do"):
        with LiveRun(None, out, tmp_path / "logs", 3, script="embed.py", argv=command) as run:
            assert run.end() == [0, 0, 0]
            assert said in run.said()
            assert not run.said(1) + run.said(2)
        assert everything_in(out) == whole


def as_rank_with(command: list[str], other: list[str]) -> None:
    sys.argv = ["embed.py", *(command if os.environ["RANK"] == "0" else other)]
    runpy.run_path("embed.py", run_name="__main__")


def test_embed_ranks_that_differ_end_together_in_one_line(model, fasta, tmp_path):
    """One has another model; one cannot load its own; one sees another output directory; the input is bad."""
    other, broken = make_model(tmp_path / "other", seed=6), shutil.copytree(model, tmp_path / "broken")
    (broken / "vocab.txt").write_text("\n".join("KVM"))
    bad = write_fasta(tmp_path / "bad.fasta", [("one", "MKVLAG"), ("two", "")])
    command = flags(model, fasta, tmp_path / "out")
    for rank_0, rank_1, said in (
        (
            command,
            flags(other, fasta, tmp_path / "out"),
            r"error: rank 1 \(host .*\) differs from rank 0 .* model_hash",
        ),
        (
            command,
            flags(model, fasta, tmp_path / "x"),
            r"error: rank 1: --output_dir .*/x: differs from that of rank 0: give a",
        ),
        (*[flags(model, bad, tmp_path / "out")] * 2, r"error: .*bad.fasta: line 3: record 2 \(two\) has no sequence"),
        (*[flags(broken, fasta, tmp_path / "out")] * 2, r"error: .*vocab.txt: not ESM-2's vocabulary: token 0 is 'K'"),
    ):
        codes, logs = on_ranks(2, as_rank_with, rank_0, rank_1)
        assert codes == [2, 2]
        errors = [line for log in logs for line in log.splitlines() if "error" in line]
        assert len(errors) == 1
        assert re.match(said, errors[0]), errors
        assert not list(tmp_path.glob("out/embeddings"))


def test_embed_leftover_rank_keeps_other_runs_out(model, fasta, tmp_path):
    out, command = tmp_path / "out", flags(model, fasta, tmp_path / "out")
    with LiveRun(None, out, tmp_path / "logs", 2, script="embed.py", argv=command) as run:
        run.until(lambda: len(parts_under_way(out)) >= 2)
        run.signal(signal.SIGSTOP, 1)
        run.signal(signal.SIGKILL, 0)
        run.processes[0].join()
        with pytest.raises(UserError, match=f"{out}: another run is writing here: wait for it"):
            call_embed(model, fasta, out, "--proteins_per_part", 20)


def test_embed_refuses_input_that_changes_meanwhile(model, fasta, tmp_path):
    out, own = tmp_path / "out", shutil.copyfile(fasta, tmp_path / "own.fasta")
    run = Script("embed.py", *flags(model, own, out), env=environment())
    while len(parts_under_way(out)) < 2 and run.poll() is None:
        time.sleep(0.002)
    (tmp_path / "new.fasta").write_text(own.read_text().replace("MKV", "MKW"))
    (tmp_path / "new.fasta").rename(own)
    assert run.wait() == 2
    assert f"error: --fasta {own}: changed while it was read: start again" in run.said()[1]
    assert [path.name for path in out.iterdir()] == [".building"]


def test_embed_reports_parts_that_rank_0_cannot_see(tmp_path):
    """A directory that ranks do not share; or one in which a rank of an earlier run has written."""
    facts, other = {b"model_hash": b"1"}, {b"model_hash": b"2"}
    table = pa.table({"id": ["a"]})
    for number, metadata in enumerate((facts, other)):
        write_part(table.replace_schema_metadata(metadata), tmp_path / f"part-0000{number}.parquet")
    check_parts(tmp_path, 1, facts)
    for count, said in (
        (2, "part-00001.parquet: is of another model or input"),
        (3, "part-00002.parquet: is missing"),
    ):
        with pytest.raises(UserError, match=f"{said}: give all ranks one directory"):
            check_parts(tmp_path, count, facts)
        write_part(table.replace_schema_metadata(facts), tmp_path / "part-00001.parquet")


def test_embed_runs_under_the_launcher(model, fasta, whole, tmp_path):
    """It counts no starts: there are no checkpoints to tell by whether one got on."""
    assert output_dir_of(["--nproc_per_node=2", "embed.py", "--output_dir", "out"]) is None
    out = tmp_path / "out"
    command = [python(), "-m", "extras.launch", "--standalone", "--nproc_per_node=2", str(ROOT / "embed.py")]
    done = subprocess.run([*command, *flags(model, fasta, out)], capture_output=True, text=True, env=environment())
    assert (done.returncode, "600 proteins of" in done.stderr) == (0, True), done.stderr
    assert everything_in(out) == whole
