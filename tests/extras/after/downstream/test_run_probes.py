"""--eval_probe: what a run measures is what probe.py measures on its export; tables that are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.data_fixtures import proteins as random_proteins
from tests.data_fixtures import write_fasta
from tests.extras.after.downstream.probing import COUNT, probe
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.inference.embed_fixtures import call_embed
from tests.training_fixtures import rows, train


def test_run_evaluates_probes_as_probe_py_does_on_its_export(dataset, tmp_path):
    proteins = random_proteins(COUNT, seed=4)
    fasta = write_fasta(tmp_path / "my.fasta", proteins)
    numbers = np.array([text.count("A") / len(text) + 0.1 * (len(text) % 2) for _, text in proteins])
    classes = np.where(numbers > np.median(numbers), "high", "low")
    tables = {}
    for name, values in (("num bers", numbers.astype(str)), ("classes", classes)):
        table = [(text, y) for (_, text), y in zip(proteins, values, strict=True)]
        tables[name] = write_table(tmp_path / f"{name}.csv", ["sequence", "label"], table)
    flags = {"max_steps": 2, "do_eval": True, "eval_steps": 1}
    train(dataset, tmp_path / "plain", **flags)
    train(dataset, tmp_path / "one", **flags, eval_probe=tables["num bers"], eval_downstream_steps=1)
    mine, plain = rows(tmp_path / "one"), rows(tmp_path / "plain")
    assert [row["loss"] for row in mine if "loss" in row] == [row["loss"] for row in plain if "loss" in row]
    assert [row["step"] for row in mine if "eval_probe_num_bers_spearman" in row] == [1, 2]
    train(dataset, tmp_path / "two", 2, script="train_fsdp2.py", **flags, eval_probe=tables["classes"])
    for name, run, model, values in (
        ("num_bers", "one", "one/checkpoint-2", numbers),
        ("classes", "two", "two", classes),
    ):
        results = json.loads((tmp_path / run / "all_results.json").read_text())
        call_embed(tmp_path / model, fasta, tmp_path / run / "embedded")
        table = [(each, y) for (each, _), y in zip(proteins, values, strict=True)]
        labels = write_table(tmp_path / "labels.csv", ["id", "label"], table)
        after, _ = probe(tmp_path / run / "embedded", fasta, labels, tmp_path / run / "probed")
        for metric, (value, _, _) in after["probe"].items():
            assert results[f"eval_probe_{name}_{metric}"] == pytest.approx(value, abs=1e-5)
        for metric, (value, _, _) in after["baseline"].items():
            assert results[f"eval_probe_{name}_baseline_{metric}"] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,label\nMKV,1\n", "no column 'sequence'"),
        ("sequence,label\nMKVLAG,1\n", "labels.csv: 1 labels in the training part"),
        (
            "sequence,label\n0123456789,1\n",
            "row 2 has 10 characters of 10 that are not residues",
        ),
    ],
)
def test_run_refuses_a_table_before_it_trains(dataset, tmp_path, content, said):
    (tmp_path / "labels.csv").write_text(content)
    flags = {"max_steps": 1, "do_eval": True, "eval_probe": tmp_path / "labels.csv"}
    assert said in train(dataset, tmp_path / "out", expect=2, **flags)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
