"""--dataset with --sample_clusters: the index of files against brute force, what epochs draw, and a run."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from common.data.clusters import Clusters
from common.data.flags import DataFlags
from common.data.loader import ALONE
from common.distributed.world import Mesh
from extras.prepare.sources.find_files import with_contents
from extras.prepare.sources.sequence_files import ROW_BITS
from extras.prepare.sources.streamed_clusters import clusters_of, index_directory
from extras.prepare.sources.streamed_data import find_source
from extras.prepare.sources.streams import StreamedOrder, plan_streams
from tests.data_fixtures import proteins
from tests.training_fixtures import final_weights, losses, run_forked, same_bits

PACKS = 2
SIZES = [1, 2, 3, 5] * 60


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def records():
    """(cluster, protein) in random order; one in 11 has no protein."""
    names = [f"UniRef50_{cluster}" for cluster, size in enumerate(SIZES) for _ in range(size)]
    np.random.default_rng(0).shuffle(names)
    sequences = [text if n % 11 else "" for n, (_, text) in enumerate(proteins(len(names)))]
    return list(zip(names, sequences, strict=True))


def write_parquet(directory, records):
    half = len(records) // 3
    for number, part in enumerate((records[:half], records[half:])):
        clusters, sequences = zip(*part, strict=True)
        table = pa.table({"id": range(len(part)), "ur50_id": clusters, "sequence": sequences})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=50)


def write_csv(directory, records):
    lines = [f"{n},{sequence},{cluster}" for n, (cluster, sequence) in enumerate(records)]
    half = len(records) // 3
    for number, part in enumerate((lines[:half], lines[half:])):
        (directory / f"{number}.csv").write_text("\n".join(["id,sequence,cluster_id", *part]) + "\n")


def write_jsonl(directory, records):
    rows = [json.dumps({"cluster": cluster, "text": sequence}) for cluster, sequence in records]
    (directory / "all.jsonl").write_text("\n".join(rows) + "\n")


@pytest.fixture(params=[write_parquet, write_csv, write_jsonl])
def source(request, records, tmp_path):
    (tmp_path / "files").mkdir()
    request.param(tmp_path / "files", records)
    return opened(tmp_path / "files")


def opened(path, **flags):
    return with_contents(find_source(DataFlags(dataset=str(path), **flags)), "train")


def planned(source, clusters):
    return plan_streams(
        source.splits["train"], PACKS, seed=1, max_seq_length=64, tokens_per_pack=256, clusters=clusters
    )


def records_of(begins, pack) -> list[int]:
    """Numbers of a pack's records, in the order of the files. begins: of the units."""
    unit, row = pack.records >> ROW_BITS, pack.records & ((1 << ROW_BITS) - 1)
    return (begins[unit] + row).tolist()


def _rows(unit) -> list[int]:
    if unit.file.kind == "parquet":
        metadata = pq.read_metadata(unit.file.path)
        groups = range(metadata.num_row_groups) if unit.row_group is None else [unit.row_group]
        return [metadata.row_group(group).num_rows for group in groups]
    lines = sum(1 for _ in open(unit.file.path))  # noqa: SIM115
    return [lines - (unit.file.kind == "csv")]


def epochs_of(source, clusters, steps, mesh=ALONE) -> tuple[dict[int, list[int]], int]:
    """The records that each epoch gives, and the first epoch that a stream has not ended."""
    plan, found, position = planned(source, clusters), defaultdict(list), {}
    begins = np.cumsum([0, *(sum(_rows(unit)) for unit in plan.units)])
    for _, taken, moved, _ in StreamedOrder(plan, PACKS).steps(mesh, {}, 0, range(steps), lambda number: True):
        position |= moved
        for pack, _ in taken:
            found[pack.epoch] += records_of(begins, pack)
    return found, min(place[0] for place in position.values())


def test_index_of_files_equals_brute_force(source, records):
    clusters = clusters_of(source, True, streaming=False, makes=True)
    index = Clusters(index_directory(source))
    expected = defaultdict(list)
    for number, (cluster, sequence) in enumerate(records):
        if sequence:
            expected[cluster].append(number)
    parts = np.split(np.array(index.members), np.array(index.offsets)[1:-1])
    assert sorted(part.tolist() for part in parts) == sorted(expected.values())
    assert len(clusters.clusters) == len(expected) < len(SIZES)
    before = index_directory(source).stat().st_mtime_ns
    clusters_of(source, True, streaming=False, makes=True)
    assert index_directory(source).stat().st_mtime_ns == before, "made once"


def test_streams_draw_each_cluster_once_an_epoch(source, records):
    clusters = clusters_of(source, True, streaming=False, makes=True)
    epochs, count = epochs_of(source, clusters, 600)
    of_ranks = [epochs_of(source, clusters, 600, Mesh(rank, 2))[0] for rank in range(2)]
    assert count >= 20
    complete = range(count)
    present = {cluster for cluster, sequence in records if sequence}
    for epoch in complete:
        names = [records[number][0] for number in epochs[epoch]]
        assert all(records[number][1] for number in epochs[epoch])
        assert sorted(names) == sorted(present)
        assert sorted(epochs[epoch]) == sorted(of_ranks[0][epoch] + of_ranks[1][epoch])
    members = defaultdict(list)
    for number, (cluster, sequence) in enumerate(records):
        if sequence:
            members[cluster].append(number)
    counts = np.bincount([n for epoch in complete for n in epochs[epoch]], minlength=len(records))
    pairs = [(counts[number], len(complete) / len(of)) for of in members.values() for number in of]
    degrees = sum(len(of) - 1 for of in members.values())
    chi_square = sum((count - expected) ** 2 / expected for count, expected in pairs)
    assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5


def test_streams_by_clusters_resume_at_each_step(source):
    clusters = clusters_of(source, True, streaming=False, makes=True)
    plan, position, steps = planned(source, clusters), {}, []
    for _, taken, moved, _ in StreamedOrder(plan, PACKS).steps(ALONE, {}, 0, range(60), lambda number: True):
        steps.append((dict(position), [(pack.records.tolist(), ids.tolist()) for pack, ids in taken]))
        position |= json.loads(json.dumps(moved))
    for at in range(0, 60, 7):
        again = StreamedOrder(planned(source, clusters), PACKS)
        _, taken, *_ = next(again.steps(ALONE, steps[at][0], at, range(1), lambda number: True))
        assert [(pack.records.tolist(), ids.tolist()) for pack, ids in taken] == steps[at][1]


def test_clusters_of_files_refused_in_a_line(records, tmp_path):
    (tmp_path / "a.fasta").write_text(">a\nMKLV\n")
    (tmp_path / "b.csv").write_text("id,sequence\na,MKLV\n")
    (tmp_path / "c.csv").write_text("sequence,ur50_id\nMKLV,x\nMKLL,\n")
    for name, message in (
        ("a.fasta", "FASTA has no column ur50_id for --sample_clusters: drop --sample_clusters, or prepare"),
        ("b.csv", "no column ur50_id or cluster or cluster_id, only id, sequence: drop --sample_clusters"),
        ("c.csv", "c.csv: row 2: no name of a cluster: drop --sample_clusters"),
    ):
        source = opened(tmp_path / name)
        with pytest.raises(UserError, match=message):
            clusters_of(source, True, streaming=False, makes=True)
        assert not index_directory(source).exists()
    assert clusters_of(opened(tmp_path / "a.fasta"), "auto", streaming=False, makes=True) is None
    assert clusters_of(opened(tmp_path / "b.csv"), "auto", streaming=False, makes=True) is None
    assert clusters_of(opened(tmp_path / "c.csv"), False, streaming=False, makes=True) is None
    with pytest.raises(UserError, match="--sample_clusters with --streaming reads all data each epoch"):
        clusters_of(opened(tmp_path / "c.csv"), True, streaming=True, makes=True)


def test_train_by_clusters_of_files_resumes(records, tmp_path):
    (tmp_path / "files").mkdir()
    write_parquet(tmp_path / "files", records)
    flags = {"dataset": tmp_path / "files", "sample_clusters": True, "max_steps": 6, "packs_per_step": PACKS}

    def run(name, **more):
        done = run_forked(None, tmp_path / name, **flags | more)
        assert done.returncode == more.get("expect", 0), done.stderr
        return done.stdout + done.stderr

    said = run("whole")
    assert "Sampling clusters, then a member of each: " in said
    assert "records read in " in said
    run("parts", stop_at_step=3)
    assert "records read in " not in run("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_bits(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))
    done = run_forked(None, tmp_path / "uniform", **flags | {"sample_clusters": False, "max_steps": 1})
    assert "Sampling proteins, uniformly: about 660 proteins; the files name their clusters: " in done.stderr
    done = run_forked(None, tmp_path / "parts", **flags | {"sample_clusters": False, "max_steps": 8})
    assert done.returncode == 2
    assert "sample_clusters '" in done.stderr
