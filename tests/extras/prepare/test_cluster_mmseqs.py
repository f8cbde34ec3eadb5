"""Clustering as a job of its own: families are found, a stopped run goes on, and step 1 reads the table."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict

import pyarrow.parquet
import pytest

from common.cli import UserError
from extras.prepare import cluster_mmseqs
from extras.prepare.cluster_splits import run_mmseqs
from tests.data_fixtures import TOKENIZE, call
from tests.extras.prepare.test_mmseqs import related

pytestmark = pytest.mark.skipif(not shutil.which("mmseqs"), reason="MMseqs2 is not installed")


def write_csv(directory) -> dict[str, int]:
    """{id: family}, of ids that MMseqs2 would shorten."""
    rows = [(f"{name}|{number}", text, family) for number, (name, text, family) in enumerate(related())]
    directory.mkdir()
    lines = "".join(f"{name},{text}\n" for name, text, _ in rows)
    (directory / "x000.csv").write_text(f"id,text\n{lines}")
    return {name: family for name, _, family in rows}


def cluster(directory, name: str = "clusters", *flags) -> dict[str, str]:
    """{id: cluster} of the table that the command makes."""
    call(cluster_mmseqs, "--input_dir", directory / "csv", "--output_dir", directory / name, "--threads", 1, *flags)
    table = pyarrow.parquet.read_table(directory / name / "table" / "clusters.parquet")
    assert table.column_names == ["ur50_id", "ur90_id"]
    return dict(zip(*(table.column(name).to_pylist() for name in ("ur90_id", "ur50_id")), strict=True))


@pytest.mark.parametrize("method", ["cluster", "linclust"])
def test_families_are_found_and_step_1_splits_by_them(tmp_path, method):
    families = write_csv(tmp_path / "csv")
    clusters = cluster(tmp_path, "clusters", "--method", method)
    assert list(clusters) == list(families)
    members = defaultdict(set)
    for name, number in clusters.items():
        members[number].add(families[name])
    assert all(len(of_one) == 1 for of_one in members.values())
    if method == "cluster":
        assert len(members) == len(set(families.values()))
    record = json.loads((tmp_path / "clusters/table/.complete.json").read_text())
    assert record["made_from"]["method"] == method
    assert record["results"]["command"].startswith(f"mmseqs {method} --min-seq-id 0.5 -c 0.8")
    assert (record["results"]["records"], record["results"]["clusters"]) == (len(families), len(members))
    table = tmp_path / "clusters/table/clusters.parquet"
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--cluster_table", table)
    assert json.loads((tmp_path / "out/arrow/data_report.json").read_text())["not_in_cluster_table"] == 0


@pytest.mark.parametrize("left", ["whole", "damaged"])
def test_a_stopped_run_goes_on_with_what_mmseqs_has_done(tmp_path, monkeypatch, caplog, left):
    write_csv(tmp_path / "csv")
    expected = cluster(tmp_path)

    def stop_at_the_table(command, *more):
        if command[1] == "createtsv":
            raise KeyboardInterrupt
        run_mmseqs(command, *more)

    with monkeypatch.context() as patched:
        patched.setattr(cluster_mmseqs, "run_mmseqs", stop_at_the_table)
        with pytest.raises(KeyboardInterrupt):
            cluster(tmp_path, "again")
    assert not (tmp_path / "again" / "table").exists()
    scratch = tmp_path / "again/.building/scratch"
    if left == "damaged":
        for path in (scratch / "work").rglob("*aln*"):
            if path.is_file() and not path.is_symlink():
                path.write_bytes(b"")
        for path in (scratch / "work").rglob("clu*"):
            if not path.is_dir():
                path.unlink()
    said = (scratch / "records").stat().st_mtime_ns
    seen = []

    def note(command, *more):
        seen.append(command[1])
        if command[1] != "createtsv":
            assert (scratch / "records").stat().st_mtime_ns == said
        run_mmseqs(command, *more)

    monkeypatch.setattr(cluster_mmseqs, "run_mmseqs", note)
    assert cluster(tmp_path, "again") == expected
    assert "createdb" not in seen
    assert not (tmp_path / "again" / ".building").exists()


def test_what_cannot_work_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    write_csv(tmp_path / "csv")
    with pytest.raises(UserError, match=r"--output_dir .*csv: --input_dir .*csv is in there: choose another"):
        cluster(tmp_path, "csv")
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["x000.csv"]
    with pytest.raises(UserError, match="--identity 2.0: above 0"):
        cluster(tmp_path, "clusters", "--identity", 2)
    with pytest.raises(UserError, match="createdb|--method cluster: mmseqs cluster ended with status"):
        cluster(tmp_path, "clusters", "--split_memory_limit", "many")
    shutil.rmtree(tmp_path / "clusters", ignore_errors=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no mmseqs on PATH"):
        cluster(tmp_path)
    assert not (tmp_path / "clusters").exists()
