"""README.md of an export: what it says of the contact head and of the training, and what it never repeats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import AutoTokenizer, EsmForMaskedLM

from common.models.esm2.alphabet import ESM2_TOKENS, encode
from common.models.esm2.config import esm2_config
from common.models.esm2.convert import ADAPTER, KEPT, NOT_FITTED
from common.models.esm2.model import build_model
from common.models.layers.initialise import count_parameters
from common.models.layers.model_card import Training
from common.software import commit
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.family import FAMILY as DECODERS
from extras.families.decoders.model import DecoderForCausalLM
from extras.families.text.tokenizers import ByteTokenizer
from tests.models.reference import reference_model

CONFIG = esm2_config(2, 32, 4)
FRONT = {
    "license": "unknown",
    "library_name": "transformers",
    "pipeline_tag": "fill-mask",
    "tags": ["esm", "protein"],
}
STATE = {"step": 1200, "tokens": 34567, "data": {"dataset": "ab" * 8}, "arguments": {"model_name_or_path": None}}


def saved(directory: Path, extras: dict | None = None, state: dict = STATE) -> str:
    """The card of a small model written there."""
    weights = build_model(CONFIG, seed=1).state_dict()
    pieces = ADAPTER.to_hf(weights.__getitem__, CONFIG, extras)
    ADAPTER.save(pieces, CONFIG, directory, Training.of_state(state))
    return (directory / "README.md").read_text()


def front_matter(card: str) -> dict:
    opening, front, _ = card.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(front)


@torch.no_grad()
def contacts(directory: Path, attention: str = "eager") -> torch.Tensor:
    """transformers' probabilities for a short protein."""
    model = EsmForMaskedLM.from_pretrained(directory, attn_implementation=attention).eval()
    ids = AutoTokenizer.from_pretrained(directory)("MKVLAGTYRRWCDE", return_tensors="pt")["input_ids"]
    return model.predict_contacts(ids, torch.ones_like(ids))


def test_card_says_contact_head_is_not_fitted(tmp_path, caplog):
    caplog.set_level("INFO")
    card = saved(tmp_path / "model")
    assert (contacts(tmp_path / "model") == 0.5).all()
    with pytest.raises(RuntimeError, match="non-empty TensorList"):  # what the card's advice avoids
        contacts(tmp_path / "model", "sdpa")
    assert NOT_FITTED[1:] in card
    assert KEPT[1:] not in card
    assert f"model: {NOT_FITTED}" in caplog.text
    # A run that starts from such an export has a head of zeros among its extras: it is still not fitted.
    _, extras = ADAPTER.read(str(tmp_path / "model"), CONFIG)
    assert NOT_FITTED[1:] in saved(tmp_path / "again", extras)


def test_card_says_contact_head_is_of_initial_weights(tmp_path, caplog):
    caplog.set_level("INFO")
    reference_model(CONFIG, seed=3).save_pretrained(tmp_path / "hub")
    _, extras = ADAPTER.read(str(tmp_path / "hub"), CONFIG)
    card = saved(tmp_path / "model", extras)
    assert (contacts(tmp_path / "model") != 0.5).any()
    assert KEPT[1:] in card
    assert NOT_FITTED[1:] not in card
    assert f"model: {KEPT}" in caplog.text


def test_export_opens_as_the_pipeline_of_its_card(tmp_path):
    """`fill-mask`: the residues and their probabilities are those of the model's logits."""
    saved(tmp_path)
    fill = transformers.pipeline(
        front_matter((tmp_path / "README.md").read_text())["pipeline_tag"], model=str(tmp_path)
    )
    found = fill("MKVL<mask>GTY", top_k=33)
    ids = torch.tensor([encode("MKVLAGTY").tolist()])
    ids[0, 5] = ESM2_TOKENS.mask
    with torch.no_grad():
        expected = EsmForMaskedLM.from_pretrained(tmp_path).eval()(ids).logits[0, 5].softmax(0)
    assert {each["token"] for each in found} == set(range(33))
    for each in found:
        assert each["score"] == pytest.approx(expected[each["token"]].item(), rel=1e-4)


def test_card_describes_model(tmp_path):
    card = saved(tmp_path / "model")
    assert front_matter(card) == FRONT
    parameters = f"{count_parameters(build_model(CONFIG, seed=1)):,}"
    for name, value in (
        *(("layers", "2"), ("hidden size", "32"), ("attention heads", "4"), ("parameters", parameters)),
        *(("training steps", "1,200"), ("training tokens", "34,567"), ("started from", "random weights")),
        ("training data (hash)", f"`{'ab' * 8}`"),
    ):
        assert f"| {name} | {value} |\n" in card
    name = "facebook/esm2_t6_8M_UR50D"
    card = saved(tmp_path / "other", state=STATE | {"arguments": {"model_name_or_path": name}})
    assert front_matter(card) == FRONT | {"base_model": name}
    assert f"| started from | {name} |\n" in card


@pytest.mark.parametrize("start", ["/home/me/secret/model", "a\n---\nlicense: evil", "me/x](http://evil) `", "../x"])
def test_card_omits_paths_of_the_user(tmp_path, start):
    card = saved(tmp_path / "model", state=STATE | {"arguments": {"model_name_or_path": start}})
    assert card == saved(tmp_path / "same", state=STATE | {"arguments": {"model_name_or_path": "out/final_model"}})
    assert front_matter(card) == FRONT
    assert "| started from | other weights |\n" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("value", [None, "1\n---\n", [], {}, -1, True, 1.5, ["evil"], {"dataset": "evil`"}])
def test_card_omits_state_of_wrong_type(tmp_path, value):
    """trainer_state.json comes with a checkpoint, which is data."""
    card = saved(tmp_path / "model", state=dict.fromkeys(STATE, value))
    assert card == saved(tmp_path / "same", state={})
    assert front_matter(card) == FRONT
    assert Training.of_state(value) == Training()


def test_card_has_results_and_flags(tmp_path):
    results = {
        "eval_loss": 2.4,
        "eval_loss_masked": 2.5,
        "eval_unigram_loss_masked": 2.8,
        "eval_below_unigram_masked": 0.3,
        "eval_below_unigram_masked_stderr": 0.01,
        "eval_below_neighbours_masked": 0.1,
    }
    results |= {"test_loss": 2.6, "test_perplexity": 13.46, "eval_contacts_long_p_at_l": 0.25, "eval_runtime": 3.0}
    results |= {"eval_probe_|x|": 1.0, "test_accuracy": float("nan"), "eval_accuracy": "0.1\n---"}
    flags = {"model_name_or_path": None, "learning_rate": 4e-4, "optim": "muon", "bf16": True, "seed": "1 | 2"}
    training = replace(Training.of_state(STATE | {"arguments": flags}), results=results)
    weights = build_model(CONFIG, seed=1).state_dict()
    ADAPTER.save(ADAPTER.to_hf(weights.__getitem__, CONFIG), CONFIG, tmp_path / "model", training)
    card = (tmp_path / "model" / "README.md").read_text()
    for line in (
        "| validation, hidden residues: loss | 2.5000 nats (residue frequencies alone: 2.8000) |",
        "| validation, hidden residues: loss below that of residue frequencies | 0.3000 ± 0.0100 nats |",
        "| validation, hidden residues: loss below that of residue neighbours | 0.1000 nats |",
        "| validation, all selected residues, as published losses count them: loss | 2.4000 nats |",
        "| test loss | 2.6000 nats |",
        "| contacts: long_p_at_l | 0.2500 |",
        "| `--learning_rate` | 0.0004 |",
        "| `--optim` | muon |",
    ):
        assert f"{line}\n" in card
    for absent in ("runtime", "probe", "test accuracy", "validation accuracy", "--seed"):
        assert absent not in card
    (measured,) = front_matter(card)["model-index"]
    assert [metric["value"] for metric in measured["results"][0]["metrics"]] == [2.6, 13.46]


def test_card_names_the_commit(tmp_path):
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit(tmp_path) is None
    (tmp_path / ".git" / "packed-refs").write_text(f"# pack-refs\n{'ab' * 20} refs/heads/main\n")
    assert commit(tmp_path) == "ab" * 20
    (tmp_path / ".git" / "refs" / "heads" / "main").write_text(f"{'cd' * 20}\n")
    assert commit(tmp_path) == "cd" * 20
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".git").write_text(f"gitdir: {tmp_path}/.git/worktrees/tree\n")
    (tmp_path / ".git" / "worktrees" / "tree").mkdir(parents=True)
    (tmp_path / ".git" / "worktrees" / "tree" / "HEAD").write_text(f"{'ef' * 20}\n")
    assert commit(tmp_path / "tree") == "ef" * 20
    assert commit(tmp_path / "nowhere") is None


def test_card_of_a_decoder(tmp_path):
    config = DecoderConfig(
        vocab_size=272, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    model = DecoderForCausalLM(config)
    pieces = DECODERS.adapter.to_hf(model.state_dict().__getitem__, config)
    DECODERS.adapter.save(pieces, config, tmp_path / "model", Training.of_state(STATE), ByteTokenizer())
    card = (tmp_path / "model" / "README.md").read_text()
    assert front_matter(card) == {
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama"],
    }
    parameters = 2 * 272 * 48 + 48 + 2 * (2 * 48 + 4 * 48 * 48 + 3 * 48 * 80)
    assert f"| parameters | {parameters:,} |\n" in card
    assert "| training steps | 1,200 |\n" in card
    assert "LlamaForCausalLM.from_pretrained(" in card
    assert "ontact" not in card
