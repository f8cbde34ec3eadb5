"""--backend hf: transformers' EsmForMaskedLM in this program's loop."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import EsmForMaskedLM

from common.cli import UserError
from common.compat import use_attention
from common.distributed.world import World
from common.models.esm2.config import esm2_config
from common.models.esm2.convert import ADAPTER
from common.training.command_line import parse_run
from extras.interop.hf_backend import StockEsm, check
from tests.data_fixtures import load_script
from tests.models.reference import packed, random_batch, reference_model
from tests.training_fixtures import final_weights, losses, relative_difference, rows, same_bits, train

FSDP = "train_fsdp2.py"
RUN = {"max_steps": 6, "save_steps": 3, "packs_per_step": 2, "backend": "hf"}


@pytest.fixture(scope="module")
def both() -> tuple[StockEsm, EsmForMaskedLM]:
    """The backend's model, built as a run builds it, and transformers' own, with the same random weights."""
    weights = reference_model(esm2_config(2, 64, 4)).state_dict()
    config = esm2_config(2, 64, 4)
    with torch.device("meta"):
        ours = StockEsm(config)
    ours.to_empty(device="cpu").load_state_dict(dict(ADAPTER.from_hf(weights, config)[0]))
    stock = config.to_transformers()
    use_attention(stock)
    theirs = EsmForMaskedLM(stock)
    theirs.load_state_dict(weights)
    return ours, theirs


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("layout", ["pack", "padded"])
def test_hf_backend_computes_what_transformers_does(both, bf16, layout):
    """The same bits: loss, logits, and the gradients of all weights."""
    ours, theirs = both
    batch = random_batch([9, 30, 17, 4])
    kept = batch["attention_mask"].bool()
    inputs = packed(batch) if layout == "pack" else batch
    for model in both:
        model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = ours(**inputs)
        logits = theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        expected = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        own_mean = theirs(**batch).loss
        ours_logits = ours(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    targets = (batch["labels"] >= 0).sum()
    assert output.loss_sum.item() == expected.item() == pytest.approx((own_mean * targets).item(), rel=1e-6)
    assert output.correct == (logits.argmax(-1) == batch["labels"]).sum()
    assert torch.equal(ours_logits if layout == "pack" else ours_logits[kept], logits.float()[kept])
    output.loss_sum.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    pieces, _ = ADAPTER.from_hf(gradients | {"esm.contact_head.regression.weight": torch.zeros(1, 8)}, ours.config)
    stock = dict(pieces)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, stock[name]), name


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """An uninterrupted run on one rank."""
    out = tmp_path_factory.mktemp("hf")
    train(dataset, out, **RUN, do_eval=True)
    return out


def test_hf_backend_learns_as_torch_backend(dataset, whole, tmp_path):
    """To fp32 sums in another order, on the same packs, masks and initial weights; evaluation and export too."""
    train(dataset, tmp_path, **RUN | {"backend": "torch"}, do_eval=True)
    assert losses(whole) == pytest.approx(losses(tmp_path), rel=1e-6)
    norms, of_torch = ([row["grad_norm"] for row in rows(out) if "grad_norm" in row] for out in (whole, tmp_path))
    assert norms == pytest.approx(of_torch, rel=1e-5)
    assert relative_difference(final_weights(whole), final_weights(tmp_path)) < 1e-6
    results = [json.loads((out / "all_results.json").read_text()) for out in (whole, tmp_path)]
    assert [result["backend"] for result in results] == ["hf", "torch"]
    for name in ("eval_loss", "eval_accuracy", "test_loss"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-6)


def test_hf_backend_resumes_with_same_bits(dataset, whole, tmp_path):
    """`auto` keeps the backend; another one reads the same checkpoint."""
    train(dataset, tmp_path / "out", **RUN, stop_at_step=3)
    there = {"backend": "torch", "resume_from_checkpoint": tmp_path / "out" / "checkpoint-3"}
    train(dataset, tmp_path / "torch", **RUN | there)
    said = train(dataset, tmp_path / "out", **RUN | {"backend": "auto"})
    assert "Backend: hf (as this run so far)" in said
    assert same_bits(final_weights(tmp_path / "out"), final_weights(whole))
    assert relative_difference(final_weights(tmp_path / "torch"), final_weights(whole)) < 1e-6


def test_hf_backend_sharded_equals_one_process(dataset, whole, tmp_path):
    """FSDP2 on two ranks, then on one with two packs a step, then DDP: one run, to fp32 sums in another order."""
    for stop, nproc, script in ((2, 2, FSDP), (4, 1, FSDP), (6, 1, "train_ddp.py")):
        train(dataset, tmp_path, nproc, script=script, **RUN, do_eval=True, stop_at_step=stop)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-6)
    assert relative_difference(final_weights(tmp_path), final_weights(whole)) < 1e-6
    of_one, of_all = (json.loads((out / "all_results.json").read_text()) for out in (whole, tmp_path))
    assert of_all["eval_loss"] == pytest.approx(of_one["eval_loss"], rel=1e-6)


def test_hf_backend_sharded_in_bf16_computes_as_in_ddp(dataset, tmp_path):
    """The same bf16 matmuls and fp32 residual stream; exported and evaluated from the shards."""
    flags = RUN | {"bf16": True, "max_steps": 2, "do_eval": True}
    train(dataset, tmp_path / "ddp", 2, **flags)
    train(dataset, tmp_path / "fsdp", 2, script=FSDP, cpu_offload=True, **flags)
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-6)
    assert relative_difference(final_weights(tmp_path / "fsdp"), final_weights(tmp_path / "ddp")) < 1e-5


MODEL = ("--config_name=facebook/esm2_t6_8M_UR50D", "--dataset_dir=x", "--output_dir=y", "--backend=hf")


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("DdpFlags", ["--torch_compile"], "--torch_compile is not of transformers' layers"),
        ("DdpFlags", ["--gradient_checkpointing"], "--gradient_checkpointing is not"),
        ("DdpFlags", ["--bf16", "--bf16_residual"], "--bf16_residual is not"),
        ("DdpFlags", ["--fp8", "--emulate_precision"], "--fp8 is not"),
        ("DdpFlags", ["--fp4", "--emulate_precision"], "--fp4 is not"),
        ("FsdpFlags", ["--activation_checkpointing=1"], "--activation_checkpointing is not"),
        ("FsdpFlags", ["--offload_activations"], "--offload_activations is not"),
        ("MegatronFlags", [], "Megatron-FSDP gathers weights layer by layer: use train_fsdp2.py"),
        ("DdpFlags", ["--backend=hf_flash"], "flash-attn is not here"),
    ],
)
def test_hf_backend_refuses_what_changes_layers(script, words, said):
    strategies = {"DdpFlags": "train_ddp.py", "FsdpFlags": FSDP, "MegatronFlags": "train_mfsdp.py"}
    args = parse_run("", getattr(load_script(strategies[script]), script), [*MODEL, *words])
    with pytest.raises(UserError, match=rf"^--backend hf\w*: {said}"):
        check(args, World(0, 0, 1, torch.device("cpu")))


def test_hf_backend_is_not_for_decoders():
    words = ["--model=llama3_2_1b", "--dataset=x", "--backend=hf"]
    with pytest.raises(UserError, match="^--backend hf: is of ESM-2 only"):
        parse_run("", load_script("train_fsdp2.py").FsdpFlags, words)
