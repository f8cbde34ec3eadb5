"""generate.py with protein decoders: samples beside transformers' probabilities, both directions, seeds, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

import generate as script
from common.cli import UserError
from extras.after.generation.fasta import STANDARD
from extras.after.inference.causal import CausalFlags, directions_of
from extras.families.decoders.residues import RESIDUE_TOKENS, write_residue_tokenizer
from tests.data_fixtures import call
from tests.extras.families.decoders.test_model import stock_model, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("decoder")
    config = tiny("llama3_2_1b", max_position_embeddings=48)
    config.vocab_size = RESIDUE_TOKENS.vocab_size
    config.bos_token_id, config.eos_token_id = RESIDUE_TOKENS.begin, RESIDUE_TOKENS.end
    stock_model(config).save_pretrained(directory)
    write_residue_tokenizer(directory)
    return directory


@pytest.fixture
def proteins(model, tmp_path):
    """Runs the script in this process and returns {header: residues}."""

    def run(*flags) -> dict[str, str]:
        output = tmp_path / "out.fasta"
        call(script, "--model_name_or_path", model, "--use_cpu", "--output", output, "--overwrite", *flags)
        lines = output.read_text().split(">")[1:]
        return {record.split("\n")[0]: "".join(record.split("\n")[1:]) for record in lines}

    return run


def test_a_direction_that_the_run_did_not_train_is_refused(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "forward")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"directions": "forward"}))
    flags = ("--model_name_or_path", copy, "--use_cpu", "--prompt", "MK", "--output", tmp_path / "out.fasta")
    with pytest.raises(UserError, match="--direction reverse: .* has read proteins forwards alone"):
        call(script, *flags, "--direction", "reverse")
    with pytest.raises(UserError, match="--directions both: .* has read proteins forwards alone"):
        directions_of(str(copy), CausalFlags(directions="both"))
    assert not (tmp_path / "out.fasta").exists()


def stock_log_probs(model: Path, text: str, ends: str) -> dict[str, np.ndarray]:
    """{residue or end: log p after each token of `text`, among the residues and the ends}, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    columns = [*tokenizer.convert_tokens_to_ids(list(STANDARD)), *tokenizer.convert_tokens_to_ids([ends, "<eos>"])]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model).eval()(**tokenizer(text, return_tensors="pt")).logits[0]
    return dict(zip([*STANDARD, ends, "<eos>"], torch.log_softmax(logits[:, columns], -1).T.numpy(), strict=True))


@pytest.mark.parametrize(("direction", "begins", "ends"), [("forward", "1", "2"), ("reverse", "2", "1")])
def test_the_score_is_that_of_transformers(proteins, model, direction, begins, ends):
    made = proteins("--prompt", "MK", "--num_samples", 6, "--direction", direction)
    for header, residues in made.items():
        read = residues if direction == "forward" else residues[::-1]
        assert residues.startswith("MK") if direction == "forward" else residues.endswith("MK")
        of = stock_log_probs(model, begins + read, ends)  # <bos>, the end that it begins at, residues
        drawn = [of[letter][n + 3] for n, letter in enumerate(read[2:])]
        score = header.split("log_p=")[1].split()[0]
        assert float(score) == pytest.approx(np.mean(drawn), abs=1e-3) if drawn else score == "nan"
        assert ("unfinished" in header) == (len(residues) == 48 - 2)
    assert len(set(made.values())) == 6


def test_the_first_residue_has_the_model_s_frequencies(proteins, model):
    made = proteins("--num_samples", 2000, "--max_new_tokens", 1)
    of = stock_log_probs(model, "1", "2")
    expected = np.exp([of[letter][1] for letter in STANDARD])  # after <bos> and 1; no end yet
    counts = np.array([list(made.values()).count(letter) for letter in STANDARD])
    assert counts.sum() == 2000
    assert chisquare(counts, 2000 * expected / expected.sum()).pvalue > 1e-5  # seeds are fixed


def test_a_sample_is_a_function_of_seed_and_number(proteins):
    flags = ("--prompt", "MKV", "--temperature", 0.9, "--top_p", 0.95)
    few = list(proteins(*flags, "--num_samples", 3).items())
    many = list(proteins(*flags, "--num_samples", 11, "--tokens_per_pack", 9).items())
    assert many[:3] == few == list(proteins(*flags, "--num_samples", 30).items())[:3]
    assert not set(proteins(*flags, "--num_samples", 3, "--seed", 1).values()) & {residues for _, residues in few}
    assert set("".join(residues for _, residues in many)) <= set(STANDARD)


def test_prompts_of_a_file(proteins, tmp_path):
    (tmp_path / "prompts.txt").write_text("mk\nWWW\n")
    made = proteins("--prompt_file", tmp_path / "prompts.txt", "--num_samples", 2, "--max_new_tokens", 5)
    assert [header.split()[0] for header in made] == [f"prompt_{p}_sample_{n}" for p in (1, 2) for n in (1, 2)]
    assert [residues[:2] for residues in made.values()] == ["MK", "MK", "WW", "WW"]


def test_what_it_refuses(proteins):
    for message, *flags in (
        ("--prompt M1: residues alone", "--prompt", "M1"),
        ("the prompt has 52 tokens, and the model reads 48", "--prompt", "M" * 50),
        ("--length: .* is a protein decoder, which takes --prompt", "--length", 9),
        ("--repetition_penalty: .* is a protein decoder", "--prompt", "MK", "--repetition_penalty", 1.2),
        ("all the same", "--temperature", 0, "--num_samples", 2),
    ):
        with pytest.raises(UserError, match=message):
            proteins(*flags)
