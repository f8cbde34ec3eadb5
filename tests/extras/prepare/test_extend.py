"""The next release beside brute force: what is added, what stays out, and a run that goes on with it."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from pathlib import Path

import datasets
import numpy as np
import pytest

from common.cli import UserError
from common.data.clusters import open_clusters
from extras.prepare import extend
from tests.data_fixtures import TOKENIZE, call, different, everything_in
from tests.training_fixtures import train

SPLITS = ("train", "validation", "test")
SIZES = ("--validation_size", 20, "--test_size", 10)
NOTHING_HELD_OUT = ("--validation_size", 0, "--test_size", 0)


def prepare(directory: Path, proteins: list[tuple[str, str]], *flags) -> Path:
    (directory / "csv").mkdir(parents=True)
    lines = "".join(f"{name},{text}\n" for name, text in proteins)
    (directory / "csv" / "x000.csv").write_text(f"id,text\n{lines}")
    call(TOKENIZE, "--input_dir", directory / "csv", "--output_dir", directory, *flags)
    return directory


def write_table(path: Path, clusters: dict[str, int]) -> Path:
    path.write_text("ur50_id\tur90_id\n" + "".join(f"c{cluster}\t{name}\n" for name, cluster in clusters.items()))
    return path


def ids(directory: Path) -> dict[str, list[str]]:
    return {split: list(part["id"]) for split, part in datasets.load_from_disk(str(directory / "arrow")).items()}


def releases(seed: int = 0) -> tuple[list, list, dict[str, int]]:
    """Proteins of two releases, and their clusters of some 3: the second lacks some, has others, some renamed."""
    rng = random.Random(seed)
    old = [(f"P{n}", f"MK{different(n)}") for n in range(400)]
    new = [protein for protein in old if rng.random() > 0.1]
    new = [(f"R{name}", text) if rng.random() < 0.1 else (name, text) for name, text in new]
    new += [(f"N{n}", f"MK{different(1000 + n)}") for n in range(150)]
    new += [("twice", new[-1][1])]
    rng.shuffle(new)
    clusters = {name: rng.randrange(180) for name, _ in dict.fromkeys([*old, *new])}
    return old, new, clusters


def extended(old: Path, new: Path, out: Path, *flags) -> dict:
    """The data report of the output."""
    call(extend, old, new, "--output_dir", out, *flags)
    return json.loads((out / "arrow" / "data_report.json").read_text())


def trainer_state(run: Path) -> dict:
    return json.loads((run / "trainer_state.json").read_text())


def held_out_files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for split in SPLITS[1:]
        for path in (directory / "arrow" / split).rglob("*")
        if path.is_file()
    }


def test_new_records_follow_the_old_ones_by_content(tmp_path, caplog):
    old, new, _ = releases()
    prepare(tmp_path / "old", old, *SIZES)
    prepare(tmp_path / "new", new, *SIZES)  # all of its splits count
    with caplog.at_level("INFO"):
        report = extended(tmp_path / "old", tmp_path / "new", tmp_path / "out")
    texts, of_new = dict(old), dict(new)
    before, released, after = (ids(tmp_path / name) for name in ("old", "new", "out"))
    known = set(texts.values())
    added = [name for split in SPLITS for name in released[split] if of_new[name] not in known]
    assert after["train"] == before["train"] + added
    assert held_out_files(tmp_path / "out") == held_out_files(tmp_path / "old")
    held_out = {texts[name] for split in SPLITS[1:] for name in before[split]}
    copies = sum(of_new[name] in held_out for split in SPLITS for name in released[split])
    gone = len(known - set(of_new.values()))
    counts = report["extended"]
    assert counts["added"] == len(added) == 151
    assert counts["copies_of_held_out"] == copies
    assert counts["known"] == sum(map(len, released.values())) - len(added) - copies
    assert (counts["gone"], counts["relatives_of_held_out"]) == (gone, 0)
    assert report["train"] == len(after["train"])
    everything = [texts.get(name) or of_new[name] for split in SPLITS for name in after[split]]
    assert report["tokens"] == sum(len(text) + 2 for text in everything)
    assert report["residues"]["max"] == max(map(len, everything))
    assert f"Added {len(added)} records" in caplog.text


def test_relatives_of_held_out_proteins_stay_out(tmp_path):
    old, new, clusters = releases()
    table = write_table(tmp_path / "table.tsv", clusters)
    prepare(tmp_path / "old", old, *SIZES, "--cluster_table", table)
    # In the new release some families have merged, and one held-out protein has another name, in another family.
    before = ids(tmp_path / "old")
    held_out = before["validation"] + before["test"]
    clusters |= {name: 1000 for name, cluster in clusters.items() if cluster in (3, 4, clusters[held_out[3]])}
    new = [("renamed" if name == held_out[0] else name, text) for name, text in new if name != "renamed"]
    if not any(name == "renamed" for name, _ in new):
        new.append(("renamed", dict(old)[held_out[0]]))
    clusters |= {"renamed": 2000, "N0": 2000, "N1": clusters[held_out[1]]}
    table = write_table(tmp_path / "next.tsv", clusters)
    prepare(tmp_path / "new", new, *NOTHING_HELD_OUT)
    report = extended(tmp_path / "old", tmp_path / "new", tmp_path / "out", "--cluster_table", table)

    texts, of_new = dict(old), dict(new)
    after, released = ids(tmp_path / "out"), ids(tmp_path / "new")["train"]
    contents = {texts[name] for name in held_out}
    of_held_out = {clusters[name] for name in held_out}
    of_held_out |= {clusters[name] for name in released if of_new[name] in contents}
    unknown = [name for name in released if of_new[name] not in set(texts.values())]
    added = [name for name in unknown if clusters[name] not in of_held_out]
    assert {"N0", "N1"} <= set(unknown) - set(added)
    assert after["train"] == before["train"] + added
    assert report["extended"]["relatives_of_held_out"] == len(unknown) - len(added)
    of_train = sum(clusters[name] in of_held_out for name in before["train"])
    assert report["extended"]["train_with_held_out_relative"] == of_train > 0
    assert held_out_files(tmp_path / "out") == held_out_files(tmp_path / "old")
    index = open_clusters(tmp_path / "out/arrow/train", len(after["train"]))
    expected = defaultdict(list)
    for record, name in enumerate(after["train"]):
        expected[clusters[name]].append(record)
    parts = np.split(np.array(index.members), np.array(index.offsets)[1:-1])
    assert [members.tolist() for members in parts] == list(expected.values())
    assert report["train_clusters"] == len(expected)


def test_a_killed_run_resumes_to_the_same_bytes_with_links_or_copies(tmp_path, monkeypatch):
    old, new, clusters = releases()
    table = ("--cluster_table", write_table(tmp_path / "table.tsv", clusters))
    prepare(tmp_path / "old", old, *SIZES, *table)
    prepare(tmp_path / "new", new, *NOTHING_HELD_OUT)
    extended(tmp_path / "old", tmp_path / "new", tmp_path / "whole", *table)
    shard = "arrow/test/data-00000-of-00001.arrow"
    assert os.path.samefile(tmp_path / "old" / shard, tmp_path / "whole" / shard)

    def stop(*_):
        raise KeyboardInterrupt

    for step in ("index_train", "write_train", "compare"):
        with monkeypatch.context() as patched:
            patched.setattr(extend, step, stop)
            with pytest.raises(KeyboardInterrupt):
                extended(tmp_path / "old", tmp_path / "new", tmp_path / step, *table)
        assert not (tmp_path / step / "arrow").exists()
        extended(tmp_path / "old", tmp_path / "new", tmp_path / step, *table)
        assert everything_in(tmp_path / step) == everything_in(tmp_path / "whole")

    def no_links(*_):
        raise OSError

    monkeypatch.setattr(os, "link", no_links)
    extended(tmp_path / "old", tmp_path / "new", tmp_path / "copied", *table)
    assert everything_in(tmp_path / "copied") == everything_in(tmp_path / "whole")
    assert not os.path.samefile(tmp_path / "old" / shard, tmp_path / "copied" / shard)


def test_what_does_not_go_together_is_refused(tmp_path):
    old, new, clusters = releases()
    table = write_table(tmp_path / "table.tsv", clusters)
    prepare(tmp_path / "old", old, *SIZES, "--cluster_table", table)
    prepare(tmp_path / "new", new, *NOTHING_HELD_OUT)
    prepare(tmp_path / "short", new, *NOTHING_HELD_OUT, "--max_seq_length", 64)
    others = write_table(tmp_path / "others.tsv", {f"X{name}": cluster for name, cluster in clusters.items()})
    some = write_table(tmp_path / "some.tsv", {name: n for name, n in clusters.items() if name.startswith("P")})
    given = ("--cluster_table", table)
    for words, message in (
        ((tmp_path / "old", tmp_path / "new"), "was split by clusters: give --cluster_table"),
        ((tmp_path / "old", tmp_path / "short", *given), "--max_seq_length is 64, and None in"),
        (
            (tmp_path / "old", tmp_path / "old", *given),
            "has all of its records, or holds out relatives: nothing to add",
        ),
        ((tmp_path / "old", tmp_path / "csv", *given), "not a finished output of step 1"),
        ((tmp_path / "old", tmp_path / "new", "--cluster_table", others), "names only 0 of the 30 held-out proteins"),
        ((tmp_path / "old", tmp_path / "new", "--cluster_table", some), r"lacks \d+ of the \d+ proteins"),
        ((tmp_path / "old", tmp_path / "new", "--cluster_table", tmp_path / "no"), "no: no such file"),
    ):
        with pytest.raises(UserError, match=message) as error:
            extended(*words[:2], tmp_path / "out", *words[2:])
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists(), message
    with pytest.raises(UserError, match="OLD .* is in there"):
        extended(tmp_path / "old", tmp_path / "new", tmp_path / "old", *given)
    with pytest.raises(UserError, match="give the two prepared directories first"):
        call(extend, "--output_dir", tmp_path / "out")


@pytest.mark.parametrize("sampled", [False, True], ids=["all proteins", "one of each cluster"])
def test_a_run_goes_on_with_the_extended_data(tmp_path, sampled):
    """At the next epoch, on any chain of extensions; with other data it is refused, as before."""
    old, new, clusters = releases()
    table = ("--cluster_table", write_table(tmp_path / "table.tsv", clusters | {"L": 7})) if sampled else ()
    prepare(tmp_path / "old", old, *SIZES, *table)
    prepare(tmp_path / "new", new, *NOTHING_HELD_OUT)
    prepare(tmp_path / "last", [*new, ("L", f"MK{different(5000)}")], *NOTHING_HELD_OUT)
    extended(tmp_path / "old", tmp_path / "new", tmp_path / "out", *table)
    extended(tmp_path / "out", tmp_path / "last", tmp_path / "again", *table)
    before, after = (tmp_path / name / "arrow" for name in ("old", "again"))
    flags = {"max_steps": None, "packs_per_step": 1, "logging_steps": 1, "max_seq_length": 32}
    flags |= {"per_device_train_batch_size": 8, "sample_clusters": sampled}
    train(before, tmp_path / "run", num_train_epochs=3, stop_at_step=2, **flags)
    of_smaller = trainer_state(tmp_path / "run")
    said = train(after, tmp_path / "run", num_train_epochs=3, stop_at_step=4, **flags)
    assert "Extended data: their epoch 2 begins at step 3" in said
    said = train(after, tmp_path / "run", num_train_epochs=3, **flags)
    assert "Extended data" not in said
    state = trainer_state(tmp_path / "run")
    assert state["position"]["epoch"] == 3
    records = len(ids(tmp_path / "again")["train"])
    of_an_epoch = len(open_clusters(after / "train", records)) if sampled else records
    assert state["sequences"] == of_smaller["sequences"] + 2 * of_an_epoch
    assert state["resolved"]["total_steps"] == state["step"]
    said = train(before, tmp_path / "run", expect=2, num_train_epochs=4, **flags)
    assert "the data have changed since the checkpoint" in said
