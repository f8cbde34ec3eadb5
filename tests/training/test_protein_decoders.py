"""Runs of protein decoders, from FASTA and from prepared data: exact resume, results, export, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.token_store import open_split
from common.training.protein_losses import mean_and_error
from extras.families.decoders.residues import RESIDUE_TOKENS, encode_direction, reads_residues
from tests.data_fixtures import write_fasta
from tests.decoder_fixtures import train_decoder

PROTEINS = {"tokenizer": "residues", "vocab_size": None, "max_context_width": 64}
ALL = PROTEINS | {"directions": "both", "fill_in": 0.4}
MIXTRAL = {"model_type": "mixtral", "activation_checkpointing": "none"}
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def proteins(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list(LETTERS), random.integers(5, 90))) for _ in range(count)]


@pytest.fixture(scope="module")
def fasta(tmp_path_factory) -> Path:
    """train and validation; some proteins are longer than a sequence may be."""
    directory = tmp_path_factory.mktemp("fasta")
    for number, (split, count) in enumerate((("train", 200), ("validation", 24))):
        write_fasta(directory / f"{split}.fasta", [(f"{split}{n}", p) for n, p in enumerate(proteins(count, number))])
    return directory


@pytest.fixture(scope="module")
def prepared_run(dataset, tmp_path_factory) -> Path:
    """The output directory of a run on prepared proteins, uninterrupted."""
    out = tmp_path_factory.mktemp("prepared") / "run"
    train_decoder(None, out, script="train_ddp.py", dataset_dir=dataset, do_eval=1, **ALL)
    return out


def prepared(dataset, out: Path, nproc: int, **flags) -> str:
    return train_decoder(None, out, nproc, dataset_dir=dataset, **ALL | flags)


def test_export_is_a_stock_llama_with_a_tokenizer(prepared_run):
    """Log p of proteins in both directions, from text, as stock transformers computes it of the ids by hand."""
    directory = prepared_run / "final_model"
    assert reads_residues(directory)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size == len(tokenizer) == RESIDUE_TOKENS.vocab_size
    stops = model.generation_config
    assert (stops.bos_token_id, stops.eos_token_id, stops.pad_token_id) == (1, 2, 0)
    text = {False: "1MKVLA2<eos>", True: "2ALVKM1<eos>"}
    for reverse, written in text.items():
        ids = tokenizer(written, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == encode_direction(b"MKVLA", reverse).tolist()
    made = model.generate(**tokenizer("1MK", return_tensors="pt"), max_new_tokens=5, do_sample=True)
    assert tokenizer.decode(made[0]).startswith("<bos>1MK")


def test_held_out_loss_is_stock_transformers_in_nats_a_residue(prepared_run, dataset):
    """Protein by protein, by a loop over the validation split; the unigram of the training split beside it."""
    model = AutoModelForCausalLM.from_pretrained(prepared_run / "final_model").eval()
    counts = np.ones(RESIDUE_TOKENS.vocab_size)
    for split in ("train", "validation"):
        store = open_split(dataset, split, RESIDUE_TOKENS)
        records = np.arange(len(store))[:, None]
        everything = [store.gather(n, np.array([0]), store.lengths(n))[0] for n in records]
        if split == "train":
            counts += np.bincount(np.concatenate(everything), minlength=len(counts))
    of_residues = counts[8:34] / counts[8:34].sum()
    sums, numbers, every, unigram = [], [], [], 0.0
    for ids in everything:
        if len(ids) > 64:
            continue  # cropped at random
        with torch.no_grad():
            log_p = model(torch.tensor(ids[None].astype(np.int64))).logits[0].double().log_softmax(-1)
        each = -log_p[range(len(ids) - 1), ids[1:].astype(np.int64)].numpy()
        sums.append(each[1:-2].sum())
        numbers.append(len(ids) - 4)
        every.append(each)
        unigram -= np.log(of_residues[ids[2:-2] - 8]).sum()
    assert len(sums) == len(everything), "the fixture's proteins are short"
    found = json.loads((prepared_run / "eval_results.json").read_text())
    mean, error = mean_and_error(np.array(sums), np.array(numbers))
    assert found["eval_loss_residues"] == pytest.approx(mean, rel=1e-5)
    assert found["eval_loss_residues_stderr"] == pytest.approx(error, rel=1e-4)
    assert found["eval_tokens_residues"] == sum(numbers)
    assert found["eval_loss"] == pytest.approx(np.concatenate(every).mean(), rel=1e-5)
    assert found["eval_unigram_loss_residues"] == pytest.approx(unigram / sum(numbers), rel=1e-6)
    assert found["eval_below_unigram_residues"] == pytest.approx(unigram / sum(numbers) - mean, abs=1e-5)
