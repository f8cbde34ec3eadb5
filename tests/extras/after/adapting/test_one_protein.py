"""score.py --adapt: a step beside torch's own loop on the stock model, weights given back, seeds, and its tables."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import EsmForMaskedLM

import score
from common.cli import UserError
from common.models.esm2.convert import ADAPTER
from extras.after.adapting.one_protein import BATCH, AdaptFlags, adapted, masked_copies
from extras.after.inference.encoder import Encoder, EncoderFlags
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model

PROTEIN = "MKVLAGWETRDCCGHKLIVNAQFSTYPEKLMMKVLAGWETRDCCGH"
FAST = AdaptFlags(adapt=True, adapt_steps=3, adapt_rate=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def encoder_of(model: Path, **flags) -> Encoder:
    return Encoder(EncoderFlags(str(model), **flags), torch.device("cpu"))


def bits(encoder: Encoder) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in encoder.model.named_parameters()}


def test_first_step_is_that_of_torchs_loop_on_the_stock_model(model):
    """The gradient is the sum over 16 batches of 4 of their mean loss, as the method's authors add it up."""
    encoder, stock = encoder_of(model, tokens_per_pack=300), EsmForMaskedLM.from_pretrained(model).eval()
    sequences = masked_copies(encoder, PROTEIN.encode(), 0, 16, seed=3)
    assert len(sequences.ids) == 16 * BATCH
    optimizer = torch.optim.SGD(stock.parameters(), lr=1e-3)
    losses = []
    for begin in range(0, 16 * BATCH, BATCH):
        ids, labels = (
            torch.from_numpy(np.stack(each[begin : begin + BATCH]).astype(np.int64)) for each in sequences[:2]
        )
        logits = stock(ids, attention_mask=torch.ones_like(ids)).logits
        each = [F.cross_entropy(row, label) for row, label in zip(logits, labels, strict=True) if (label >= 0).any()]
        loss = torch.stack(each).sum() / BATCH
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    with adapted(encoder, PROTEIN.encode(), "one", AdaptFlags(True, 1, 1e-3, 3)) as found:
        ours = dict(ADAPTER.to_hf(bits(encoder).__getitem__, encoder.model.config))
    assert found["loss_before"] == pytest.approx(np.mean(losses), rel=1e-5)
    start = EsmForMaskedLM.from_pretrained(model).state_dict()
    trained = {name for name, weight in stock.state_dict().items() if not torch.equal(weight, start[name])}
    assert len(trained) > 30
    for name in trained & ours.keys():
        moved = stock.state_dict()[name] - start[name]
        assert (ours[name] - start[name] - moved).norm() < 1e-3 * moved.norm() + 1e-7, name


def test_masks_are_of_15_percent_and_other_ones_in_each_step(model):
    encoder = encoder_of(model, max_seq_length=32)
    first, second = (masked_copies(encoder, PROTEIN.encode() * 20, step, 16, 0) for step in (0, 1))
    assert {len(ids) for ids in first.ids} == {32}
    share = np.mean([np.count_nonzero(labels >= 0) / 30 for labels in first.labels + second.labels])
    assert 0.12 < share < 0.18
    assert not np.array_equal(np.concatenate(first.ids), np.concatenate(second.ids))
    assert len({ids.tobytes() for ids in first.labels}) > 50  # crops and masks differ


def test_loss_falls_and_the_weights_come_back(model):
    encoder = encoder_of(model)
    before = bits(encoder)
    losses = []
    for _ in range(2):
        with adapted(encoder, PROTEIN.encode(), "one", FAST) as found:
            inside = bits(encoder)
        losses.append(found)
        assert not all(torch.equal(inside[name], weight) for name, weight in before.items())
        assert all(torch.equal(weight, before[name]) for name, weight in bits(encoder).items())
        assert all(weight.grad is None for weight in encoder.model.parameters())
    assert losses[0] == losses[1]
    assert losses[0]["loss_after"] < losses[0]["loss_before"]
    with pytest.raises(KeyError), adapted(encoder, PROTEIN.encode(), "one", FAST):
        raise KeyError
    assert all(torch.equal(weight, before[name]) for name, weight in bits(encoder).items())


@pytest.fixture
def job(model, tmp_path):
    """Runs score.py --adapt on two proteins in this process; returns the rows of the table."""
    fasta, table = tmp_path / "two.fasta", tmp_path / "mutants.csv"
    write_fasta(fasta, [("one", PROTEIN), ("two", PROTEIN[:20])])
    table.write_text("protein,mutant\ntwo,K2A\none,K2A\ntwo,M1G\none,V3G:L4W\n")

    def run(name: str, *flags) -> list[dict[str, str]]:
        given = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", table, "--output", tmp_path / name)
        call(score, *given, "--use_cpu", "--adapt", "--adapt_steps", "2", "--adapt_rate", "1e-3", *flags)
        with open(tmp_path / name, newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_table_has_scores_before_and_after(model, job, tmp_path, caplog):
    found = job("a.csv")
    assert list(found[0])[2:] == [
        *("masked_marginal", "wild_type_marginal", "masked_marginal_adapted", "wild_type_marginal_adapted")
    ]
    assert "can make its scores worse" in caplog.text
    call(
        score,
        *("--model_name_or_path", model, "--fasta", tmp_path / "two.fasta", "--mutations", tmp_path / "mutants.csv"),
        *("--output", tmp_path / "plain.csv", "--use_cpu"),
    )
    with open(tmp_path / "plain.csv", newline="") as file:
        plain = list(csv.DictReader(file))
    assert [{name: row[name] for name in plain[0]} for row in found] == plain
    assert all(row["masked_marginal"] != row["masked_marginal_adapted"] for row in found)
    record = json.loads((tmp_path / "a.csv.json").read_text())
    assert set(record["adapted"]) == {"one", "two"}
    assert record["made_from"]["adapt_rate"] == 1e-3

    encoder = encoder_of(model)  # the row of a protein is by the model that is adapted to it
    with adapted(encoder, PROTEIN.encode(), "one", AdaptFlags(True, 2, 1e-3)):
        ids = torch.from_numpy(encoder.alphabet.encode(PROTEIN).astype(np.int64))
        ids[2] = encoder.alphabet.mask
        ends = torch.tensor([0, len(ids)], dtype=torch.int32)
        log_p = encoder.model(ids, cu_seqlens=ends, max_seqlen=len(ids)).logits[2].log_softmax(-1)
    letters = encoder.alphabet.letters
    expected = (log_p[letters.index("A")] - log_p[letters.index("K")]).item()
    assert float(found[1]["masked_marginal_adapted"]) == pytest.approx(expected, abs=1e-4)


def test_same_command_gives_the_same_bits_and_another_seed_others(job, tmp_path):
    job("a.csv")
    job("b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert job("c.csv", "--adapt_seed", "1") != job("b.csv")


def test_insertions_and_matrices(model, job, tmp_path):
    (tmp_path / "mutants.csv").write_text("protein,mutant\none,K2A\ntwo,K2del\n")
    found = job("a.csv", "--one_pass")
    assert list(found[0])[2:] == [
        *("one_pass_log_likelihood", "one_pass_log_likelihood_mean"),
        *("one_pass_log_likelihood_adapted", "one_pass_log_likelihood_mean_adapted"),
    ]
    call(
        score,
        *("--model_name_or_path", model, "--fasta", tmp_path / "two.fasta", "--all_single_mutants", "--use_cpu"),
        *("--output", tmp_path / "matrices", "--one_pass", "--adapt", "--adapt_steps", "1"),
    )
    plain, after = (
        np.genfromtxt(tmp_path / "matrices" / f"two.wild_type_marginal{ending}.csv", delimiter=",", skip_header=1)
        for ending in ("", "_adapted")
    )
    assert plain.shape == after.shape
    assert np.nanmax(np.abs(plain - after)) > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--adapt_steps", "0"), "--adapt_steps 0: must be at least 1"),
        (("--adapt_rate", "-1"), "--adapt_rate -1.0: must be above 0"),
        (("--homologs", "two.fasta"), "--adapt: trains on one protein alone"),
        (("--adapt_rate", "1e9", "--adapt_steps", "5"), "give a lower --adapt_rate"),
    ],
)
def test_bad_input_is_refused_in_one_line(job, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        job("a.csv", *flags)
    assert not (tmp_path / "a.csv").exists()


def test_default_settings_are_the_papers():
    from extras.after.adapting.one_protein import OF_35M, OF_650M, STEPS

    assert (STEPS, BATCH, *OF_35M, *OF_650M) == (30, 4, 4e-4, 16, 4e-5, 4)
    with pytest.raises(UserError, match="--adapt_seed: goes with --adapt"):
        AdaptFlags(adapt_seed=1).check()
