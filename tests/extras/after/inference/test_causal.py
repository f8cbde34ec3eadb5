"""Likelihoods of score.py under a protein decoder against stock transformers, a protein at a time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import score as script
from common.cli import UserError
from extras.after.inference.causal import Causal
from extras.after.inference.encoder import EncoderFlags
from extras.after.inference.mutation_scores import RESIDUES
from extras.families.decoders.residues import write_residue_tokenizer
from tests.data_fixtures import call, write_fasta

WILD = "MKVLAGTWYE"
TOKENS = ["<pad>", "<bos>", "<eos>", "<bos_glm>", "<eos_span>", "?", "1", "2", *(chr(n) for n in range(65, 91))]
TABLE = f"""mutated_sequence,DMS_score
MKVLAGTWE,0.5
MKVLLLAGTWYE,-1.5
{WILD},1.1
MKVLAGTWYW,0.1
MAGTWYE,
"""


def make_decoder(directory: Path, **config) -> Path:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes | config)).save_pretrained(directory)
    write_residue_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """As a run with --directions both exports it."""
    return make_decoder(tmp_path_factory.mktemp("decoder"), directions="both")


@pytest.fixture
def job(model, tmp_path):
    """Runs score.py in this process; `table` is the CSV's text, None for --all_single_mutants."""
    write_fasta(tmp_path / "my.fasta", [("one", WILD)])

    def run(table: str | None, *flags, output: str = "scored.csv", model: Path = model) -> list[dict]:
        files = ["--fasta", tmp_path / "my.fasta", "--output", tmp_path / output]
        files += ["--all_single_mutants"] if table is None else ["--sequences", tmp_path / "indels.csv"]
        (tmp_path / "indels.csv").write_text(table or "")
        call(script, "--model_name_or_path", model, *files, "--use_cpu", *flags)
        if table is None:
            return []
        with open(tmp_path / output, newline="") as file:
            return list(csv.DictReader(file))

    return run


@torch.no_grad()
def stock_rows(model: Path, text: str, reverse: bool) -> np.ndarray:
    """log p of each token after the first two, by transformers: of the residues in reading order, then of the ends."""
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    words = ["<bos>", *(["2", *reversed(text), "1"] if reverse else ["1", *text, "2"]), "<eos>"]
    ids = torch.tensor([[TOKENS.index(word) for word in words]])
    log_p = network(ids).logits[0].double().log_softmax(-1)
    return np.array([float(log_p[at - 1, ids[0, at]]) for at in range(2, len(words))])


def stock_sum_and_mean(model: Path, text: str, directions=(False, True), ends: int = 0) -> tuple[float, float]:
    counted = [stock_rows(model, text, reverse)[: len(text) + ends] for reverse in directions]
    return float(np.mean([each.sum() for each in counted])), float(np.mean([each.mean() for each in counted]))


def test_residues_equal_transformers_in_both_directions(model):
    """Packs of several proteins; the rows are in the protein's order, whatever the direction."""
    proteins = [WILD, "MK", "W", "ACDEFGHIKLMNPQRSTVWYBZXUO", "MKVLAGTWYEMKVLAGTWYE"]
    flags = EncoderFlags(str(model), tokens_per_pack=30, use_cpu=True)
    done: list[int] = []
    found = list(Causal(flags, "both", ends=True).log_likelihoods([text.encode() for text in proteins], done.append))
    assert sum(done) == 2 * sum(len(text) + 4 for text in proteins)
    for text, row in zip(proteins, found, strict=True):
        forward, backward = (stock_rows(model, text, reverse) for reverse in (False, True))
        backward[: len(text)] = backward[: len(text)][::-1]
        assert row == pytest.approx((forward + backward) / 2, abs=1e-5)
    (alone,) = Causal(flags, "forward").log_likelihoods([WILD.encode()])
    assert alone == pytest.approx(stock_rows(model, WILD, False)[:-2], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "directions", "ends"),
    [([], (False, True), 0), (["--directions", "forward"], (False,), 0), (["--count_ends"], (False, True), 2)],
)
def test_scores_of_indels_equal_transformers(model, job, tmp_path, flags, directions, ends):
    scored = job(TABLE, *flags)
    wild = stock_sum_and_mean(model, WILD, directions, ends)
    for row in scored:
        mutant = stock_sum_and_mean(model, row["mutated_sequence"], directions, ends)
        found = float(row["log_likelihood"]), float(row["log_likelihood_mean"])
        assert found == pytest.approx(np.subtract(mutant, wild), abs=2e-5)
    assert list(scored[0]) == ["mutated_sequence", "DMS_score", "log_likelihood", "log_likelihood_mean"]
    found = json.loads((tmp_path / "scored.csv.json").read_text())["correlations"]["proteins"]["one"]
    pairs = [(float(row["log_likelihood"]), float(row["DMS_score"])) for row in scored[:4]]
    assert found["log_likelihood"]["spearman"] == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)


def test_substitutions_and_all_single_mutants_agree(model, job, tmp_path):
    (row,) = job("mutant\nA5W\n")
    expected = np.subtract(stock_sum_and_mean(model, "MKVLWGTWYE"), stock_sum_and_mean(model, WILD))
    assert (float(row["log_likelihood"]), float(row["log_likelihood_mean"])) == pytest.approx(expected, abs=2e-5)
    job(None, output="matrices")
    with open(tmp_path / "matrices" / "one.log_likelihood.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(WILD)
    assert float(table[4]["W"]) == pytest.approx(float(row["log_likelihood"]), abs=1e-5)
    assert all(float(each[letter]) == 0 for each, letter in zip(table, WILD, strict=True))
    assert set(RESIDUES) <= set(table[0])


def test_a_finished_output_is_kept_and_other_directions_are_other_scores(job, tmp_path, caplog):
    caplog.set_level("INFO")
    job(TABLE)
    job(TABLE)
    assert "nothing to do" in caplog.text
    for flags in (["--directions", "forward"], ["--count_ends"]):
        with pytest.raises(UserError, match="was made from other input or arguments"):
            job(TABLE, *flags)


def test_a_sequence_longer_than_the_context_is_refused(job, tmp_path):
    """Before anything is computed: an insertion makes it too long."""
    longest = "A" * 60
    write_fasta(tmp_path / "my.fasta", [("one", longest)])
    assert len(job(f"mutated_sequence\n{longest}\n")) == 1
    (tmp_path / "scored.csv").unlink()
    with pytest.raises(UserError, match=r"^AAAAAAAAAAAAAAAAAAAA\.\.\.: 61 residues, and the model reads 60"):
        job(f"mutated_sequence\n{longest[1:]}\n{longest}A\n")
    assert not (tmp_path / "scored.csv").exists()


def test_the_trained_context_counts_where_a_run_recorded_it(tmp_path):
    flags = EncoderFlags(str(make_decoder(tmp_path / "short", trained_context=16)), use_cpu=True)
    with pytest.raises(UserError, match="13 residues, and the model reads 12"):
        Causal(flags, "forward").log_likelihoods([b"M" * 13])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max_seq_length", 100], "--max_seq_length: is of encoders"),
        (["--one_pass"], "--wild_type_marginal_only: is of encoders"),
        (["--homologs", "my.fasta"], "--homologs: is of encoders"),
        (["--directions", "backward"], "--directions backward"),
    ],
)
def test_flags_that_a_decoder_has_not_are_refused(job, tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        job(TABLE, *flags)
    assert not list(tmp_path.glob("scored*"))


def test_decoders_that_cannot_score_are_refused(model, job, tmp_path):
    text = make_decoder(tmp_path / "text")
    (text / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="a decoder whose tokenizer is not of residues"):
        job(TABLE, model=text)
    broken = make_decoder(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="NaN or infinity"):
        job(TABLE, model=broken)
    assert not list(tmp_path.glob("scored*"))
