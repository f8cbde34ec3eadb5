"""finetune.py beside a plain peft + Trainer loop, its results in peft's own API, stops, and what it refuses."""

from __future__ import annotations

import csv
import json
import random
import re
import resource
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, EsmForTokenClassification, Trainer, TrainingArguments

from common.checkpoint.files import MANIFEST
from common.cli import UserError
from common.models.esm2.convert import ADAPTER
from extras.after.downstream.finetuning import FineTuning
from extras.after.downstream.labels import read_examples
from extras.after.downstream.splits import split_of
from extras.after.downstream.tuned_model import make_model
from extras.after.downstream.tuning_flags import TuningFlags
from tests.data_fixtures import call, load_script
from tests.extras.after.downstream.tables import write_table
from tests.forked import Script, run_script
from tests.patience import wait_until

pytest.importorskip("peft", reason="./install.sh --finetune")
FINETUNE = load_script("finetune.py")
CPU = torch.device("cpu")
HYDROPHOBIC = set("AILMFWV")


def label_of(sequence: str, kind: str) -> str:
    """Of residues: whether one is hydrophobic, as letters or as numbers, some of them without a label."""
    hydrophobic = [residue in HYDROPHOBIC for residue in sequence]
    if kind == "protein":
        return str(60 + 20 * (sum(hydrophobic) / len(sequence)))
    words = [
        "." if n % 4 == 3 else ("H" if h else "C") if kind == "letters" else f"{5 + h}"
        for n, h in enumerate(hydrophobic)
    ]
    return ("" if kind == "letters" else " ").join(words)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """{kind: a CSV file} of the same 60 proteins."""
    generator = random.Random(3)
    sequences = [
        "M" + "".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=generator.randint(8, 30))) for _ in range(60)
    ]
    directory, found = tmp_path_factory.mktemp("labels"), {}
    for kind in ("protein", "letters", "numbers"):
        found[kind] = write_table(
            directory / f"{kind}.csv", ("sequence", "label"), [(s, label_of(s, kind)) for s in sequences]
        )
    return found


def flags_of(model, table, out, **flags):
    words = [f"--{name}={value}" for name, value in flags.items()]
    given = ["--model_name_or_path", model, "--dataset", table, "--output_dir", out]
    return [*given, "--use_cpu", "--count_relatives", "False", *words]


def tuning_of(untrained, table, dropout=0.0, **settings) -> FineTuning:
    task, examples = read_examples(str(table))
    args = TuningFlags(str(untrained), str(table), "unused", lora_dropout=dropout)
    defaults = {"learning_rate": 1e-2, "epochs": 1, "batch_size": 8, "tokens_per_batch": 4096, "weight_decay": 0.01}
    defaults |= {"warmup": 0.1, "max_grad_norm": 1.0, "patience": 3, "seed": 4, "bf16": False, "save_steps": 100}
    return FineTuning(make_model(args, task), task, examples, CPU, **defaults | settings)


@pytest.mark.parametrize("kind", ["protein", "letters"])
def test_steps_equal_those_of_peft_and_trainer(untrained, table, tmp_path, kind):
    """Its tokenizer, padding, loss, optimiser and schedule are transformers'; ours computes each step in parts."""
    ours, theirs = (tuning_of(untrained, table[kind], tokens_per_batch=100) for _ in range(2))
    batches = ours.batches(0)
    ADAPTER.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with table[kind].open() as file:
        labels = {row["sequence"]: row["label"] for row in csv.DictReader(file)}
    lines = list(labels)
    trained = np.array(
        [float(labels[s]) for s in lines if split_of(s, (0.1, 0.2)) == "train"] if kind == "protein" else [0]
    )

    def collate(sequences):
        inputs = tokenizer(sequences, padding=True, return_tensors="pt")
        if kind == "protein":
            found = [(float(labels[s]) - trained.mean()) / trained.std() for s in sequences]
            return inputs | {"labels": torch.tensor(found, dtype=torch.float32)}
        found = torch.full(inputs["input_ids"].shape, -100)
        for row, sequence in enumerate(sequences):
            for place, letter in enumerate(labels[sequence], 1):
                found[row, place] = {"C": 0, "H": 1, ".": -100}[letter]
        return inputs | {"labels": found}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    flags = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 1.0}
    flags |= {"num_train_epochs": 1, "warmup_steps": 1, "lr_scheduler_type": "linear", "logging_steps": 1, "seed": 4}
    flags |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "remove_unused_columns": False}
    data = [lines[int(each.name.split()[1]) - 2] for batch in batches for each in batch]
    loop = InOrder(
        theirs.model,
        TrainingArguments(str(tmp_path / "out"), disable_tqdm=True, **flags),
        data_collator=collate,
        train_dataset=data,
    )
    loop.train()
    expected = [row["loss"] for row in loop.state.log_history if "loss" in row]
    ours.model.train()
    losses = [ours.step(batch) for batch in batches]
    assert len(losses) == len(expected) >= 5
    assert max(losses) - min(losses) > 0.01
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, weights in theirs.weights().items():
        torch.testing.assert_close(ours.weights()[name], weights, atol=1e-4, rtol=1e-4)


def test_adapter_opens_in_peft_with_our_predictions(untrained, table, tmp_path):
    """A regression of residues, whose planted label is learnt, in its own unit."""
    from peft import AutoPeftModelForTokenClassification

    call(FINETUNE, *flags_of(untrained, table["numbers"], tmp_path / "tuned", num_train_epochs=8, learning_rate=1e-2))
    results = json.loads((tmp_path / "tuned" / "results.json").read_text())
    assert results["task"] == "token_regression"
    assert results["intervals"] == {"over": "proteins"} | {n: results["counts"][n] for n in ("validation", "test")}
    assert results["test"]["mae"][2] < results["test"]["baseline"]["mae"] / 2
    assert results["test"]["baseline"]["r2"] == pytest.approx(0, abs=0.05)
    model = AutoPeftModelForTokenClassification.from_pretrained(tmp_path / "tuned" / "model", num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned" / "model")
    lines = table["numbers"].read_text().splitlines()
    with (tmp_path / "tuned" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["protein"] for row in rows}) == results["counts"]["test"]
    for name in sorted({row["protein"] for row in rows})[:4]:
        sequence, label = lines[int(name.split()[1]) - 1].split(",")
        with torch.inference_mode():
            values = model(**tokenizer(sequence, return_tensors="pt")).logits[0, 1:-1, 0]
        mine = [row for row in rows if row["protein"] == name]
        assert [row["label"] for row in mine] == [f"{word}.0" for word in label.split() if word != "."]
        places = [int(row["residue"]) - 1 for row in mine]
        assert values[places].tolist() == pytest.approx([float(row["prediction"]) for row in mine], abs=1e-4)
    assert set(load_file(tmp_path / "tuned" / "model" / "adapter_model.safetensors")) >= {
        "base_model.model.classifier.weight",
        "base_model.model.esm.encoder.layer.0.attention.self.query.lora_A.weight",
    }


def test_adapter_has_the_names_of_its_classes_and_lists_in_one_order(untrained, table, tmp_path):
    from peft import AutoPeftModelForTokenClassification

    modules = "value,query,dense,key"
    call(FINETUNE, *flags_of(untrained, table["letters"], tmp_path, num_train_epochs=1, target_modules=modules))
    made = tmp_path / "model"
    names = AutoConfig.from_pretrained(made)
    assert (names.id2label, names.label2id) == ({0: "C", 1: "H"}, {"C": 0, "H": 1})
    model = AutoPeftModelForTokenClassification.from_pretrained(made, id2label=names.id2label, label2id=names.label2id)
    assert model.config.id2label == {0: "C", 1: "H"}
    with safe_open(made / "adapter_model.safetensors", "pt") as file:
        assert torch.equal(
            model.state_dict()["base_model.model.classifier.modules_to_save.default.bias"],
            file.get_tensor("base_model.model.classifier.bias"),
        )
    assert '"1": "H"' in (made / "README.md").read_text()
    adapter = json.loads((made / "adapter_config.json").read_text())
    assert adapter["target_modules"] == ["dense", "key", "query", "value"]
    assert adapter["modules_to_save"] == ["classifier", "score"]


def test_script_takes_splits_and_clusters_of_columns_and_names_contradictions(untrained, table, tmp_path):
    """The first two proteins are of one cluster; the first comes twice, with another number."""
    with table["protein"].open() as file:
        pairs = [tuple(row.values()) for row in csv.DictReader(file)]
    rows = [(*pair, ("val", "test", "train", "train")[n // 2 % 4], f"c{n // 2}") for n, pair in enumerate(pairs)]
    rows.append((pairs[0][0].lower(), "12.5", "val", "c0"))
    path = write_table(tmp_path / "a.csv", ("sequence", "label", "mine", "of"), rows)
    flags = {"split_column": "mine", "cluster_column": "of", "num_train_epochs": 1}
    call(FINETUNE, *flags_of(untrained, path, tmp_path / "tuned", **flags))
    results = json.loads((tmp_path / "tuned" / "results.json").read_text())
    assert results["counts"] == {"train": 28, "validation": 17, "test": 16}
    assert results["intervals"] == {"over": "clusters", "validation": 8, "test": 8}
    first = f"'row 2' {float(pairs[0][1])}, 'row 62' 12.5"
    assert results["contradicting_labels"] == {"proteins": 1, "first": first}


def test_bf16_losses_are_close_to_those_of_fp32(untrained, table):
    losses = []
    for bf16 in (False, True):
        tuning = tuning_of(untrained, table["letters"], bf16=bf16)
        losses.append([tuning.step(batch) for batch in tuning.batches(0)])
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], abs=0.01)
    assert losses[0][0] - losses[0][-1] > 0.03


def test_stopped_run_resumes_bit_for_bit(untrained, table, tmp_path):
    """With LoRA and dropout, stopped after each of its first steps."""
    whole = tuning_of(untrained, table["protein"], dropout=0.3, epochs=2, batch_size=16)
    assert whole.run(tmp_path / "whole.pt")
    saved, stops = tmp_path / "state.pt", 0
    while True:
        resumed = tuning_of(untrained, table["protein"], dropout=0.3, epochs=2, batch_size=16)
        if saved.exists():
            resumed.load(saved)
        if resumed.run(saved, lambda: True):
            break
        stops += 1
    assert stops == 2 * whole.steps_per_epoch
    assert resumed.progress == whole.progress
    for name, weights in whole.weights().items():
        assert torch.equal(resumed.weights()[name], weights)


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
def test_killed_run_resumes_bit_for_bit(untrained, table, tmp_path, full):
    asked = {"full": full, "num_train_epochs": 2, "save_steps": 1, "batch_size": 4}
    call(FINETUNE, *flags_of(untrained, table["letters"], tmp_path / "whole", **asked))
    words = flags_of(untrained, table["letters"], tmp_path / "killed", **asked)
    job = Script("finetune.py", *words)
    wait_until(lambda: (tmp_path / "killed" / "state.pt").exists() or job.poll() is not None)
    job.process.kill()
    job.process.join()
    assert not (tmp_path / "killed" / "model").exists()
    again = run_script("finetune.py", *words)
    assert again.returncode == 0, again.stderr
    assert "Resuming in epoch" in again.stderr
    weights = "model.safetensors" if full else "adapter_model.safetensors"
    for name in (f"model/{weights}", "predictions.csv", "results.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    if not full:
        return
    model = EsmForTokenClassification.from_pretrained(tmp_path / "killed" / "model")
    assert model.config.id2label == {0: "C", 1: "H"}
    assert not (tmp_path / "killed" / "state.pt").exists()
    assert "nothing to do" in run_script("finetune.py", *words).stderr
    other = run_script("finetune.py", *words, "--seed", 7)
    assert (other.returncode, "was made from other input or arguments" in other.stderr) == (2, True)
    (tmp_path / "killed" / "notes.txt").write_text("of the user")
    again = run_script("finetune.py", *words, "--seed", 7, "--overwrite")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "killed" / "notes.txt").exists()
    assert (tmp_path / "killed" / "results.json").read_bytes() != (tmp_path / "whole" / "results.json").read_bytes()


def test_finetune_takes_the_output_of_a_version_without_manifests(untrained, table, tmp_path, caplog):
    words = flags_of(untrained, table["letters"], tmp_path / "tuned", num_train_epochs=1)
    call(FINETUNE, *words)
    made_from = json.loads((tmp_path / "tuned" / ".files.json").read_text())["made_from"]
    (tmp_path / "tuned" / ".files.json").unlink()
    (tmp_path / "tuned" / "made_from.json").write_text(json.dumps(made_from))
    caplog.set_level("INFO")
    call(FINETUNE, *words)
    assert "was made by the same command: nothing to do" in caplog.text
    with pytest.raises(UserError, match="was made from other input or arguments"):
        call(FINETUNE, *words, "--seed", 7)
    call(FINETUNE, *words, "--seed", 7, "--overwrite")
    names = {"model", "predictions.csv", "results.json", "calibration.safetensors", ".files.json"}
    assert {path.name for path in (tmp_path / "tuned").iterdir()} == names


def test_finetune_without_room_is_one_line_and_resumes(untrained, table, tmp_path):
    """`ulimit -f`, of which torch says neither the file nor the reason."""
    words = flags_of(untrained, table["letters"], tmp_path / "tuned", num_train_epochs=1, save_steps=1)
    job = Script("finetune.py", *words)
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    assert job.wait() == 2
    errors = [line for line in job.said()[1].splitlines() if "error" in line]
    assert len(errors) == 1
    assert re.fullmatch(r"error: .*/state.pt: cannot be written: .*`ulimit -f` too small: make room: .*", errors[0])
    assert "Traceback" not in job.said()[1]
    assert [path.name for path in (tmp_path / "tuned").iterdir()] == [".files.json"]
    again = run_script("finetune.py", *words)
    assert again.returncode == 0, again.stderr


def test_finetune_refuses_an_output_directory_that_holds_its_labels(untrained, table, tmp_path):
    labels = shutil.copy(table["letters"], tmp_path / "labels.csv")
    with pytest.raises(UserError, match="--dataset .*labels.csv is in there: choose another"):
        call(FINETUNE, *flags_of(untrained, labels, tmp_path, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_script_refuses_in_a_line(untrained, table, tmp_path, monkeypatch):
    def refused(**flags) -> str:
        with pytest.raises(UserError) as error:
            call(FINETUNE, *flags_of(untrained, table["protein"], tmp_path / "tuned", **flags))
        assert not (tmp_path / "tuned").exists()
        return str(error.value)

    assert "target_modules nothing: " in refused(target_modules="nothing").replace("--", "")
    assert "--lora_r and --lora_alpha: no effect, as --full" in refused(full=True, lora_r=8, lora_alpha=16)
    assert "--target_modules: no effect, as --full" in refused(full=True, target_modules="query")
    assert "--cluster_column and --cluster: give one" in refused(cluster_column="of", cluster=0.5)
    assert "no column 'tm', only 'sequence', 'label'" in refused(label_column="tm")
    assert "--validation_size and --test_size leave nothing" in refused(test_size=0.95)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).touch()
    with pytest.raises(UserError, match=r"export it first: python -m extras\.export"):
        call(FINETUNE, *flags_of(checkpoint.parent, table["protein"], tmp_path / "tuned"))
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "mine").touch()
    with pytest.raises(UserError, match="exists and is not of this script"):
        call(FINETUNE, *flags_of(untrained, table["protein"], tmp_path / "tuned", overwrite=True))
    assert (tmp_path / "tuned" / "mine").exists()
    monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"^LoRA needs peft: \./install\.sh --finetune"):
        call(FINETUNE, *flags_of(untrained, table["protein"], tmp_path / "tuned"))
