"""Runs of protein decoders, from FASTA and from prepared data: exact resume, results, export, refusals."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.collators import to_device
from common.distributed.world import World
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.protein_losses import mean_and_error
from extras.families.decoders.residues import RESIDUE_TOKENS, encode_direction, reads_residues
from extras.families.text.contexts import next_token_batch
from tests.data_fixtures import load_script, write_fasta
from tests.decoder_fixtures import SIZES, decoder_flags, train_decoder, write_text
from tests.live_runs import LiveRun, assert_same_run, newest_step
from tests.training_fixtures import final_weights, losses, relative_difference, same_bits

PROTEINS = {"tokenizer": "residues", "vocab_size": None, "max_context_width": 64}
ALL = PROTEINS | {"directions": "both", "fill_in": 0.4}
MIXTRAL = {"model_type": "mixtral"}
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def proteins(count: int, longest: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list(LETTERS), random.integers(5, longest))) for _ in range(count)]


# Some for training are longer than a sequence may be.
SPLITS = {"train": proteins(200, 90, 0), "validation": proteins(24, 60, 1)}


@pytest.fixture(scope="module")
def fasta(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("fasta")
    for split, of_split in SPLITS.items():
        write_fasta(directory / f"{split}.fasta", [(f"{split}{n}", protein) for n, protein in enumerate(of_split)])
    return directory


@pytest.fixture(scope="module")
def arrow(tmp_path_factory) -> Path:
    """The same in ESM-2's ids, as step 1 writes them."""
    directory = tmp_path_factory.mktemp("arrow")
    for split, of_split in SPLITS.items():
        ids = {"input_ids": [ESM2_TOKENS.encode(protein) for protein in of_split]}
        Dataset.from_dict(ids, Features({"input_ids": List(Value("uint8"))})).save_to_disk(directory / split)
    return directory


@pytest.fixture(scope="module")
def whole_run(arrow, tmp_path_factory) -> Path:
    """The output directory of a run on prepared proteins, uninterrupted."""
    out = tmp_path_factory.mktemp("prepared") / "run"
    train_decoder(None, out, script="train_ddp.py", dataset_dir=arrow, do_eval=1, **ALL)
    return out


def test_export_is_a_stock_llama_with_a_tokenizer(whole_run):
    directory = whole_run / "final_model"
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


def test_held_out_loss_is_stock_transformers_in_nats_a_residue(whole_run):
    """Protein by protein, by a loop over the letters; the frequencies of the training split beside it."""
    model = AutoModelForCausalLM.from_pretrained(whole_run / "final_model").eval()
    letters = "".join(SPLITS["train"])
    frequency = {letter: (letters.count(letter) + 1) / (len(letters) + 26) for letter in LETTERS}
    sums, every, unigram = [], [], 0.0
    for protein in SPLITS["validation"]:
        ids = torch.from_numpy(encode_direction(protein.encode(), reverse=False).astype(np.int64))[None]
        with torch.no_grad():
            log_p = model(ids).logits[0].double().log_softmax(-1)
        each = -log_p[range(ids.shape[1] - 1), ids[0, 1:]].numpy()
        sums.append(each[1:-2].sum())
        every.append(each)
        unigram -= sum(math.log(frequency[letter]) for letter in protein)
    found = json.loads((whole_run / "eval_results.json").read_text())
    residues = [len(protein) for protein in SPLITS["validation"]]
    mean, error = mean_and_error(np.array(sums), np.array(residues))
    assert found["eval_loss_residues"] == pytest.approx(mean, rel=1e-5)
    assert found["eval_loss_residues_stderr"] == pytest.approx(error, rel=1e-4)
    assert found["eval_tokens_residues"] == sum(residues)
    assert found["eval_loss"] == pytest.approx(np.concatenate(every).mean(), rel=1e-5)
    assert found["eval_unigram_loss_residues"] == pytest.approx(unigram / sum(residues), rel=1e-9)
    assert found["eval_below_unigram_residues"] == pytest.approx(unigram / sum(residues) - mean, abs=1e-5)


def test_log_p_of_proteins_is_stock_in_both_directions(whole_run):
    """Ours, packed, against stock transformers, one after the other."""
    stock = AutoModelForCausalLM.from_pretrained(whole_run / "final_model").eval()
    words = [f"--model_name_or_path={whole_run / 'final_model'}", "--tokenizer=residues", "--dataset=x", "--bf16=0"]
    args = parse_run("", load_script("train_ddp.py").DdpFlags, words)
    ours = load_model(args, World(0, 0, 1, torch.device("cpu"))).model.eval()
    both = [encode_direction(p.encode(), reverse) for p in SPLITS["validation"] for reverse in (False, True)]
    batch = next_token_batch(np.concatenate(both), np.array([len(ids) for ids in both]))
    with torch.no_grad():
        token_losses = ours(**to_device(batch, torch.device("cpu"))).token_losses
        for ids, mine in zip(both, token_losses.split([len(ids) for ids in both]), strict=True):
            ids = torch.tensor(ids.astype(np.int64))
            theirs = torch.nn.functional.cross_entropy(stock(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            assert mine.sum().item() == pytest.approx(theirs.item(), rel=1e-5)


def test_file_and_prepared_data_are_evaluated_alike(whole_run, fasta, tmp_path):
    weights = {"model_name_or_path": whole_run / "final_model", "model_type": None, "do_train": 0, "do_eval": 1}
    train_decoder(fasta, tmp_path, **ALL | weights | dict.fromkeys(SIZES) | {"initializer_range": None})
    found = json.loads((tmp_path / "eval_results.json").read_text())
    expected = json.loads((whole_run / "eval_results.json").read_text())
    for name in ("eval_loss", "eval_loss_residues", "eval_unigram_loss_residues", "eval_tokens_residues"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_run_stopped_and_resumed_on_other_ranks_is_the_whole_run(arrow, whole_run, tmp_path, ranks):
    train_decoder(None, tmp_path, stop_at_step=3, script="train_ddp.py", dataset_dir=arrow, **ALL)
    train_decoder(None, tmp_path, ranks, script="train_fsdp2.py", dataset_dir=arrow, **ALL)
    assert losses(tmp_path) == pytest.approx(losses(whole_run), rel=1e-5)
    assert relative_difference(final_weights(tmp_path), final_weights(whole_run)) < 1e-5


def test_run_killed_and_resumed_is_bit_identical(fasta, tmp_path):
    """From FASTA, on two ranks."""
    out, flags = tmp_path / "killed", ALL | {"max_steps": 60}
    argv = decoder_flags(fasta, out, **flags)
    with LiveRun(None, out, tmp_path / "logs", 2, script="train_ddp.py", argv=argv) as run:
        run.until(lambda: newest_step(out) >= 6)
        run.signal(signal.SIGKILL)
        assert run.end() == [-signal.SIGKILL] * 2
    end = newest_step(out) + 6
    for directory in (out, tmp_path / "whole"):
        train_decoder(fasta, directory, 2, script="train_ddp.py", **flags, stop_at_step=end)
    assert_same_run(out, tmp_path / "whole", end, tmp_path)


@pytest.mark.parametrize("mixed", [False, True], ids=["clusters", "mixture"])
def test_clusters_and_mixtures_of_proteins_resume_bit_for_bit(arrow, tmp_path, mixed):
    """A member of each of 50 clusters of four an epoch, also as one of two sources."""
    clustered = tmp_path / "clustered"
    shutil.copytree(arrow, clustered)
    (clustered / "train/clusters").mkdir()
    np.save(clustered / "train/clusters/offsets.npy", np.arange(0, 201, 4, dtype=np.uint32))
    np.save(clustered / "train/clusters/members.npy", np.arange(200, dtype=np.uint32))
    source = {"dataset_mix": [f"a={arrow}:1", f"b={clustered}:1"]} if mixed else {"dataset_dir": clustered}
    flags = ALL | source | {"sample_clusters": "auto", "script": "train_ddp.py"}
    said = train_decoder(None, tmp_path / "whole", **flags)
    assert mixed or "Sampling clusters, then a member of each: 50" in said
    for stop in (2, 6):
        train_decoder(None, tmp_path / "parts", **flags, stop_at_step=stop)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_bits(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))


@pytest.mark.parametrize("family", [{}, MIXTRAL], ids=["llama", "mixtral"])
def test_ranks_that_share_packs_equal_one_process(arrow, tmp_path, family):
    """With spans, whose targets are fewer than their tokens; of Mixtral the router's loss goes with them."""
    flags = ALL | family | {"dataset_dir": arrow, "max_steps": 3, "do_eval": 1}
    train_decoder(None, tmp_path / "alone", script="train_ddp.py", **flags)
    train_decoder(None, tmp_path / "shared", 2, script="train_ddp_cp.py", **flags)
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    alone, shared = (json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("alone", "shared"))
    for name in ("eval_loss", "eval_loss_residues", "eval_loss_residues_stderr", "eval_unigram_loss_residues"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-4)
    assert relative_difference(*(final_weights(tmp_path / name) for name in ("alone", "shared"))) < 1e-5
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "shared" / "final_model")
    assert type(stock).__name__ == ("MixtralForCausalLM" if family else "LlamaForCausalLM")


def test_checkpoint_is_of_its_directions(arrow, whole_run, tmp_path):
    said = train_decoder(
        None, tmp_path, 1, 2, dataset_dir=arrow, resume_from_checkpoint=whole_run, **ALL | {"directions": "forward"}
    )
    assert "directions" in said
    assert "Traceback" not in said


MARKOV = np.array([[0.9, 0.05, 0.05], [0.1, 0.1, 0.8], [0.05, 0.9, 0.05]])


def test_decoder_reaches_the_entropy_rate_of_a_markov_source(tmp_path):
    """Nats a residue, of a chain over three letters that begins with any of them alike."""
    random, chains = np.random.default_rng(3), []
    for number in range(400):
        states = [number % 3]
        for _ in range(47):
            states.append(random.choice(3, p=MARKOV[states[-1]]))
        chains.append("".join("ACD"[state] for state in states))
    for split, part in (("train", chains[:360]), ("validation", chains[360:])):
        write_fasta(tmp_path / f"{split}.fasta", [(f"{split}{n}", chain) for n, chain in enumerate(part)])
    out = tmp_path / "run"
    flags = {"max_steps": 90, "lr": 1e-2, "packs_per_step": 2, "train_batch_size": 8, "checkpoint_freq": 1000}
    train_decoder(tmp_path, out, **PROTEINS | flags | {"do_eval": 1, "save_final_model": 0, "initializer_range": 0.02})
    rates = [-np.log(MARKOV[row]) @ MARKOV[row] for row in range(3)]
    held_out = chains[360:]
    states = [["ACD".index(letter) for letter in chain] for chain in held_out]
    exact = [math.log(3) - sum(math.log(MARKOV[a, b]) for a, b in zip(s, s[1:], strict=False)) for s in states]
    source = sum(exact) / sum(map(len, states))  # of these very chains
    stationary = np.linalg.matrix_power(MARKOV, 1000)[0]
    assert source == pytest.approx(stationary @ rates, rel=0.15)
    found = json.loads((out / "eval_results.json").read_text())
    assert found["eval_loss_residues"] == pytest.approx(source, rel=0.03)
    assert found["eval_unigram_loss_residues"] > 1.5 * source


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tokenizer": None}, "for proteins add --tokenizer residues"),
        ({"tokenizer": "bytes"}, "for proteins add --tokenizer residues"),
        ({"tokenizer": None, "directions": "both"}, "of protein decoders: add --tokenizer residues"),
        ({"vocab_size": 50}, "its 64 tokens do not fit into the model's vocabulary of 50"),
        ({"fill_in": 1.5}, "--fill_in 1.5: a fraction of the proteins, 0 to 1"),
        ({"directions": "backward"}, "--directions backward: choose forward, both"),
        ({"text_column": "x"}, "unknown flag --text_column"),
    ],
)
def test_protein_decoder_refuses_in_one_line(fasta, tmp_path, flags, said):
    printed = train_decoder(fasta, tmp_path / "out", expect=2, **PROTEINS | flags)
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_text_is_no_protein_nor_proteins_text(arrow, whole_run, tmp_path):
    text = write_text(tmp_path / "text")
    assert "error:" in (said := train_decoder(text, tmp_path / "out", expect=2, **PROTEINS))
    assert "Traceback" not in said
    said = train_decoder(None, tmp_path / "out", expect=2, dataset_dir=arrow)
    assert "Then add --tokenizer residues" in said
    continued = {"model_name_or_path": whole_run / "final_model", "model_type": None, "initializer_range": None}
    said = train_decoder(text, tmp_path / "out", expect=2, **continued | dict.fromkeys(SIZES) | {"vocab_size": None})
    assert "its 259 tokens do not fit into the model's vocabulary of 64" in said
    assert not (tmp_path / "out").exists()


def test_unknown_letters_are_counted(tmp_path):
    random = write_fasta(tmp_path / "train.fasta", [(f"p{n}", "MKVLA" * 5 + "X") for n in range(40)])
    train_decoder(random, tmp_path / "out", max_steps=1, save_final_model=0, **PROTEINS)
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_unknown_characters"] > 0
