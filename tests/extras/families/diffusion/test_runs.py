"""Runs of masked diffusion: ranks, workers, resumes and kills change nothing; the export is stock ESM-2."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import EsmForMaskedLM

from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from extras.compare.__main__ import main as compare
from tests.extras import encoder_runs
from tests.extras.encoder_runs import results
from tests.training_fixtures import TINY_MODEL, final_weights, losses, rows, same_bits, train

PLAIN = encoder_runs.RUN | TINY_MODEL
RUN = PLAIN | {"objective": "mdlm"}
ONE_STEP = {"max_steps": 1, "save_final_model": False}


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """One process, evaluated at its end."""
    out = tmp_path_factory.mktemp("mdlm") / "run"
    said = train(dataset, out, do_eval=True, **RUN)
    assert "Token dropout: off, as --objective mdlm masks at all rates\n" in said
    assert "Held-out bound of -log p(protein): " in said
    return out


@pytest.fixture(scope="module")
def masked(dataset, tmp_path_factory):
    """The same by masked language modelling, with the bound beside its other results."""
    out = tmp_path_factory.mktemp("mlm") / "run"
    train(dataset, out, do_eval=True, eval_nelbo=True, **PLAIN)
    return out


@encoder_runs.every_strategy(slow={"train_mfsdp.py"})
def test_diffusion_run_of_every_strategy_equals_one_process(dataset, alone, tmp_path, script, flags):
    encoder_runs.assert_two_ranks_equal_one(dataset, alone, tmp_path, script, RUN | flags | {"do_eval": True})
    for name in ("eval_nelbo", "eval_nelbo_stderr", "eval_unigram_nelbo"):
        assert results(tmp_path)[name] == pytest.approx(results(alone)[name], rel=1e-5)


def test_diffusion_resumes_bit_identically_with_any_workers(dataset, alone, tmp_path):
    encoder_runs.assert_resumes(dataset, alone, tmp_path, RUN | {"dataloader_num_workers": 2})


def test_diffusion_resume_after_kill_is_bit_identical(dataset, tmp_path):
    encoder_runs.assert_resumes_after_kill(dataset, tmp_path, RUN)


def test_diffusion_export_is_stock_esm2_without_token_dropout(dataset, alone, tmp_path):
    config = json.loads((alone / "final_model" / "config.json").read_text())
    assert config["architectures"] == ["EsmForMaskedLM"]
    assert config["token_dropout"] is False
    assert "`--objective` | mdlm" in (alone / "final_model" / "README.md").read_text()
    stock = EsmForMaskedLM.from_pretrained(alone / "final_model").eval()
    assert stock.config.token_dropout is False
    ids = torch.tensor([[0, *[32] * 20, 5, 6, 7, 2]])  # 80 % <mask>, which dropout would scale
    ours = ADAPTER.model(load_config(str(alone / "final_model")))
    pieces, _ = ADAPTER.read(str(alone / "final_model"), ours.config)
    ours.load_state_dict(dict(pieces), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)
    train(dataset, tmp_path, model_name_or_path=alone / "final_model", do_train=False, do_eval=True, eval_nelbo=True)
    assert results(tmp_path)["eval_nelbo"] == pytest.approx(results(alone)["eval_nelbo"], rel=1e-6)


def test_losses_of_a_diffusion_run_begin_at_the_guess_of_random_weights(alone):
    """Its bound, too, as at first all rates are as hard; of a step with few sequences it spreads."""
    found = results(alone)
    assert losses(alone)[0] == pytest.approx(3.5, abs=0.7)
    assert 0 < found["eval_nelbo_stderr"] < 0.05
    assert found["eval_nelbo"] == pytest.approx(found["eval_loss_masked"], abs=0.1)
    assert found["eval_unigram_nelbo"] == pytest.approx(found["eval_unigram_loss_masked"], abs=0.1)


def test_masked_model_is_tuned_by_diffusion(dataset, masked, tmp_path):
    assert "eval_nelbo" in results(masked)
    said = train(dataset, tmp_path, model_name_or_path=masked / "final_model", objective="mdlm", **ONE_STEP)
    assert "these weights were trained with it: the loss is high at first" in said
    assert len(losses(tmp_path)) == 1


def test_metric_of_a_diffusion_run_is_the_bound_and_less_is_better(dataset, tmp_path):
    flags = RUN | {"do_eval": True, "eval_steps": 3, "load_best_model_at_end": True}
    train(dataset, tmp_path, **flags)
    values = {row["step"]: row["eval_nelbo"] for row in rows(tmp_path) if "eval_nelbo" in row}
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert len(values) == 2
    assert state["best_metric"] == min(values.values())


def test_another_objective_is_refused_on_resume(dataset, alone, masked, tmp_path):
    for run, other, flags in ((alone, "mlm", PLAIN), (masked, "mdlm", RUN)):
        out = shutil.copytree(run, tmp_path / other)
        said = train(dataset, out, expect=2, **flags | {"max_steps": 9})
        before = {"mlm": "mdlm", "mdlm": "mlm"}[other]
        assert f"--objective {other}: the run in {out} trains by {before}, and its losses would not compare" in said
        assert "Traceback" not in said
        assert same_bits(final_weights(out), final_weights(run))


def test_runs_of_two_objectives_are_not_compared(alone, masked, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare", str(masked), str(alone)])
    with pytest.raises(Exception, match=r"was trained by mlm, .* by mdlm: their losses do not compare"):
        compare()


def test_cosine_schedule_trains(dataset, alone, tmp_path):
    train(dataset, tmp_path, diffusion_schedule="cosine", **RUN | ONE_STEP)
    assert losses(tmp_path)[0] != losses(alone)[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"objective": "diffusion"}, "--objective diffusion: choose mlm, mdlm"),
        ({"objective": "mdlm", "mlm_probability": 0.3}, "drop mlm_probability 0.3"),
    ],
)
def test_refusals_are_one_line(dataset, tmp_path, flags, said):
    printed = train(dataset, tmp_path / "out", expect=2, **PLAIN | flags)
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
