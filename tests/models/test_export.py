"""What leaves for transformers and what comes from it: final_model/, Hub checkpoints, --model_name_or_path."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, EsmForMaskedLM, EsmModel

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from common.models.esm2.config import esm2_config, load_config
from common.models.esm2.convert import ADAPTER, NOT_FITTED
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from tests.models.reference import reference_model
from tests.training_fixtures import (
    checkpoint_state,
    final_weights,
    losses,
    run_forked,
    same_bits,
    train,
)

# UniProt P42212, the example of the guide "esm2_native_te"
GFP = (
    "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTL"
    "VTTFSYGVQCFSRYPDHMKQHDFFKSAMPEGYVQERTIFFKDDGNYKTRAEVKFEGDTLV"
    "NRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNGIKVNFKIRHNIEDGSVQLAD"
    "HYQQNTPIGDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTAAGITHGMDELYK"
)


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A finished run of 5 steps."""
    output_dir = tmp_path_factory.mktemp("run")
    train(dataset, output_dir, max_steps=5)
    return output_dir


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A checkpoint like the Hub's: every parameter random, contact head included, in several shards."""
    directory = tmp_path_factory.mktemp("hub")
    model = reference_model(esm2_config(2, 64, 4), seed=11)
    model.save_pretrained(directory, max_shard_size="100KB")
    AutoTokenizer.from_pretrained(_tokenizer(directory)).save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def _tokenizer(directory):
    ADAPTER.write_tokenizer(directory)
    return directory


def ours(directory) -> Esm2ForMaskedLM:
    config = load_config(str(directory))
    model = Esm2ForMaskedLM(config)
    pieces, model.extras = ADAPTER.read(str(directory), config)
    model.load_state_dict(dict(pieces))
    return model.eval()


def test_export_opens_without_warnings(run, caplog, monkeypatch):
    directory = run / "final_model"
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for kind, unused in ((EsmForMaskedLM, ()), (AutoModelForMaskedLM, ()), (AutoModel, ("lm_head.",))):
        caplog.clear()
        options = {"add_pooling_layer": False} if kind is AutoModel else {}
        model, report = kind.from_pretrained(directory, output_loading_info=True, **options)
        assert not report["missing_keys"]
        assert not report["mismatched_keys"]
        assert all(key.startswith(unused) for key in report["unexpected_keys"]), report
        if kind is not AutoModel:  # whose report names the LM head it has no use for
            assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert AutoConfig.from_pretrained(directory).architectures == ["EsmForMaskedLM"]


def test_export_logits_equal_transformers(run):
    directory = run / "final_model"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer([GFP, GFP[:50] + "<mask>" + GFP[51:120]], return_tensors="pt", padding=True)
    assert inputs["input_ids"].shape == (2, len(GFP) + 2)
    assert tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[:3] == ["<cls>", "M", "S"]
    assert tokenizer.mask_token_id == inputs["input_ids"][1, 51] == 32
    with torch.no_grad():
        theirs = EsmForMaskedLM.from_pretrained(directory).eval()(**inputs).logits
        logits = ours(directory)(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    keep = inputs["attention_mask"].bool()
    assert logits.shape == theirs.shape == (2, len(GFP) + 2, 33)
    # fp32 sums in another order: measured 4e-7 of the range; the bound is 1e-5.
    spread = (theirs[keep].max() - theirs[keep].min()).item()
    assert (logits[keep] - theirs[keep]).abs().max().item() < 1e-5 * spread


def test_export_equals_last_checkpoint(run, tmp_path):
    trained = checkpoint_state(run / "checkpoint-5", tmp_path)["model"]
    config = load_config(str(run / "final_model"))
    exported = {k: v for k, v in final_weights(run).items() if not k.endswith("inv_freq")}
    assert same_bits(exported, dict(ADAPTER.to_hf(trained.__getitem__, config)))
    untrained = dict(ADAPTER.to_hf(build_model(config, seed=42).state_dict().__getitem__, config))
    for name, tensor in exported.items():
        assert torch.equal(untrained[name], tensor) == ("contact_head" in name or "position_embeddings" in name), name


def test_export_card_says_contact_head_is_not_fitted(run):
    card = (run / "final_model" / "README.md").read_text()
    assert NOT_FITTED[1:] in card
    assert "| training steps | 5 |\n" in card


def test_export_tokenizer_equals_esm2s(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "final_model")
    assert tokenizer.convert_ids_to_tokens(range(33)) == list(TOKENS)
    names = ("cls", "pad", "eos", "unk", "mask")
    assert [getattr(tokenizer, f"{n}_token_id") for n in names] == [0, 1, 2, 3, 32]


def test_export_round_trip_keeps_hub_bits(dataset, hub, tmp_path):
    """Contact head included. --save_final_model exports without training; by default only a finished run does."""
    train(dataset, tmp_path, model_name_or_path=hub, do_train=False, save_final_model=True)
    directories = (hub, tmp_path / "final_model")  # eager: the contact head reads the attention weights
    reference, exported = (EsmForMaskedLM.from_pretrained(d, attn_implementation="eager") for d in directories)
    assert reference.esm.contact_head.regression.weight.abs().sum() > 0
    assert same_bits(exported.state_dict(), reference.state_dict())
    ids = AutoTokenizer.from_pretrained(tmp_path / "final_model")(GFP[:60], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        contacts = [m.eval().predict_contacts(ids, torch.ones_like(ids)) for m in (reference, exported)]
    assert torch.equal(*contacts)


def test_pretrained_run_keeps_contact_head(dataset, hub, tmp_path):
    train(dataset, tmp_path, model_name_or_path=hub, max_steps=2)
    before, after = (EsmForMaskedLM.from_pretrained(d).state_dict() for d in (hub, tmp_path / "final_model"))
    for name in before:
        unchanged = torch.equal(before[name], after[name])
        assert unchanged == ("contact_head" in name or "inv_freq" in name or "position_ids" in name), name


def test_pretrained_run_starts_from_export(dataset, run, tmp_path):
    train(dataset, tmp_path, model_name_or_path=run / "final_model", max_steps=3, do_eval=True, eval_on_start=True)
    train(dataset, tmp_path / "evaluated", model_name_or_path=run / "final_model", do_train=False, do_eval=True)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    evaluated = json.loads((tmp_path / "evaluated" / "eval_results.json").read_text())
    assert first["eval_loss"] == evaluated["eval_loss"]
    assert losses(tmp_path)[0] < losses(run)[0] - 0.05, "the weights of the first run are not where this one starts"


def test_export_of_unfinished_run_needs_flag(dataset, tmp_path):
    train(dataset, tmp_path, max_steps=4, stop_at_step=1)
    assert not (tmp_path / "final_model").exists()
    train(dataset, tmp_path, max_steps=4, stop_at_step=2, save_final_model=True)
    stopped = final_weights(tmp_path)
    train(dataset, tmp_path, max_steps=4, save_final_model=False)
    assert same_bits(final_weights(tmp_path), stopped)
    train(dataset, tmp_path, max_steps=4)  # nothing left to train: the same command exports the weights
    assert not same_bits(final_weights(tmp_path), stopped)


def test_evaluation_alone_changes_no_run(dataset, run, tmp_path):
    kept = {p.name: p.read_bytes() for p in run.iterdir() if p.name in ("metrics.jsonl", "trainer_state.json")}
    assert len(kept) == 2
    weights = final_weights(run)
    train(dataset, run, max_steps=5, do_train=False, do_eval=True)
    assert {name: (run / name).read_bytes() for name in kept} == kept
    assert same_bits(final_weights(run), weights)


def test_pretrained_half_precision_and_tied_tensors_are_read(hub, tmp_path):
    """As older Hub checkpoints store them: the tied decoder twice, rotary frequencies, fp16, one file."""
    model = EsmForMaskedLM.from_pretrained(hub).half()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["lm_head.decoder.weight"] = state["esm.embeddings.word_embeddings.weight"].clone()
    state["esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq"] = torch.ones(8).half()
    state["esm.embeddings.position_ids"] = torch.arange(1026)[None]
    save_file(state, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    read = ours(tmp_path)
    back = dict(ADAPTER.to_hf(read.state_dict().__getitem__, read.config, read.extras))
    expected = model.state_dict()
    assert all(torch.equal(back[k].half(), expected[k]) for k in back if k in expected)
    assert {p.dtype for p in read.parameters()} == {torch.float32}
    ADAPTER.save(
        ADAPTER.to_hf(read.state_dict().__getitem__, read.config, read.extras),
        read.config,
        tmp_path / "exported",
    )
    assert EsmForMaskedLM.from_pretrained(tmp_path / "exported").dtype == torch.float32


@pytest.fixture
def broken(hub, tmp_path):
    """A copy of the Hub checkpoint in one file, to be damaged: (directory, tensors)."""
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "config.json").write_text((hub / "config.json").read_text())
    return directory, {k: v for shard in sorted(hub.glob("*.safetensors")) for k, v in load_file(shard).items()}


def refusal(directory) -> str:
    with pytest.raises(UserError) as caught:
        dict(ADAPTER.read(str(directory), load_config(str(directory)))[0])
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def test_pretrained_truncated_file_is_refused(broken):
    directory, tensors = broken
    save_file(tensors, directory / "model.safetensors")
    whole = (directory / "model.safetensors").read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        (directory / "model.safetensors").write_bytes(whole[:length])
        assert "cut short" in refusal(directory)


def test_pretrained_missing_shard_or_broken_index_is_refused(broken):
    directory, tensors = broken
    save_file(tensors, directory / "model-00001-of-00002.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {k: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, k in enumerate(tensors)}})
    )
    assert "model-00002-of-00002.safetensors: no such file" in refusal(directory)
    for content in ("{", "{}", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        assert "not an index" in refusal(directory)


def test_pretrained_pickled_weights_are_refused(broken):
    directory, tensors = broken
    torch.save(tensors, directory / "pytorch_model.bin")
    assert "pytorch_model.bin there is pickled" in refusal(directory)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("esm.embeddings.word_embeddings.weight", 32),
        ("esm.encoder.layer.1.attention.self.key.weight", 60),
        ("lm_head.dense.bias", 63),
        ("esm.contact_head.regression.bias", 0),
    ],
)
def test_pretrained_tensor_of_other_shape_is_refused(broken, name, rows):
    directory, tensors = broken
    tensors[name] = tensors[name][:rows].clone()
    save_file(tensors, directory / "model.safetensors")
    assert f"{name} is [{rows}" in refusal(directory)


def test_pretrained_missing_or_unknown_tensors_are_refused(broken):
    directory, tensors = broken
    gone = tensors.pop("esm.encoder.layer.1.output.dense.bias")
    save_file(tensors, directory / "model.safetensors")
    assert "it has no tensor esm.encoder.layer.1.output.dense.bias" in refusal(directory)
    tensors |= {"esm.encoder.layer.1.output.dense.bias": gone, "esm.encoder.layer.2.output.dense.bias": gone.clone()}
    save_file(tensors, directory / "model.safetensors")
    assert "unknown tensor esm.encoder.layer.2.output.dense.bias" in refusal(directory)


def test_pretrained_without_lm_head_is_refused(tmp_path):
    EsmModel(esm2_config(2, 64, 4).to_transformers()).save_pretrained(tmp_path)
    assert "not a checkpoint of EsmForMaskedLM" in refusal(tmp_path)


def test_pretrained_errors_are_one_line(dataset, hub, broken, tmp_path):
    directory, tensors = broken
    (directory / "model.safetensors").write_bytes(b"torn")
    done = run_forked(dataset, tmp_path / "out", model_name_or_path=directory)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {directory}/model.safetensors: cannot be read")
    (directory / "vocab.txt").write_text("\n".join([*TOKENS[:4], *sorted(TOKENS[4:])]))
    said = train(dataset, tmp_path / "out", expect=2, tokenizer_name=directory, model_name_or_path=hub)
    assert said.startswith(f"error: --tokenizer_name {directory}: vocab.txt does not hold the 33 ESM-2 tokens")
    assert not (tmp_path / "out").exists()
    train(dataset, tmp_path / "out", tokenizer_name=hub, model_name_or_path=hub, max_steps=1)
