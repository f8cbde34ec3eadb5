"""embed.py, score.py, finetune.py and contacts.py of an ESM C, beside transformers' own."""

from __future__ import annotations

import csv
import random

import numpy as np
import pytest
import torch
import transformers

from common.models.layers.initialise import initialise
from extras.after.downstream.labels import read_examples
from extras.after.downstream.tuned_model import make_model
from extras.after.downstream.tuning_flags import TuningFlags
from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.after.inference.mutation_scores import parse_variant, score
from extras.families.esmc.config import esmc_config
from extras.families.esmc.convert import ADAPTER
from extras.families.esmc.model import EsmcForMaskedLM
from tests.data_fixtures import write_fasta
from tests.extras.after.inference.embed_fixtures import ran, refused

PROTEINS = [("a", b"MKTAYIAKQRQISFVKSHFSRQ"), ("b", b"MLKNVQVQLV")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory of an EsmcForMaskedLM whose weights are larger than at the start of training."""
    directory, config = tmp_path_factory.mktemp("esmc") / "final_model", esmc_config(2, 32, 4, 48)
    made = EsmcForMaskedLM(config)
    initialise(made, 1, 0.3)
    ADAPTER.save(ADAPTER.to_hf(made.state_dict().__getitem__, config), config, directory)
    return directory


def test_esmc_embeddings_and_scores_are_transformers(model):
    stock = transformers.AutoModelForMaskedLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoder = Encoder(EncoderFlags(str(model)), torch.device("cpu"))
    for (_, text), ours, layers in zip(
        PROTEINS, embed(encoder, PROTEINS), embed(encoder, PROTEINS, layers=(0, 1)), strict=True
    ):
        inputs = tokenizer(text.decode(), return_tensors="pt")
        with torch.no_grad():
            states = stock(**inputs, output_hidden_states=True).hidden_states
            last = stock.esmc(**inputs).last_hidden_state[0, 1:-1]
        torch.testing.assert_close(ours, last, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layers, torch.cat(states[:2], -1)[0, 1:-1], rtol=1e-4, atol=1e-5)
    text = PROTEINS[0][1]
    for masked in (True, False):
        found = score(encoder, [parse_variant("T3W", text, "here")], masked)
        inputs = tokenizer(text.decode(), return_tensors="pt")
        if masked:
            inputs["input_ids"][0, 3] = tokenizer.mask_token_id
        with torch.no_grad():
            log_p = stock(**inputs).logits[0, 3].log_softmax(-1)
        mutant, wild = tokenizer.convert_tokens_to_ids(["W", "T"])
        assert found[0] == pytest.approx((log_p[mutant] - log_p[wild]).item(), abs=1e-4)


def write_table(path, kind):
    generator = random.Random(3)
    with path.open("w", newline="") as file:
        rows = [("sequence", "label")]
        for _ in range(40):
            sequence = "M" + "".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=generator.randint(8, 20)))
            aliphatic = [residue in "AILMV" for residue in sequence]
            rows.append(
                (sequence, "".join("ca"[a] for a in aliphatic) if kind == "residue" else f"{np.mean(aliphatic)}")
            )
        csv.writer(file).writerows(rows)
    return path


@pytest.mark.parametrize("kind", [pytest.param("protein", marks=pytest.mark.slow), "residue"])
def test_esmc_is_fine_tuned_to_a_stock_model(model, tmp_path, kind):
    table, out = write_table(tmp_path / "labels.csv", kind), tmp_path / "tuned"
    words = ("--model_name_or_path", model, "--dataset", table, "--output_dir", out, "--use_cpu")
    ran("finetune.py", *words, "--full", "--num_train_epochs", 1)
    name = f"EsmcFor{'Token' if kind == 'residue' else 'Sequence'}Classification"
    tuned = getattr(transformers, name).from_pretrained(out / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    assert name in (out / "model" / "README.md").read_text()
    with table.open() as file:
        sequence = {f"row {n}": row["sequence"] for n, row in enumerate(csv.DictReader(file), 2)}
    with (out / "predictions.csv").open() as file:
        row = next(csv.DictReader(file))
    with torch.no_grad():
        logits = tuned(**tokenizer(sequence[row["protein"]], return_tensors="pt")).logits[0]
    if kind == "protein":
        assert float(row["prediction"]) == pytest.approx(logits.item(), rel=1e-4)
    else:
        assert row["prediction"] == tuned.config.id2label[logits[int(row["residue"])].argmax().item()]
    fasta = write_fasta(tmp_path / "one.fasta", [("one", sequence[row["protein"]])])
    ran(
        "predict.py",
        "--model",
        out,
        "--fasta",
        fasta,
        "--output_dir",
        tmp_path / "new",
        "--coverage",
        0.5,
        "--use_cpu",
    )
    with (tmp_path / "new" / "predictions" / "predictions.csv").open() as file:
        again = list(csv.DictReader(file))[int(row["residue"] or 1) - 1]["prediction"]
    assert again == row["prediction"] if kind == "residue" else float(again) == pytest.approx(logits.item(), rel=1e-3)


def test_esmc_gets_lora_on_queries_keys_and_values(model, tmp_path):
    pytest.importorskip("peft", reason="./install.sh --finetune")
    table = write_table(tmp_path / "labels.csv", "protein")
    task, _ = read_examples(str(table))
    made = make_model(TuningFlags(str(model), str(table), "unused"), task)
    adapted = {name.split(".self_attn.")[1].split(".")[0] for name, _ in made.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj"}


def test_esmc_has_no_contact_head(model, tmp_path):
    words = ("--model_name_or_path", model, "--structures", tmp_path, "--output_dir", tmp_path / "out")
    assert "only ESM-2 has a contact head in transformers" in refused("contacts.py", *words)
