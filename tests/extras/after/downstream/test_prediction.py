"""predict.py: what probe.py and finetune.py said of their held-out proteins, long proteins, stops, what is refused."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, EsmForMaskedLM, EsmForSequenceClassification

from common.cli import UserError
from extras.after.downstream.prediction import PREDICTED, TABLE
from extras.after.downstream.saved_probe import read_probes
from tests.conftest import ROOT
from tests.data_fixtures import call, environment, load_script, write_fasta
from tests.extras.after.downstream.probing import NAMES, PROBE, ROWS, probe
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.inference.embed_fixtures import call_embed, make_model
from tests.models.reference import published_names
from tests.warm_python import python

FINETUNE, PREDICT = load_script("finetune.py"), load_script("predict.py")
TUNING = ("--use_cpu", "--count_relatives", "False", "--num_train_epochs", 2, "--learning_rate", 1e-2)


def predict(saved, fasta, out, *flags) -> list[dict[str, str]]:
    call(PREDICT, "--model", saved, "--fasta", fasta, "--output_dir", out, *flags)
    with (out / PREDICTED / TABLE).open() as file:
        return list(csv.DictReader(file))


def letters(text: str) -> str:
    return "".join("HE"[residue in "AILMFWV"] for residue in text)


@pytest.fixture(scope="module")
def labels(proteins, tmp_path_factory):
    """{kind: a table} of all proteins: a number, one of three classes, a letter for each residue."""
    directory = tmp_path_factory.mktemp("labels")
    made = {
        "number": lambda text: sum(residue in "AILMFWV" for residue in text) / len(text) * 20 + 60,
        "class": lambda text: ("low", "mid", "high")[sum(map(ord, text)) % 3],
        "letters": letters,
    }
    return {
        kind: write_table(
            directory / f"{kind}.csv", ["id", "sequence", "label"], [(name, t, of(t)) for name, t in proteins]
        )
        for kind, of in made.items()
    }


@pytest.mark.parametrize("kind", ["number", "class", "letters"])
def test_predictions_of_held_out_proteins_are_the_probes_own(model, fasta, labels, tmp_path, kind):
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--labels", labels[kind], "--count_relatives", "False")
    call(PROBE, *flags, "--output_dir", tmp_path / "probed", *(["--per_residue"] if kind == "letters" else []))
    rows = {(row["id"], row.get("position")): row for row in predict(tmp_path / "probed", fasta, tmp_path / "out")}
    with (tmp_path / "probed" / "predictions.csv").open() as file:
        held_out = list(csv.DictReader(file))
    inside = []
    for row in held_out:
        mine = rows[row["id"], row.get("position")]
        if kind == "number":
            assert float(mine["prediction"]) == pytest.approx(float(row["prediction"]), abs=1e-4)
            inside.append(float(mine["low"]) <= float(row["label"]) <= float(mine["high"]))
        else:
            assert mine["prediction"] == row["prediction"]
            chances = {name[12:]: float(value) for name, value in mine.items() if name.startswith("probability_")}
            assert sum(chances.values()) == pytest.approx(1)
            assert max(chances, key=chances.get) == mine["prediction"]
            inside.append(row["label"] in mine["set"].split(";"))
    assert np.mean(inside) >= 0.9  # on these, by construction
    assert kind != "number" or np.mean(inside) < 0.98


@pytest.mark.parametrize(("kind", "full"), [("number", False), ("class", True), ("letters", False), ("letters", True)])
def test_predictions_of_held_out_proteins_are_the_fine_tuned_models_own(model, fasta, labels, tmp_path, kind, full):
    pytest.importorskip("peft", reason="./install.sh --finetune")
    more = ("--full", "True") if full else ()
    given = ("--model_name_or_path", model, "--dataset", labels[kind], "--output_dir", tmp_path / "tuned")
    call(FINETUNE, *given, *TUNING, *more)
    found = predict(tmp_path / "tuned", fasta, tmp_path / "out", "--coverage", 0.8)
    rows = {(row["id"], row.get("position", "")): row for row in found}
    with (tmp_path / "tuned" / "predictions.csv").open() as file:
        held_out = list(csv.DictReader(file))
    assert len(held_out) >= 10
    for row in held_out:
        mine = rows[row["protein"], row["residue"]]
        if kind == "number":
            assert float(mine["prediction"]) == pytest.approx(float(row["prediction"]), abs=1e-4)
            assert float(mine["low"]) < float(mine["prediction"]) < float(mine["high"])
        else:
            assert mine["prediction"] == row["prediction"]
    results = json.loads((tmp_path / "tuned" / "results.json").read_text())
    assert ("calibration" in results) == (kind != "number")


def test_fine_tuned_model_gets_a_new_head_for_other_labels(model, fasta, labels, tmp_path):
    pytest.importorskip("peft", reason="./install.sh --finetune")
    tuned = tmp_path / "class" / "model"
    for begin, kind, out, full in (
        (model, "class", "class", True),
        (tuned, "number", "full", True),
        (tuned, "number", "lora", False),
    ):
        given = ("--model_name_or_path", begin, "--dataset", labels[kind], "--output_dir", tmp_path / out)
        call(FINETUNE, *given, *TUNING, "--full", str(full))
    for out in ("full", "lora"):
        first = predict(tmp_path / out, fasta, tmp_path / f"of_{out}", "--coverage", 0.8)[0]
        assert [*first] == ["id", "prediction", "low", "high"]


def test_long_protein_is_joined_of_windows_as_its_embeddings_are(model, fasta, labels, tmp_path):
    """A residue's features are embed.py's with the same windows; a fine-tuned protein's logits are a weighted mean."""
    long = write_fasta(tmp_path / "long.fasta", [("long", "MKVLAGHIWYERTSDNQPFC" * 8), ("short", "MKV")])
    flags = ("--fasta", fasta, "--labels", labels["letters"], "--count_relatives", "False")
    call_embed(model, fasta, tmp_path / "embedded", "--per_residue", "--max_seq_length", 42)
    call(PROBE, "--embeddings", tmp_path / "embedded", *flags, "--output_dir", tmp_path / "probed")
    found = predict(tmp_path / "probed", long, tmp_path / "out", "--model_name_or_path", model)
    call_embed(model, long, tmp_path / "long", "--per_residue", "--max_seq_length", 42)
    columns = pq.read_table(tmp_path / "long" / "embeddings" / "part-00000.parquet")["embedding"].combine_chunks()
    features = columns.values.values.to_numpy().reshape(163, -1)
    _, (saved,) = read_probes(tmp_path / "probed" / "probe")
    assert [row["prediction"] for row in found] == saved.outputs(features).predictions.tolist()
    assert [row["position"] for row in found] == [str(n) for n in [*range(1, 161), 1, 2, 3]]

    given = ("--model_name_or_path", model, "--dataset", labels["number"], "--output_dir", tmp_path / "tuned")
    call(FINETUNE, *given, *TUNING, "--full", "True", "--max_seq_length", 84)
    first, _ = predict(tmp_path / "tuned", long, tmp_path / "of_tuned")
    stock = EsmForSequenceClassification.from_pretrained(tmp_path / "tuned" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned" / "model")
    text = (
        "MKVLAGHIWYERTSDNQPFC" * 8
    )  # 62 residues a window: from 0, 19 and 38; half-way between their centres is ours
    with torch.no_grad():
        values = [stock(**tokenizer(text[n : n + 82], return_tensors="pt")).logits.item() for n in (0, 39, 78)]
    assert float(first["prediction"]) == pytest.approx(np.average(values, weights=[60, 39, 61]), abs=1e-4)


def test_columns_in_one_pass_and_a_process_whose_intervals_are_wider_far_away(model, fasta, proteins, tmp_path):
    rows = [(name, letters(t).count("E") / len(t), "ab"[n % 2]) for n, (name, t) in enumerate(proteins)]
    table = write_table(tmp_path / "a.csv", ["id", "one", "kind"], rows)
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--labels", table, "--count_relatives", "False")
    call(PROBE, *flags, "--label_column", "one", "kind", "--output_dir", tmp_path / "both", "--folds", 3)
    found = predict(tmp_path / "both", fasta, tmp_path / "out")
    parts = {"one": ("prediction", "low", "high"), "kind": ("prediction", "probability_a", "probability_b", "set")}
    assert list(found[0]) == ["id", *(f"{column}_{name}" for column, names in parts.items() for name in names)]
    call(PROBE, *flags, "--label_column", "one", "--output_dir", tmp_path / "gp", "--probe", "gp")
    strange = write_fasta(tmp_path / "strange.fasta", [("known", proteins[0][1]), ("poly", "W" * 60)])
    near, far = predict(tmp_path / "gp", strange, tmp_path / "far")
    widths = [float(row["high"]) - float(row["low"]) for row in (near, far)]
    assert widths[1] > 1.2 * widths[0]


def test_stopped_and_started_on_two_ranks_gives_the_same_bytes(model, embedded, fasta, labels, tmp_path):
    probe(embedded["mean"], fasta, labels["number"], tmp_path / "probed")
    flags = ("--model", tmp_path / "probed", "--fasta", fasta, "--model_name_or_path", model)
    flags = (*flags, "--proteins_per_part", 20, "--use_cpu")
    call(PREDICT, *flags, "--output_dir", tmp_path / "whole")
    words = ["-m", "extras.launch", "--standalone", "--nproc_per_node=2", str(ROOT / "predict.py"), *map(str, flags)]
    command = [python(), *words, "--output_dir", str(tmp_path / "two")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "whole" / PREDICTED).glob("[!.]*"):
        assert (tmp_path / "two" / PREDICTED / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list((tmp_path / "whole" / PREDICTED).glob("part-*"))) == 5


def test_what_does_not_fit_is_refused_in_a_line(model, embedded, fasta, labels, tmp_path):
    probe(embedded["mean"], fasta, labels["number"], tmp_path / "probed")
    other = make_model(tmp_path / "other", seed=6)
    rows = [(*row, ("train", "test")[n > 45]) for n, row in enumerate(ROWS)]
    few = write_table(tmp_path / "few.csv", [*NAMES, "split"], rows)
    probe(embedded["mean"], fasta, few, tmp_path / "few")
    shutil.copytree(tmp_path / "probed", tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "probe")
    of_model = ("--model_name_or_path", model)
    for saved, flags, said in (
        ("probed", (), "of embeddings by embed.py: give its model as --model_name_or_path"),
        ("probed", ("--model_name_or_path", other), "not the model of --model"),
        ("few", (*of_model, "--coverage", 0.95), "--coverage 0.95: 14 held-out labels bound no more than 0.933"),
        ("probed", (*of_model, "--coverage", 1), "--coverage 1: must be above 0 and below 1"),
        ("empty", of_model, "nothing there that probe.py or finetune.py saved"),
    ):
        with pytest.raises(UserError) as error:
            predict(tmp_path / saved, fasta, tmp_path / "out", *flags)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_tuned_model_that_is_not_its_results_own_is_refused(model, fasta, labels, tmp_path):
    """Other classes in config.json, a file that is lacking, and a base model that is another."""
    given = ("--model_name_or_path", model, "--dataset", labels["class"], "--output_dir", tmp_path / "tuned")
    call(FINETUNE, *given, *TUNING, "--full", "True")
    config = tmp_path / "tuned" / "model" / "config.json"
    content = json.loads(config.read_text())
    with pytest.raises(UserError, match="no effect, as all weights are those of --model"):
        predict(tmp_path / "tuned", fasta, tmp_path / "out", "--model_name_or_path", model)
    config.write_text(json.dumps(content | {"id2label": {"0": "low", "1": "mid", "2": "new"}}))
    with pytest.raises(UserError, match=r"its classes are low, mid, new, those of results\.json high, low, mid"):
        predict(tmp_path / "tuned", fasta, tmp_path / "out")
    config.write_text(json.dumps(content))
    (tmp_path / "tuned" / "calibration.safetensors").unlink()
    with pytest.raises(UserError, match="has no calibration.safetensors, as in earlier versions"):
        predict(tmp_path / "tuned", fasta, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_whole_fine_tuned_model_embeds_and_scores_as_any(model, fasta, labels, tmp_path, caplog):
    """Its embeddings are transformers' of the same files; its scores are by the head that the model had before."""
    given = ("--model_name_or_path", model, "--dataset", labels["class"], "--output_dir", tmp_path / "tuned")
    call(FINETUNE, *given, *TUNING, "--full", "True")
    tuned = tmp_path / "tuned" / "model"
    caplog.set_level("INFO")
    one = write_fasta(tmp_path / "one.fasta", [("one", "MKVLAGHIWY")])
    call_embed(tuned, one, tmp_path / "embedded")
    assert f"{tuned}: its head, of finetune.py, is ignored" in caplog.messages
    stock = EsmForSequenceClassification.from_pretrained(tuned).eval()
    before = EsmForMaskedLM.from_pretrained(model).eval()
    files = [load_file(tuned / name).keys() for name in ("model.safetensors", "lm_head.safetensors")]
    shared = {name for names in files for name in names if "classifier." not in name}
    assert shared == published_names(before.config.num_hidden_layers)
    assert {name for name in files[0] if name.startswith("classifier.")}
    ids = AutoTokenizer.from_pretrained(tuned)("MKVLAGHIWY", return_tensors="pt")
    with torch.no_grad():
        hidden = stock.esm(**ids).last_hidden_state
        assert not torch.allclose(hidden, before.esm(**ids).last_hidden_state, atol=1e-3)
        before.esm.load_state_dict(stock.esm.state_dict())
        logits = before(**ids).logits.log_softmax(-1)[0]
    columns = pq.read_table(tmp_path / "embedded" / "embeddings" / "part-00000.parquet")["embedding"]
    assert columns[0].as_py() == pytest.approx(hidden[0, 1:-1].mean(0).tolist(), abs=1e-4)
    mutants = write_table(tmp_path / "mutants.csv", ["mutant"], [("K2R",)])
    flags = ("--model_name_or_path", tuned, "--fasta", one, "--mutations", mutants, "--wild_type_marginal_only")
    call(load_script("score.py"), *flags, "--output", tmp_path / "scored.csv")
    with (tmp_path / "scored.csv").open() as file:
        (row,) = csv.DictReader(file)
    tokens = AutoTokenizer.from_pretrained(tuned).convert_tokens_to_ids
    expected = float(logits[2, tokens("R")] - logits[2, tokens("K")])
    assert float(row["wild_type_marginal"]) == pytest.approx(expected, abs=1e-4)
