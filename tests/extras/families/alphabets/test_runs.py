"""Runs of other alphabets: prepared, trained, stopped, resumed, exported, opened by transformers, scored."""

from __future__ import annotations

import csv
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer, EsmConfig, EsmForMaskedLM

from common.cli import UserError
from common.data.alphabet import recorded_alphabet
from common.data.token_store import TokenStore
from common.hooks import extra
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from common.models.layers.initialise import initialise
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.families.alphabets.codon import GENETIC_CODE, SENSE
from tests.data_fixtures import TOKENIZE, call, expect_error, write_fasta
from tests.extras.encoder_runs import assert_resumes, assert_resumes_after_kill, results
from tests.forked import run_script
from tests.training_fixtures import run_forked, same_bits, train

RUN = {"max_steps": 6, "packs_per_step": 2, "tokens_per_pack": 256, "save_steps": 3}
RESIDUES, STRUCTURES = "ACDEFGHIKLMNPQRSTVWY", "pynwrqhgdlvtmfsaeikc"
TOLD = 0.9 + 0.1 / 20  # of the residues in `texts_of("saprot")`, those that their structure tells
CONDITIONAL = -TOLD * math.log(TOLD) - (1 - TOLD) * math.log((1 - TOLD) / 19)  # entropy of a residue, given it
NAMES = ["saprot", "codon", "own"]
OWN = {"name": "reduced", "tokens": ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *"ACDEFGHK"], "ignore_case": False}


def texts_of(name: str, count: int = 80) -> list[tuple[str, str]]:
    """Generated records. In SaProt's, nine of ten structures tell the residue."""
    draw, records = np.random.default_rng(3), []
    for number in range(count):
        length = int(draw.integers(20, 40))
        if name == "saprot":
            residues = draw.integers(20, size=length)
            shown = np.where(draw.random(length) < 0.9, residues, draw.integers(20, size=length))
            text = "".join(RESIDUES[a] + STRUCTURES[s] for a, s in zip(residues, shown, strict=True))
        elif name == "codon":
            text = "".join(draw.choice(SENSE, length)) + "TAA"
        else:
            text = "".join(draw.choice(list("ACDEFGHK"), length))
        records.append((f"r{number}", text))
    return records


def prepare(directory: Path, name: str) -> Path:
    fasta = write_fasta(directory / f"{name}.fasta", texts_of(name))
    alphabet = name
    if name == "own":
        alphabet = directory / "own.yaml"
        alphabet.write_text(yaml.safe_dump(OWN))
    sizes = ("--validation_size", 16, "--test_size", 0, "--preprocessing_num_workers", 1)
    where = ("--source", fasta, "--output_dir", directory / name)
    call(TOKENIZE, "--alphabet", alphabet, *where, *sizes, "--count_relatives", False)
    return directory / name / "arrow"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alphabets")
    return {name: prepare(directory, name) for name in NAMES}


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        train(prepared[name], directory / name, do_eval=True, **RUN)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_alphabet_is_recorded_beside_the_splits(prepared, name):
    alphabet = recorded_alphabet(prepared[name])
    assert alphabet.name == {"own": "reduced"}.get(name, name)
    store = TokenStore(prepared[name] / "train", alphabet)
    ids, _ = store.gather(np.array([0]), np.array([0]), store.lengths(np.array([0])))
    assert alphabet.text_of(ids[1:-1]) in dict(texts_of(name)).values()
    assert ids.dtype == (np.uint16 if name == "saprot" else np.uint8)
    with pytest.raises(UserError, match=f"in the alphabet {alphabet.name}, and the model's is another one, esm2"):
        TokenStore(prepared[name] / "train", ESM2_TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_alphabet_run_resumes_bit_for_bit(prepared, runs, tmp_path, name):
    assert_resumes(prepared[name], runs / name, tmp_path / "out", RUN)


@pytest.mark.parametrize(
    "name", [name if name == "saprot" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_alphabet_resume_after_kill_is_bit_identical(prepared, tmp_path, name):
    assert_resumes_after_kill(prepared[name], tmp_path, RUN)


@pytest.mark.parametrize("name", NAMES)
def test_alphabet_export_is_opened_by_transformers(runs, name):
    directory = runs / name / "final_model"
    stock, tokenizer = EsmForMaskedLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    encoder = Encoder(EncoderFlags(str(runs / name), use_cpu=True))
    texts = [text for _, text in texts_of(name)[:3]]
    ours = encoder.logits([encoder.alphabet.encode(text) for text in texts])
    for text, logits in zip(texts, ours, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids[0].tolist() == encoder.alphabet.encode(text).tolist()
        with torch.no_grad():
            torch.testing.assert_close(stock(ids).logits[0], logits, atol=1e-5, rtol=0)


def test_probes_of_an_alphabet_are_refused(runs, tmp_path):
    """Labels and residues are counted by ESM-2's letters."""
    fasta = write_fasta(tmp_path / "my.fasta", texts_of("saprot"))
    (tmp_path / "labels.csv").write_text("id,label\n" + "".join(f"{n},1\n" for n, _ in texts_of("saprot")))
    given = ("--fasta", fasta, "--labels", tmp_path / "labels.csv", "--output_dir", tmp_path / "out")
    said = expect_error("probe.py", "--model_name_or_path", runs / "saprot", *given)
    assert "this reads proteins by ESM-2's letters alone" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["saprot", "codon"])
def test_alphabet_scores_are_sums_over_tokens_of_transformers(runs, tmp_path, name):
    text = texts_of(name)[0][1]
    width = {"saprot": 2, "codon": 3}[name]
    letter = (lambda token: token[0]) if name == "saprot" else GENETIC_CODE.get
    tokens = [text[n : n + width] for n in range(0, len(text), width)]
    fasta = write_fasta(tmp_path / "in.fasta", [("one", text)])
    mutants = [(n, mutant) for n in (2, 7) for mutant in "AW"]
    (tmp_path / "in.csv").write_text("mutant\n" + "".join(f"{letter(tokens[n])}{n + 1}{m}\n" for n, m in mutants))
    given = ("--model_name_or_path", runs / name, "--fasta", fasta, "--mutations", tmp_path / "in.csv", "--use_cpu")
    done = run_script("score.py", *given, "--output", tmp_path / "out.csv")
    assert done.returncode == 0, done.stderr
    stock = EsmForMaskedLM.from_pretrained(runs / name / "final_model").eval()
    tokenizer = AutoTokenizer.from_pretrained(runs / name / "final_model")
    letters = [letter(t) if len(t) == width else None for t in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    with open(tmp_path / "out.csv") as file:
        found = [float(row["masked_marginal"]) for row in csv.DictReader(file)]
    for (n, mutant), score in zip(mutants, found, strict=True):
        shown = tokenizer(text, return_tensors="pt").input_ids
        masked = f"#{tokens[n][1]}" if name == "saprot" else "<mask>"
        shown[0, n + 1] = tokenizer.convert_tokens_to_ids(masked)
        p = stock(shown).logits[0, n + 1].detach().double().softmax(-1).numpy()
        new, old = (sum(p[k] for k, of in enumerate(letters) if of == x) for x in (mutant, letter(tokens[n])))
        assert score == pytest.approx(math.log(new) - math.log(old), abs=1e-4)


def test_alphabet_embeddings_are_transformers(runs, tmp_path):
    text = texts_of("saprot")[1][1]
    encoder = Encoder(EncoderFlags(str(runs / "saprot"), use_cpu=True))
    (ours,) = encoder.hidden([encoder.alphabet.encode(text)])
    stock = EsmForMaskedLM.from_pretrained(runs / "saprot" / "final_model").eval()
    ids = AutoTokenizer.from_pretrained(runs / "saprot" / "final_model")(text, return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(stock.esm(ids).last_hidden_state[0], ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["saprot", "codon"])
def test_alphabet_of_files_as_they_are(prepared, tmp_path, name):
    fasta = write_fasta(tmp_path / "in.fasta", texts_of(name))
    flags = RUN | {"max_steps": 2, "eval_dataset": [str(fasta)], "dataset": fasta, "alphabet": name}
    train(None, tmp_path / "out", do_eval=True, **flags)
    found = results(tmp_path / "out")
    assert found["eval_samples"] == 80
    expected = {"saprot": CONDITIONAL, "codon": math.log(61)}[name]
    assert found["eval_unigram_loss_masked"] == pytest.approx(expected, abs=0.15)
    assert found["eval_loss_masked"] > expected


def published(directory: Path, tokens: list[str], **changed) -> Path:
    """A checkpoint as SaProt's are on the Hub: stock, with a vocab.txt."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    rotary = {"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = {"vocab_size": len(tokens), "pad_token_id": 1, "mask_token_id": 4}
    torch.manual_seed(0)
    EsmForMaskedLM(EsmConfig(**sizes, **rotary, **no_dropout, **(ids | changed))).save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(tokens))
    return directory


def saprot_tokens() -> list[str]:
    return list(extra().alphabet("saprot", "").letters)


def test_published_saprot_checkpoint_continues_and_is_exported(prepared, tmp_path):
    start = published(tmp_path / "published", saprot_tokens())
    train(prepared["saprot"], tmp_path / "out", model_name_or_path=start, config_name=None, **RUN | {"max_steps": 2})
    assert (tmp_path / "out/final_model/vocab.txt").read_text().split() == saprot_tokens()
    assert json.loads((tmp_path / "out/final_model/config.json").read_text())["vocab_size"] == 446
    train(prepared["saprot"], tmp_path / "same", model_name_or_path=start, learning_rate=0.0, **RUN | {"max_steps": 1})
    before, after = (EsmForMaskedLM.from_pretrained(path) for path in (start, tmp_path / "same/final_model"))
    assert same_bits(dict(after.named_parameters()), dict(before.named_parameters()))


def test_saprot_loss_and_gradients_equal_transformers_in_float64(tmp_path):
    directory = published(tmp_path / "published", saprot_tokens())
    stock, config = EsmForMaskedLM.from_pretrained(directory).double(), load_config(str(directory))
    model = ADAPTER.model(config)
    initialise(model, 0, 0.02)
    pieces, _ = ADAPTER.read(str(directory), config)
    with torch.no_grad():
        for name, tensor in pieces:
            dict(model.named_parameters())[name].copy_(tensor)
    model.double().train()
    draw = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(5, 446, (2, 24), generator=draw), torch.full((2, 24), -100)
    labels[:, ::5] = torch.randint(5, 425, (2, 5), generator=draw)
    ids[0, ::5] = 425 + (labels[0, ::5] - 5) % 21
    bounds = torch.tensor([0, 24, 48], dtype=torch.int32)
    out = model(ids.flatten(), cu_seqlens=bounds, max_seqlen=24, labels=labels.flatten())
    loss = stock.train()(ids, attention_mask=torch.ones_like(ids), labels=labels).loss * 10
    assert out.loss_sum.item() == pytest.approx(loss.item(), rel=1e-6)  # logits become fp32 there
    out.loss_sum.backward()
    loss.backward()
    ours = dict(ADAPTER.to_hf(lambda name: dict(model.named_parameters())[name].grad, config))
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            difference = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
            assert difference < 1e-5, name


def test_planted_structures_lower_the_loss(prepared, tmp_path):
    """A hidden residue's structure tells it in nine cases of ten: of ln 20 nats their mutual information is known."""
    flags = {"packs_per_step": 4, "tokens_per_pack": 1024, "learning_rate": 0.02, "warmup_steps": 10}
    train(prepared["saprot"], tmp_path / "out", do_eval=True, max_steps=60, save_final_model=False, **flags)
    found = results(tmp_path / "out")["eval_loss_masked"]
    assert CONDITIONAL - 0.3 < found < CONDITIONAL + 0.6


REFUSED = {
    "another vocabulary": ({}, lambda tokens: tokens[:-1], "has 445 tokens, and config.json says vocab_size 446"),
    "another mask": ({"mask_token_id": 32}, None, "<mask> is token 4, and config.json says mask_token_id 32"),
    "no mask": ({}, lambda tokens: [t.replace("<mask>", "<m>") for t in tokens], "mask: '<mask>' is not one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_checkpoint_whose_vocabulary_disagrees_is_refused(tmp_path, case):
    config, change, said = REFUSED[case]
    directory = published(tmp_path / "published", saprot_tokens(), **config)
    if change:
        (directory / "vocab.txt").write_text("\n".join(change(saprot_tokens())))
    with pytest.raises(UserError, match=said):
        load_config(str(directory))


def test_run_of_another_alphabet_is_refused_in_one_line(prepared, runs, tmp_path):
    refuse = partial(run_forked, prepared["codon"], **RUN)
    start = runs / "saprot" / "final_model"
    done = refuse(tmp_path / "start", model_name_or_path=start)
    assert done.returncode == 2
    assert "tokenised in the alphabet codon, and the model's is another one, saprot" in done.stderr
    done = refuse(tmp_path / "asked", alphabet="saprot")
    assert "tokenised in the alphabet codon, and the model's is another one, saprot" in done.stderr
    done = refuse(runs / "saprot", resume_from_checkpoint="True")
    assert done.returncode == 2
    assert "alphabet" in done.stderr.splitlines()[-1]


def test_step_1_refuses_what_does_not_fit_in_one_line(tmp_path):
    fasta = write_fasta(tmp_path / "in.fasta", [("a", "MKV"), ("b", "MKVL"), *((f"c{n}", "MKL") for n in range(9))])
    letters = write_fasta(tmp_path / "3di.fasta", [("a", "DVP"), ("b", "DVPDD")])
    step = partial(expect_error, "1.tokenize_uniref_csv.py", "--source", fasta, "--output_dir", tmp_path / "out")
    of_saprot = ("--alphabet", "saprot", "--structures")
    assert "record b has 4 residues, and its structure 5 letters" in step(*of_saprot, letters)
    assert "--structures" in step("--alphabet", "codon", "--structures", letters)
    assert "choose saprot, codon, or give a YAML file" in step("--alphabet", "dna")
    assert "record a has 1 tokens of 1 with a letter of NRY" in step("--alphabet", "codon")
    others = write_fasta(tmp_path / "others.fasta", [("x", "DVP")])
    assert "no record of the input has one of its ids" in step(*of_saprot, others)


def test_matrices_need_the_standard_residues(runs, tmp_path):
    fasta = write_fasta(tmp_path / "in.fasta", [("one", "ACDEFGHK")])
    given = ("--model_name_or_path", runs / "own", "--fasta", fasta, "--output", tmp_path / "out")
    said = expect_error("score.py", *given, "--all_single_mutants")
    assert "no I, L, M, N, P, Q, R, S, T, V, W, Y in its alphabet: score --mutations" in said
    assert not list(tmp_path.glob("out/*"))
