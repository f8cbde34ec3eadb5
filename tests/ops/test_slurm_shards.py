"""slurm/submit_shards.sh on the real cluster: tasks of an array are killed and start again, and the merge waits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.data_fixtures import TOKENIZE, call, different, everything_in
from tests.ops.slurm_cluster import SlurmCluster, missing
from tests.ops.test_slurm import make_checkout
from tests.warm_python import python

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
FLAGS = ("--validation_size", 40, "--test_size", 20, "--count_relatives", "False")
SHARDS = 4
# A python that loses its node's memory, once, when it has encoded some of shards 0 and 3.
KILLED = """\
#!/bin/bash
for word; do case $word in --shard=[03]/*) shard=${{word#--shard=}};; esac; done
mark={marks}/${{shard%/*}}
if [ -z "$shard" ] || [ -e "$mark" ]; then exec {python} "$@"; fi
touch "$mark"
{python} "$@" &
journal=$TARGET_PATH/processed/shards/${{shard%/*}}-of-{shards}/.building/journal.jsonl
until [ "$(wc -l 2>/dev/null <"$journal")" -gt 1 ] 2>/dev/null || ! kill -0 $!; do sleep 0.01; done
kill -KILL $! $$
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The nodes, and a checkout whose python is killed."""
    checkout = make_checkout(tmp_path_factory.mktemp("slurm") / "checkout")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    marks = checkout / "marks"
    marks.mkdir()
    (checkout / ".venv/bin/python").write_text(KILLED.format(marks=marks, python=python(), shards=SHARDS))
    (checkout / ".venv/bin/python").chmod(0o755)
    with SlurmCluster(checkout, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as cluster:
        yield cluster


def write_csv(directory: Path) -> None:
    directory.mkdir(parents=True)
    for number in range(10):
        lines = (f"P{number}_{n},MK{different(1000 * number + n)}\n" for n in range(100))
        (directory / f"x{number:03d}.csv").write_text("id,text\n" + "".join(lines))


def submitted(cluster, said: str) -> tuple[int, int]:
    """Numbers of the array and of the merge."""
    array, merge = re.search(rf"jobs (\d+) \({SHARDS} shards\) and (\d+)", said).groups()
    assert said.splitlines()[-1] == merge
    return int(array), int(merge)


@pytest.mark.slow
def test_shards_that_are_killed_start_again_and_merge_to_the_bytes_of_one_machine(cluster, tmp_path):
    write_csv(tmp_path / "csv")
    flags = " ".join(map(str, FLAGS))
    said = cluster.on_head(f"slurm/submit_shards.sh {SHARDS} {flags}", TARGET_PATH=str(tmp_path))
    array, merge = submitted(cluster, said)
    for task in range(SHARDS):
        assert cluster.end(f"{array}_{task}") == "COMPLETED", cluster.said()
    assert cluster.end(merge) == "COMPLETED", cluster.said()
    restarts = [int(cluster.job(f"{array}_{task}")["Restarts"]) for task in range(SHARDS)]
    assert restarts == [1, 0, 0, 1]  # one of them has the array's number
    log = (cluster.checkout / f"esm2-shard_{array}_3.out").read_text()
    assert f"requeueing job {array}_3: shard 3 was killed (137)" in log
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "one", *FLAGS)
    of_shards, of_one = (everything_in(tmp_path / name / "arrow") for name in ("processed", "one"))
    assert of_shards == of_one


def test_a_shard_that_is_refused_is_final_and_cancels_the_merge(cluster, tmp_path):
    write_csv(tmp_path / "csv")
    (tmp_path / "csv" / "x001.csv").write_text("id,text\nP1,\n")
    (cluster.checkout / "marks" / "0").touch()
    (cluster.checkout / "marks" / "3").touch()
    said = cluster.on_head(f"slurm/submit_shards.sh {SHARDS}", TARGET_PATH=str(tmp_path))
    array, merge = submitted(cluster, said)
    assert cluster.end(f"{array}_1") == "FAILED"
    assert cluster.job(f"{array}_1")["ExitCode"] == "2:0"
    assert cluster.job(f"{array}_1")["Restarts"] == "0"
    assert cluster.end(merge) == "CANCELLED"
    (tmp_path / "csv" / "x001.csv").write_text("id,text\nP1,MKV\n")


def test_some_shards_again(cluster, tmp_path):
    write_csv(tmp_path / "csv")
    again = cluster.submit("--array=2 slurm/prepare_array.sh", TARGET_PATH=str(tmp_path), SHARDS=str(SHARDS))
    assert cluster.end(f"{again}_2") == "COMPLETED", cluster.said()
    (shard,) = (tmp_path / "processed" / "shards").iterdir()
    assert shard.name == f"2-of-{SHARDS}"
    assert json.loads((shard / "encoded" / ".complete.json").read_text())["results"]["files"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [("slurm/prepare_array.sh", "no array: submit with --array"), ("--array=5 slurm/prepare_array.sh", "task 5 of 1")],
)
def test_an_array_that_is_none_is_refused(cluster, tmp_path, options, message):
    job = cluster.submit(f"--output={tmp_path}/said {options}", TARGET_PATH=str(tmp_path))
    assert cluster.end(job) == "FAILED"
    assert message in (tmp_path / "said").read_text()
    assert cluster.job(job)["ExitCode"] == "2:0"


@pytest.mark.skipif(not shutil.which("mmseqs"), reason="MMseqs2 is not installed")
def test_clustering_is_a_job_within_its_memory(cluster, tmp_path):
    write_csv(tmp_path / "csv")
    options = "--mem=800M --cpus-per-task=2 slurm/cluster_mmseqs.sh --method linclust"
    job = cluster.submit(options, TARGET_PATH=str(tmp_path))
    assert cluster.end(job) == "COMPLETED", cluster.said()
    results = json.loads((tmp_path / "clusters/table/.complete.json").read_text())["results"]
    assert results["command"].endswith("--threads 2 --split-memory-limit 640M")
    assert results["records"] == 1000


def test_submit_shards_refuses_what_cannot_work(cluster):
    assert "usage: slurm/submit_shards.sh N" in cluster.on_head("slurm/submit_shards.sh", check=False)
    assert "usage: slurm/submit_shards.sh N" in cluster.on_head("slurm/submit_shards.sh 0", check=False)
    assert "TARGET_PATH is not set" in cluster.on_head("slurm/submit_shards.sh 4", check=False)
    assert cluster.on_head("squeue -h --name=esm2-preprocess") == ""
