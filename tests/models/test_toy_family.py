"""A family needs one folder and one line of the registry: tests/models/toy_family is trained, evaluated, exported."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, List, Value
from safetensors.torch import load_file

from common.cli import UserError
from common.files.safe_files import read_json_lines
from common.flags import flag_specs
from common.hooks import FamilyLine
from common.models.esm2.family import ModelFlags
from common.models.family import FAMILIES, encoder_family, family_of
from tests.forked import run_script
from tests.models.toy_family.family import TOKENS, ToyConfig

REGISTERED = FAMILIES | {"toy": FamilyLine("tests.models.toy_family.family", about="8 tokens")}
SIZES = {"train": 64, "validation": 16, "test": 16}


def tokenise(sequence: str) -> list[int]:
    return [TOKENS.index("<cls>"), *(TOKENS.index(letter) for letter in sequence), TOKENS.index("<eos>")]


@pytest.fixture
def toy(tmp_path):
    """(a model's directory, a prepared dataset): what a user of a new family has."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(asdict(ToyConfig())))
    letters = np.random.default_rng(1).choice(list("ACGT"), size=(sum(SIZES.values()), 30), p=(0.7, 0.1, 0.1, 0.1))
    rows = iter([tokenise("".join(row)) for row in letters])
    features = Features({"input_ids": List(Value("uint8"))})
    splits = {
        name: Dataset.from_dict({"input_ids": [next(rows) for _ in range(size)]}, features)
        for name, size in SIZES.items()
    }
    DatasetDict(splits).save_to_disk(data)
    return model, data


def test_family_is_in_the_help_without_its_module(monkeypatch):
    monkeypatch.setitem(FAMILIES, "new", FamilyLine("no.such_module", "lab/New_*-hf", "New, the 5M"))
    shown = {spec.name: spec.help for spec in flag_specs(ModelFlags())}
    assert "facebook/esm2_*, lab/New_*-hf, biohub/ESMC-*-hf" in shown["config_name"]
    assert shown["model_type"].startswith("new (New, the 5M), esmc (")
    with pytest.raises(ModuleNotFoundError):
        encoder_family("lab/New_5M-hf")


def train(model, data, output, **flags):
    given = {"dataset_dir": data, "output_dir": output, "max_steps": 3, "max_seq_length": 32, "do_eval": True}
    given |= {"save_steps": 2, "logging_steps": 1, "dataloader_num_workers": 0, "disable_tqdm": True} | flags
    argv = [f"--{name}={value}" for name, value in given.items()]
    return run_script("train_ddp.py", *argv, settings={"common.models.family.FAMILIES": REGISTERED})


def test_family_trains_evaluates_exports_and_is_read_again(toy, tmp_path):
    model, data = toy
    done = train(model, data, tmp_path / "out", config_name=model)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_json_lines(tmp_path / "out" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert abs(rows[0]["loss"] - math.log(len(TOKENS))) < 0.1  # a uniform guess among its 8 tokens
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert 0.5 < results["eval_unigram_loss_masked"] < math.log(4)  # entropy of the skewed letters: 0.94 nats
    exported = load_file(tmp_path / "out" / "final_model" / "model.safetensors")
    assert exported["embedding.weight"].shape == (len(TOKENS), ToyConfig().hidden_size)
    again = train(None, data, tmp_path / "again", model_name_or_path=tmp_path / "out" / "final_model", do_train=False)
    assert again.returncode == 0, again.stderr
    repeated = json.loads((tmp_path / "again" / "all_results.json").read_text())
    assert repeated["eval_loss"] == results["eval_loss"]


def test_family_files_need_the_familys_own_tokeniser(toy, tmp_path):
    """--dataset is tokenised with ESM-2's alphabet."""
    fasta = tmp_path / "a.fasta"
    fasta.write_text(">a\nACGT\n")
    model, _ = toy
    argv = ("--dataset", fasta, "--config_name", model, "--output_dir", tmp_path / "out", "--max_steps", 1)
    done = run_script("train_ddp.py", *argv, settings={"common.models.family.FAMILIES": REGISTERED})
    assert done.returncode == 2
    assert "ESM-2's alphabet" in done.stderr


def test_registry_names_a_family_by_model_type(toy, monkeypatch, tmp_path):
    model, _ = toy
    esm2 = family_of("esm")
    assert encoder_family(str(model)) is esm2  # not registered: ESM-2's loader says what is wrong
    with pytest.raises(UserError, match="model_type"):
        esm2.load_config(str(model))
    monkeypatch.setitem(FAMILIES, "toy", REGISTERED["toy"])
    assert encoder_family(str(model)).load_config(str(model)) == ToyConfig()
    assert encoder_family("facebook/esm2_t6_8M_UR50D") is esm2
    assert not ModelFlags(model_type="toy").resolve().config_name  # no published size: --config_name is asked for
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="model: a decoder, where an encoder is read"):
        encoder_family(str(model))
