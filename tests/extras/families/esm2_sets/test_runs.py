"""Runs of an ESM-2 that gets attention over sets: started from its weights, resumed, exported, continued."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from extras.export import choose, export
from tests.extras import encoder_runs
from tests.extras.encoder_runs import results
from tests.training_fixtures import final_weights, same_bits, train

SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=64"
ESM2 = encoder_runs.RUN | {"config_name": "facebook/esm2_t6_8M_UR50D", "config_overrides": SIZES}


@pytest.fixture(scope="module")
def esm2(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("esm2") / "run"
    train(dataset, out, do_eval=True, **ESM2)
    return out


@pytest.fixture(scope="module")
def run_flags(esm2):
    return encoder_runs.RUN | {"model_name_or_path": esm2 / "final_model", "model_type": "esm_sets"}


@pytest.fixture(scope="module")
def alone(dataset, run_flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("esm_sets") / "run"
    train(dataset, out, do_eval=True, **run_flags)
    return out


@pytest.mark.parametrize("start", ["final_model", "checkpoint-6"])
def test_esm_sets_begins_with_the_losses_of_the_esm2(dataset, esm2, tmp_path, start):
    again = {"do_train": False, "do_eval": True, "model_name_or_path": esm2 / start, "model_type": "esm_sets"}
    train(dataset, tmp_path, **again)
    assert results(tmp_path)["eval_loss"] == results(esm2)["eval_loss"]


def test_esm_sets_learns_with_what_is_added(alone):
    weights = final_weights(alone)
    added = [tensor for name, tensor in weights.items() if name.startswith("esm.encoder.set_layer")]
    assert len(added) == 10
    assert all(torch.count_nonzero(tensor) for tensor in added)


@encoder_runs.every_strategy(slow={"train_ddp.py", "train_mfsdp.py", "train_ddp_cp.py"})
def test_esm_sets_run_of_every_strategy_equals_one_process(dataset, alone, run_flags, tmp_path, script, flags):
    encoder_runs.assert_two_ranks_equal_one(dataset, alone, tmp_path, script, run_flags | flags)


def test_esm_sets_resumes_bit_identically(dataset, alone, run_flags, tmp_path):
    encoder_runs.assert_resumes(dataset, alone, tmp_path, run_flags)


def test_esm_sets_export_is_evaluated_alike_and_a_start(dataset, alone, tmp_path):
    assert json.loads((alone / "final_model" / "config.json").read_text())["model_type"] == "esm_sets"
    again = {"model_name_or_path": alone / "final_model", "do_train": False, "do_eval": True}
    train(dataset, tmp_path / "again", **again)
    assert results(tmp_path / "again")["eval_loss"] == results(alone)["eval_loss"]
    export(choose(alone / "checkpoint-6"), tmp_path / "model")
    assert same_bits(load_file(tmp_path / "model" / "model.safetensors"), final_weights(alone))


def test_esm_sets_from_random_weights(dataset, tmp_path):
    train(dataset, tmp_path, **ESM2 | {"model_type": "esm_sets", "max_steps": 2, "save_steps": 2})
    config = json.loads((tmp_path / "final_model" / "config.json").read_text())
    assert (config["model_type"], config["set_every"], config["num_hidden_layers"]) == ("esm_sets", 3, 3)


@pytest.mark.slow
def test_esm_sets_with_muon_equals_one_process(dataset, run_flags, tmp_path):
    encoder_runs.assert_muon_on_two_ranks_equals_one(dataset, tmp_path, run_flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gelu": "tanh"}, "--gelu: is of ESM-2 only, and this is ESM-2 with sets"),
        ({"backend": "hf"}, "--backend hf: is of ESM-2 only"),
        ({"backend": "te"}, "--backend te: ESM-2 with sets has torch layers only: choose auto or torch"),
        ({"fp8": True, "emulate_precision": True}, "--fp8: ESM-2 with sets"),
        ({"fp4": True, "emulate_precision": True}, "--fp4: ESM-2 with sets"),
        ({"model_type": "e1"}, "is of another family: drop one of the two"),
    ],
)
def test_esm_sets_refuses_what_it_lacks_in_one_line(dataset, run_flags, tmp_path, flags, said):
    printed = train(dataset, tmp_path / "out", expect=2, **run_flags | flags)
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
