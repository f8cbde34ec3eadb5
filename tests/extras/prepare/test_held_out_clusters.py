"""Which clusters are held out: small ones of the split, beside a brute-force draw; earlier versions' outputs."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from common.cli import UserError
from extras.prepare import splits
from extras.prepare.output_directory import read_record
from extras.prepare.sources.records import hash_names
from tests.data_fixtures import TOKENIZE, call, everything_in, load, proteins, write_csv


def expected_draw(keys: np.ndarray, sizes: tuple[int, int, int], all_left: bool) -> np.ndarray:
    """Cluster by cluster, in the order of their keys: validation, else test, else training."""
    members = Counter(keys.tolist())
    held_out = sizes[1] + sizes[2]
    enough = next(
        (most for most in sorted(members.values()) if sum(n for n in members.values() if n <= most) >= 2 * held_out),
        max(members.values()),
    )
    free = {1: sizes[1], 2: sizes[2], 0: len(keys) if all_left else sizes[0]}
    largest = {1: max(sizes[1] // 20, enough), 2: max(sizes[2] // 20, enough), 0: len(keys)}
    split_of = {}
    for key in sorted(members):
        for split in free:
            if members[key] <= min(free[split], largest[split]):
                free[split] -= members[key]
                split_of[key] = split
                break
    return np.array([split_of.get(key, 3) for key in keys.tolist()])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("sizes", "all_left"), [((0, 200, 100), True), ((1500, 400, 7), False), ((0, 20, 700), True)])
def test_draw_splits_equals_a_brute_force_draw(tmp_path, seed, sizes, all_left):
    rng = np.random.default_rng(seed)
    members = np.concatenate([rng.geometric(0.3, 700), rng.integers(30, 300, 4)])
    clusters = rng.permutation(np.repeat(np.arange(len(members)), members))
    names = hash_names(pa.array([f"C{number}" for number in clusters.tolist()]))
    joined = splits.join([names[:500], names[500:]], [], seed, tmp_path)
    keys = np.empty(len(names), np.uint64)
    for of_bucket, records in joined.buckets:
        keys[records.astype(np.int64)] = of_bucket
    labels = splits.draw_splits(joined.buckets, sizes, all_left, tmp_path / "labels.npy")
    assert labels.tolist() == expected_draw(keys, sizes, all_left).tolist()


def write_families(directory, families: list[int]) -> None:
    """Unrelated proteins, and a table that puts them into clusters of these sizes."""
    rows = proteins(sum(families))
    numbers = np.repeat(np.arange(len(families)), families).tolist()
    write_csv(directory, [rows[place] for place in np.random.default_rng(1).permutation(len(rows))])
    lines = (f"C{number}\t{name}\n" for number, (name, _) in zip(numbers, rows, strict=True))
    (directory / "table.tsv").write_text("ur50_id\tur90_id\n" + "".join(lines))


def tokenize(directory, out, *flags) -> dict:
    call(TOKENIZE, "--input_dir", directory, "--output_dir", out, "--cluster_table", directory / "table.tsv", *flags)
    return read_record(out / "arrow")["results"]


@pytest.mark.parametrize("seed", range(4))
def test_no_family_dominates_a_held_out_split(tmp_path, seed):
    families = [180, 90, 21, *[5] * 60, *[1] * 200]
    write_families(tmp_path / "csv", families)
    results = tokenize(tmp_path / "csv", tmp_path / "out", "--validation_size", 100, "--test_size", 60, "--seed", seed)
    assert (results["validation"], results["test"]) == (100, 60)
    number_of = dict(line.split("\t")[::-1] for line in (tmp_path / "csv/table.tsv").read_text().splitlines()[1:])
    for split, rows in load(tmp_path / "out").items():
        largest = max(Counter(number_of[name] for name, _ in rows).values())
        assert results[f"{split}_largest_cluster"] == largest
        assert largest == {"train": 180, "validation": 5, "test": 5}[split]


def test_small_data_holds_out_larger_families_and_says_so(tmp_path, caplog):
    """Of 40 families of 6, none is a twentieth of 30 proteins."""
    write_families(tmp_path / "csv", [6] * 40)
    results = tokenize(tmp_path / "csv", tmp_path / "out", "--validation_size", 30, "--test_size", 18)
    assert (results["validation"], results["test"], results["validation_clusters"]) == (30, 18, 5)
    assert "validation: of 30 records, one cluster may be up to 6, more than a 20th" in caplog.text


def test_earlier_versions_output_is_kept_and_said(tmp_path, caplog):
    write_families(tmp_path / "csv", [3] * 60)
    tokenize(tmp_path / "csv", tmp_path / "out")
    record = tmp_path / "out/arrow/.complete.json"
    made = json.loads(record.read_text())
    assert made["made_from"].pop("held_out_clusters") == 20
    record.write_text(json.dumps(made))
    before = everything_in(tmp_path / "out")
    with caplog.at_level("INFO"):
        tokenize(tmp_path / "csv", tmp_path / "out")
    assert everything_in(tmp_path / "out") == before
    assert "was split by an earlier version" in caplog.text
    assert "nothing to do" in caplog.text
    with pytest.raises(UserError, match="made from other input or arguments"):
        tokenize(tmp_path / "csv", tmp_path / "out", "--seed", 5)
    caplog.clear()
    tokenize(tmp_path / "csv", tmp_path / "out", "--overwrite")
    assert "earlier version" not in caplog.text
    assert read_record(tmp_path / "out/arrow")["made_from"]["held_out_clusters"] == 20
