"""ESM C in the train scripts: every strategy is the run of one process, and its export is transformers' model."""

from __future__ import annotations

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
import transformers

from tests.data_fixtures import call, load_script, proteins, write_fasta
from tests.extras import encoder_runs
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.downstream.test_mutations import write_gym
from tests.extras.after.inference.embed_fixtures import call_embed
from tests.extras.encoder_runs import results
from tests.training_fixtures import losses, train

SIZES = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=64"
RUN = encoder_runs.RUN | {"config_name": "biohub/ESMC-300M-hf", "config_overrides": SIZES}
PROTEINS = proteins(60, seed=4)
EMULATED = {"emulate_precision": True, "max_steps": 2, "save_final_model": False, "save_steps": 2}


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """One process, which also scores mutations and fits a probe at its end."""
    directory = tmp_path_factory.mktemp("esmc")
    out, table = directory / "run", write_gym(directory / "gym.csv")
    probed = [(text, share_of(text, "AILMV")) for _, text in PROTEINS]
    write_table(directory / "probe.csv", ["sequence", "label"], probed)
    train(dataset, out, do_eval=True, eval_mutations=table, eval_probe=directory / "probe.csv", **RUN)
    return out


def share_of(text: str, letters: str) -> float:
    return sum(text.count(letter) for letter in letters) / len(text)


@encoder_runs.every_strategy(slow={"train_ddp.py"})
def test_esmc_run_of_every_strategy_equals_one_process(dataset, alone, tmp_path, script, flags):
    encoder_runs.assert_two_ranks_equal_one(dataset, alone, tmp_path, script, RUN | flags)


def test_esmc_resumes_bit_identically(dataset, alone, tmp_path):
    encoder_runs.assert_resumes(dataset, alone, tmp_path, RUN)


def test_esmc_export_is_transformers_model_and_a_start(dataset, alone, tmp_path):
    model = transformers.AutoModelForMaskedLM.from_pretrained(alone / "final_model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(alone / "final_model")
    assert type(model).__name__ == "EsmcForMaskedLM"
    assert type(tokenizer).__name__ == "EsmcTokenizer"
    assert losses(alone)[0] == pytest.approx(math.log(64), rel=0.02)  # it begins by guessing among 64 rows
    encoder_runs.assert_export_is_the_model(dataset, alone, tmp_path, alone.parent / "gym.csv")


def test_esmc_probe_of_run_and_export_is_the_loops(alone, tmp_path):
    """Of a checkpoint's embeddings, which are transformers', and of the export by itself."""
    fasta = write_fasta(tmp_path / "my.fasta", PROTEINS)
    call_embed(alone / "checkpoint-6", fasta, tmp_path / "embedded")
    embedded = pq.read_table(tmp_path / "embedded" / "embeddings").to_pydict()
    stock = transformers.AutoModel.from_pretrained(alone / "final_model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(alone / "final_model")
    assert type(stock).__name__ == "EsmcModel"
    assert embedded["id"] == [name for name, _ in PROTEINS]
    with torch.no_grad():
        for (_, text), vector in zip(PROTEINS, embedded["embedding"], strict=True):
            expected = stock(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 1:-1].mean(0)
            torch.testing.assert_close(torch.tensor(vector), expected, rtol=0, atol=1e-5)
    table = [(name, share_of(text, "AILMV")) for name, text in PROTEINS]
    labels = write_table(tmp_path / "labels.csv", ["id", "label"], table)
    sources = ("--embeddings", tmp_path / "embedded"), ("--model_name_or_path", alone / "final_model")
    for number, source in enumerate(sources):
        out = tmp_path / f"probed{number}"
        call(load_script("probe.py"), *source, "--fasta", fasta, "--labels", labels, "--output_dir", out)
        after, found = json.loads((out / "results.json").read_text()), results(alone)
        for key, values in (("eval_probe_probe_", after["probe"]), ("eval_probe_probe_baseline_", after["baseline"])):
            for metric, (value, _, _) in values.items():
                assert found[key + metric] == pytest.approx(value, abs=1e-5), metric


@pytest.mark.slow
def test_esmc_resume_after_kill_is_bit_identical(dataset, tmp_path):
    encoder_runs.assert_resumes_after_kill(dataset, tmp_path, RUN)


def test_esmc_reads_files_as_they_are(tmp_path):
    """--dataset: the ids of residues are ESM-2's."""
    fasta = tmp_path / "a.fasta"
    fasta.write_text("".join(f">{n}\n{'MKTAYIAKQRQISFVKSHFSRQ' * 3}\n" for n in range(40)))
    flags = RUN | {"config_name": None, "model_type": "esmc", "max_steps": 2, "save_final_model": False}
    train(None, tmp_path / "out", dataset=fasta, **flags)
    assert len(losses(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    "flags", [pytest.param({"fp8": True}, marks=pytest.mark.slow), {"fp4": True}], ids=["fp8", "nvfp4"]
)
def test_esmc_layers_compute_in_emulated_formats(dataset, alone, tmp_path, flags):
    train(dataset, tmp_path, **RUN | EMULATED | flags)
    exact = losses(alone)[:2]
    assert losses(tmp_path) != exact
    assert losses(tmp_path) == pytest.approx(exact, rel=0.03)


@pytest.mark.slow
def test_esmc_with_muon_equals_one_process(dataset, tmp_path):
    encoder_runs.assert_muon_on_two_ranks_equals_one(dataset, tmp_path, RUN)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gelu": "tanh"}, "--gelu: is of ESM-2 only"),
        ({"backend": "hf"}, "--backend hf: is of ESM-2 only"),
        ({"backend": "te"}, "it needs an NVIDIA GPU, and this run is on a CPU"),
        ({"model_type": "esm"}, "--model_type esm: biohub/ESMC-300M-hf is of another family"),
        ({"model_type": "esmc", "config_name": "facebook/esm2_t6_8M_UR50D"}, "_8M_UR50D is of another family"),
        ({"model_type": "llama", "task": "mlm"}, "--model_type llama: is no encoder here: choose esm, esmc"),
        ({"config_overrides": "vocab_size=33"}, "vocab_size is 33, ESM C here has 64"),
        ({"eval_contacts": "here", "do_eval": True}, "--eval_contacts: ESM C has no contact head in transformers"),
    ],
)
def test_esmc_refuses_what_it_lacks_in_one_line(dataset, tmp_path, flags, said):
    printed = train(dataset, tmp_path / "out", expect=2, **RUN | flags)
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
