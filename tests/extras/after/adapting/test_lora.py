"""--lora: beside merged matrices, its gradients by the chain rule; what its runs train, keep and export."""

from __future__ import annotations

import json
import re
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from common.cli import UserError
from common.models.family import encoder_family
from common.models.layers.backend import BackendFlags
from common.models.layers.config_base import override
from common.models.layers.initialise import initialise
from extras.after.adapting.lora import add_adapters, merged
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.export import choose, export
from tests.decoder_fixtures import train_decoder, write_text
from tests.extras.encoder_runs import results
from tests.live_runs import LiveRun, assert_same_run, newest_step
from tests.training.test_bad_input import refused
from tests.training_fixtures import (
    checkpoint_state,
    final_weights,
    losses,
    relative_difference,
    rows,
    same_bits,
    train,
)

RUN = {"max_steps": 6, "packs_per_step": 4, "tokens_per_pack": 256, "save_steps": 3, "lora": True, "lora_r": 4}
SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=64"
FAMILIES = {  # each family's model, and the sizes of a small one
    "facebook/esm2_t6_8M_UR50D": SIZES,
    "biohub/ESMC-300M-hf": SIZES,
    "chandar-lab/AMPLIFY_120M": SIZES.replace("64", "72"),
    "Profluent-Bio/E1-150m": SIZES,
}


@pytest.fixture(scope="module")
def given(dataset, tmp_path_factory):
    """The weights that runs adapt."""
    out = tmp_path_factory.mktemp("given") / "run"
    train(dataset, out, max_steps=3)
    return out / "final_model"


@pytest.fixture(scope="module")
def alone(dataset, given, tmp_path_factory):
    """A run of one process."""
    out = tmp_path_factory.mktemp("lora") / "run"
    train(dataset, out, do_eval=True, model_name_or_path=given, **RUN)
    return out


def model_of(name: str, sizes: str):
    family = encoder_family(name)
    return family.make(override(family.load_config(name), sizes))


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_the_merged_model_and_have_its_gradients(name):
    """Of W + s B A: dA = s B^T dW, dB = s dW A^T."""
    with torch.device("meta"):
        dense, model = (model_of(name, FAMILIES[name]) for _ in range(2))
        add_adapters(model, BackendFlags(lora_r=4, lora_alpha=6.0))
    for each in (dense, model):
        each.to_empty(device="cpu")
        initialise(each, 1, 0.2)
    ids = torch.from_numpy(np.random.default_rng(0).integers(10, 20, 40))
    pack = {"cu_seqlens": torch.tensor([0, 15, 40], dtype=torch.int32), "max_seqlen": 25}
    torch.testing.assert_close(model(ids, **pack).logits, dense(ids, **pack).logits, rtol=0, atol=0)  # B is 0
    parameters = dict(model.named_parameters())
    adapters = {key: value for key, value in parameters.items() if ".lora_" in key}
    assert len(adapters) == 2 * 4 * 3
    assert {key for key, value in parameters.items() if value.requires_grad} == adapters.keys()
    with torch.no_grad():
        for key in adapters:
            parameters[key].normal_(0, 0.1, generator=torch.Generator().manual_seed(len(key)))
    read = merged(lambda key: parameters[key].detach(), parameters, 6.0)
    dense.load_state_dict({key: read(key) for key in dense.state_dict()})
    assert (model(ids, **pack).logits - dense(ids, **pack).logits).abs().max() < 1e-5
    for each in (model, dense):
        each(ids, **pack, labels=torch.where(torch.arange(40) % 5 == 2, ids, -100)).loss_sum.backward()
    of_weights = dict(dense.named_parameters())
    for key in adapters:
        begin, _, which = key.rpartition(".")
        a, b = (parameters[f"{begin}.lora_{part}"].detach() for part in "ab")
        weight = of_weights[f"{begin.removesuffix('matmul')}weight"].grad
        expected = 1.5 * (b.T @ weight if which == "lora_a" else weight @ a.T)
        assert (parameters[key].grad - expected).norm() < 1e-4 * expected.norm()


def test_lora_trains_adapters_alone_and_exports_the_merged_stock_model(dataset, given, alone, tmp_path):
    state = checkpoint_state(alone / "checkpoint-6", tmp_path)
    model, moments = state["model"], state["optimizer"]["state"]
    assert moments.keys() == {name for name in model if ".lora_" in name}
    assert len(moments) == 16
    encoder = Encoder(EncoderFlags(str(given)), torch.device("cpu"))
    assert all(torch.equal(model[name], weight) for name, weight in encoder.model.state_dict().items())
    first = [row["loss"] for row in rows(alone) if "loss" in row][0]
    plain = {key: value for key, value in RUN.items() if "lora" not in key} | {"max_steps": 1}
    train(dataset, tmp_path / "plain", model_name_or_path=given, **plain)
    assert first == losses(tmp_path / "plain")[0]  # adapters begin at 0

    with torch.device("meta"):
        adapted = encoder_family(str(given)).make(encoder.model.config)
        add_adapters(adapted, BackendFlags(lora_r=4))
    adapted.to_empty(device="cpu").load_state_dict(model)
    ids = torch.tensor([[0, *range(4, 24), 2]])
    stock = transformers.EsmForMaskedLM.from_pretrained(alone / "final_model").eval()
    with torch.no_grad():
        assert (stock(ids).logits - adapted(ids).logits).abs().max() < 1e-5
    assert relative_difference(final_weights(alone), load_file(given / "model.safetensors")) > 1e-3
    train(dataset, tmp_path / "again", model_name_or_path=alone / "final_model", do_train=False, do_eval=True)
    assert results(tmp_path / "again")["eval_loss"] == pytest.approx(results(alone)["eval_loss"], abs=1e-5)
    assert "`--lora_r` | 4" in (alone / "final_model" / "README.md").read_text()


def test_lora_checkpoint_gives_the_merged_model(dataset, alone, tmp_path):
    """By extras.export, as --model_name_or_path, and with --save_hf."""
    export(choose(alone / "checkpoint-6"), tmp_path / "model")
    assert same_bits(load_file(tmp_path / "model" / "model.safetensors"), final_weights(alone))
    start = {"model_name_or_path": alone / "checkpoint-6", "max_steps": 1, "save_hf": True, "save_steps": 1}
    train(dataset, tmp_path / "next", **start)
    train(dataset, tmp_path / "exported", **start | {"model_name_or_path": alone / "final_model"})
    assert losses(tmp_path / "next") == losses(tmp_path / "exported")
    lora = {"lora": True, "max_steps": 2, "save_hf": True}
    train(dataset, tmp_path / "saved", model_name_or_path=alone / "final_model", **lora)
    assert same_bits(
        load_file(tmp_path / "saved" / "checkpoint-2" / "model.safetensors"), final_weights(tmp_path / "saved")
    )


def test_lora_resumes_after_a_stop_and_after_kill_9_with_the_same_bits(dataset, given, alone, tmp_path):
    flags, killed = RUN | {"model_name_or_path": given, "do_eval": True}, tmp_path / "killed"
    for stop in (3, 6):
        train(dataset, tmp_path / "stopped", stop_at_step=stop, **flags)
    assert_same_run(tmp_path / "stopped", alone, 6, tmp_path)
    with LiveRun(dataset, killed, tmp_path / "logs", **flags | {"save_steps": 1}) as run:
        run.until(lambda: newest_step(killed) >= 2)
        run.signal(signal.SIGKILL)
        run.end()
    train(dataset, killed, **flags)
    assert_same_run(killed, alone, 6, tmp_path)
    assert same_bits(final_weights(killed), final_weights(alone))


@pytest.mark.parametrize("changed", [{"lora": None, "lora_r": None}, {"lora_alpha": 8.0}, {"lora_targets": "qkv"}])
def test_lora_of_another_kind_does_not_resume(dataset, given, alone, tmp_path, changed):
    flags = RUN | {"model_name_or_path": given, "resume_from_checkpoint": alone / "checkpoint-3"} | changed
    assert "the checkpoint is of another model: --lora " in refused(dataset, tmp_path / "out", **flags)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", {"gradient_checkpointing": True}),
        pytest.param("train_fsdp2.py", {"activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param("train_ddp_cp.py", {}, marks=pytest.mark.slow),
    ],
)
def test_lora_on_two_ranks_equals_one(dataset, given, alone, tmp_path, script, flags):
    out = tmp_path / "out"
    train(dataset, out, 2, script=script, do_eval=True, model_name_or_path=given, **RUN, **flags)
    assert losses(out) == pytest.approx(losses(alone), rel=1e-5)
    norms = ([row["grad_norm"] for row in rows(of) if "loss" in row] for of in (out, alone))
    assert next(norms) == pytest.approx(next(norms), rel=1e-4)
    assert relative_difference(final_weights(out), final_weights(alone)) < 1e-5


@pytest.mark.slow
def test_lora_in_bf16_and_compiled(dataset, given, alone, tmp_path):
    flags = RUN | {"bf16": True, "torch_compile": True, "max_steps": 3}
    train(dataset, tmp_path / "out", model_name_or_path=given, compiler="aot_eager", **flags)
    assert losses(tmp_path / "out") == pytest.approx(losses(alone)[:3], abs=0.02)


@pytest.mark.slow
def test_lora_of_a_decoder(tmp_path):
    text = write_text(tmp_path / "text")
    train_decoder(text, tmp_path / "base", tokenizer="bytes")
    flags = dict.fromkeys(("model_type", "hidden_width", "num_layers", "num_heads", "num_key_value_heads"))
    flags |= {"intermediate_size": None, "vocab_size": None, "initializer_range": None, "tokenizer": "bytes"}
    flags |= {"model_name_or_path": tmp_path / "base" / "final_model", "do_eval": True, "task": "clm"}
    train_decoder(text, tmp_path / "out", **flags, lora=True, lora_targets="qkv,fc2")
    flags |= {"model_name_or_path": tmp_path / "out" / "final_model", "do_train": False}
    train_decoder(text, tmp_path / "again", **flags)
    assert results(tmp_path / "again")["eval_loss"] == pytest.approx(results(tmp_path / "out")["eval_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora": None, "lora_r": 4}, "--lora_r: goes with --lora: give that too"),
        ({"model_name_or_path": None, "config_name": "facebook/esm2_t6_8M_UR50D"}, "give --model_name_or_path"),
        ({"lora_r": 0}, "--lora_r 0: must be at least 1"),
        ({"lora_alpha": -1}, "--lora_alpha -1.0: must be above 0"),
        ({"lora_targets": "query"}, "--lora_targets query: choose from qkv,proj,fc1,fc2, each once"),
        ({"lora_targets": "qkv,qkv"}, "each once"),
        ({"fp8": True, "emulate_precision": True}, "adapters do not go with --fp8: drop one of the two"),
        ({"optim": "muon"}, "adapters do not go with --optim muon"),
        ({"backend": "hf"}, "adapters do not go with --backend hf"),
        ({"script": "train_mfsdp.py"}, "adapters do not go with train_mfsdp.py"),
        ({"backend": "te"}, "error: --backend te: "),
    ],
)
def test_lora_is_refused_in_one_line(dataset, given, tmp_path, flags, message):
    said = refused(dataset, tmp_path / "out", **{"lora": True, "model_name_or_path": given} | flags)
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["train_ddp.py", pytest.param("train_fsdp2.py", marks=pytest.mark.slow)])
def test_dry_run_has_all_weights_and_moments_of_adapters_alone(dataset, tmp_path, script):
    sizes = "num_hidden_layers=1,hidden_size=1024,num_attention_heads=16,intermediate_size=4096"
    flags = {"config_name": "facebook/esm2_t6_8M_UR50D", "config_overrides": sizes, "max_steps": 1}
    train(dataset, tmp_path / "base", packs_per_step=1, tokens_per_pack=128, **flags)
    flags = {"dry_run": True, "tokens_per_pack": 128, "model_name_or_path": tmp_path / "base" / "final_model"}
    found = []
    for lora in (True, None):
        said = train(dataset, tmp_path / "out", script=script, lora=lora, **flags)
        found.append(
            [re.search(rf" ([0-9.]+)  {part}", said)[1] for part in ("weights\n", "optimiser", "copy for a ch")]
        )
    gib = 13.7e6 * 4 / 2**30  # 12 hidden^2 of the layer, hidden^2 of the head, embeddings
    assert found == [[f"{gib:.2f}", "0.00", f"{gib:.2f}"], [f"{gib:.2f}", f"{2 * gib:.2f}", f"{3 * gib:.2f}"]]


def test_lora_of_experts_is_refused():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    with pytest.raises(UserError, match=r"--lora_targets qkv,fc1: this model's layers have no qkv: leave it out"):
        add_adapters(model, BackendFlags(lora_targets="qkv,fc1"))


def test_hostile_manifest_of_a_lora_checkpoint_is_refused(alone, tmp_path):
    copy = shutil.copytree(alone / "checkpoint-6", tmp_path / "checkpoint-6")
    manifest = json.loads((copy / "manifest.json").read_text())
    for lora in ({"alpha": "16"}, {"alpha": float("nan")}, ["alpha"], {}):
        (copy / "manifest.json").write_text(json.dumps(manifest | {"model": manifest["model"] | {"lora": lora}}))
        with pytest.raises(UserError, match=r"manifest.json: refused: lora"):
            export(copy, tmp_path / "model")
