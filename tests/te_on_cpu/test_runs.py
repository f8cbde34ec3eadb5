"""Whole command lines with --backend te: every recipe in every way of training.

The ranks take themselves for GPUs, and tensors of the CPU and of the GPU do not mix (tests/te_on_cpu/placement.py).
Losses are those of the torch backend in bf16 on a CPU, but for what the formats cost in three steps of a tiny model:
measured, 0.07 to 0.13 %, and 0.23 % with NVFP4.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from common.files.safe_files import read_json_lines
from common.models.esm2.model import Esm2ForMaskedLM
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.convert import ADAPTER
from tests.decoder_fixtures import train_decoder, write_text
from tests.marks import cases
from tests.te_on_cpu import graphs
from tests.te_on_cpu.boot import needs_site
from tests.te_on_cpu.runs import BLACKWELL, train_by_te, train_decoder_by_te
from tests.training_fixtures import checkpoint_state, losses, same_bits, train

pytestmark = needs_site
REPLAYED = "a graph is replayed"
RECIPES = {name: {"fp8": True, "fp8_recipe": name} for name in ("delayed", "current", "block")}
RECIPES |= {"mxfp8": {"fp8": True, "fp8_recipe": "mxfp8", "capability": BLACKWELL}}
RECIPES |= {"nvfp4": {"fp4": True, "capability": BLACKWELL}}
WAYS = {
    "DDP, statistics": {"nproc": 2, "quant_stats": True, "quant_stats_freq": 2},
    "FSDP2, recomputed": {"script": "train_fsdp2.py", "nproc": 2, "activation_checkpointing": "full"},
    "FP8 weights": {"fp8_params": True},
}
CASES = {f"{recipe}, {way}": RECIPES[recipe] | WAYS[way] for recipe in RECIPES for way in WAYS}
del CASES["nvfp4, FP8 weights"]  # refused: they are FP8's
CASES |= {
    "delayed, Megatron-FSDP": RECIPES["delayed"] | {"script": "train_mfsdp.py", "nproc": 2},
    "mxfp8 and nvfp4": RECIPES["mxfp8"] | {"fp8_layers": "1", "fp4": True},
}
FAST = {"delayed, FP8 weights", "mxfp8, FSDP2, recomputed", "nvfp4, DDP, statistics"}


@pytest.fixture(scope="module")
def in_bf16(dataset, tmp_path_factory):
    """The losses of the torch backend on so many ranks of a CPU."""
    found = {}
    for nproc in (1, 2):
        out = tmp_path_factory.mktemp("bf16") / "out"
        train(dataset, out, nproc, bf16=True, gelu="tanh", backend="torch", max_steps=3)
        found[nproc] = losses(out)
    return found


@pytest.mark.parametrize("case", cases(CASES, slow=CASES.keys() - FAST))
def test_run_trains_like_bf16_up_to_the_formats(case, dataset, tmp_path, in_bf16):
    flags = CASES[case]
    if flags.get("script") == "train_mfsdp.py":
        pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    said = train_by_te(dataset, tmp_path / "out", **flags)
    expected = in_bf16[flags.get("nproc", 1)]
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=0.01)
    assert losses(tmp_path / "out") != expected
    assert "Backend: te (--backend te)" in said
    assert f"Device = cuda x {flags.get('nproc', 1)}, computing in bfloat16" in said
    rows = tmp_path / "out" / "quant_stats.jsonl"
    assert {row["step"] for row in read_json_lines(rows)} == {2} if "quant_stats" in flags else not rows.exists()


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [(1, {"fp8_params": True}), pytest.param(2, {"script": "train_fsdp2.py"}, marks=pytest.mark.slow)],
)
def test_run_with_muon_trains_like_bf16(dataset, tmp_path, nproc, flags):
    flags = flags | {"nproc": nproc, "optim": "muon", "max_steps": 3}
    train_by_te(dataset, tmp_path / "te", **RECIPES["delayed"] | flags)
    flags.pop("fp8_params", None)
    train(dataset, tmp_path / "torch", bf16=True, gelu="tanh", backend="torch", **flags)
    assert losses(tmp_path / "te") == pytest.approx(losses(tmp_path / "torch"), rel=0.01)


@pytest.mark.parametrize(
    "recipe", cases([name for name in RECIPES if name != "delayed"], slow={"current", "block", "mxfp8"})
)
def test_run_resumes_bit_exactly(recipe, dataset, tmp_path):
    """Stochastic rounding too, and scales of all kinds but delayed scaling's, which have a state (below)."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train_by_te(dataset, whole, save_steps=2, max_steps=4, **RECIPES[recipe])
    shutil.copytree(whole / "checkpoint-2", parted / "checkpoint-2")
    train_by_te(dataset, parted, max_steps=4, **RECIPES[recipe])
    assert losses(parted) == losses(whole)[2:]


@pytest.mark.slow
def test_run_with_delayed_scaling_resumes_bit_exactly(dataset, tmp_path):
    """Histories and scales come back from the checkpoint; statistics are those of tensors on the GPU's units."""
    flags = {"fp8": True, "fp8_recipe": "delayed", "packs_per_step": 2, "quant_stats": True, "quant_stats_freq": 2}
    whole, parted, shared = (tmp_path / name for name in ("whole", "parted", "shared"))
    train_by_te(dataset, whole, save_steps=1, max_steps=4, **flags)
    shutil.copytree(whole / "checkpoint-2", parted / "checkpoint-2")
    train_by_te(dataset, parted, max_steps=4, **flags)
    assert losses(parted) == losses(whole)[2:]

    # On two ranks a rank's gradients are twice as large: so are their histories, and their scales half as large.
    shutil.copytree(whole / "checkpoint-1", shared / "checkpoint-1")
    train_by_te(dataset, shared, 2, max_steps=4, stop_at_step=2, save_steps=1, **flags)
    alone, split = (read_json_lines(out / "quant_stats.jsonl") for out in (whole, shared))
    assert [row["step"] for row in alone] == [2] * len(split) + [4] * len(split)
    for row, other in zip(alone, split, strict=False):
        assert other["scale_inv_min"] == pytest.approx(row["scale_inv_min"], rel=1e-6), row  # the checkpoint's scale
    for out, step, factor in ((whole, 1, 1), (shared, 2, 2)):
        state = json.loads((out / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["gradient_factor"] == factor


def _announce_replays() -> None:
    replay = graphs.CUDAGraph.replay

    def announced(graph) -> None:
        print(REPLAYED, flush=True)
        replay(graph)

    graphs.CUDAGraph.replay = announced


@pytest.mark.slow
def test_run_with_cuda_graphs_has_the_bits_of_eager_layers(dataset, tmp_path):
    """On two ranks, of accumulated packs, with an evaluation, and after a resume."""
    flags = {"nproc": 2, "packs_per_step": 4, "max_steps": 4, "save_steps": 2, "do_eval": True, "eval_steps": 1}
    eager, recorded = tmp_path / "eager", tmp_path / "recorded"
    train_by_te(dataset, eager, **flags)
    train_by_te(dataset, recorded, cuda_graphs=True, stop_at_step=2, **flags)
    said = train_by_te(dataset, recorded, cuda_graphs=True, before=_announce_replays, **flags)
    rows = [
        [(row["step"], row["loss"], row["eval_loss"]) for row in read_json_lines(out / "metrics.jsonl")]
        for out in (eager, recorded)
    ]
    assert rows[0] == rows[1]
    layers, steps, packs_a_rank = 2, 2, 2
    assert said.count(REPLAYED) == steps * packs_a_rank * layers * 2, said


def _spoil_a_weight() -> None:
    """Of a layer in NVFP4, before the second pass."""
    passes = itertools.count(1)

    def spoil(module, inputs) -> None:
        if isinstance(module, Esm2ForMaskedLM) and next(passes) == 2:
            with torch.no_grad():
                module.layers[0].layernorm_mlp.fc1_weight[0, 0] = torch.nan

    torch.nn.modules.module.register_module_forward_pre_hook(spoil)


def test_run_detects_a_nan_weight_under_nvfp4(dataset, tmp_path):
    """Its cast makes 6 of a NaN, so that neither loss nor gradients show it: they are finite."""
    flags = {"fp4": True, "capability": BLACKWELL, "max_skipped_steps": 2, "max_steps": 4, "expect": 2}
    said = train_by_te(dataset, tmp_path / "out", before=_spoil_a_weight, **flags)
    assert re.search(r"2 skipped in a row \(step 2: loss [\d.]+, gradient norm nan; step 3: loss", said), said


@pytest.mark.parametrize(
    ("cp_size", "recipe"),
    [
        (1, "current"),
        pytest.param(2, "delayed", marks=pytest.mark.slow),
        pytest.param(2, "nvfp4", marks=pytest.mark.slow),
    ],
)
def test_decoder_trains_like_bf16_up_to_the_formats(tmp_path, cp_size, recipe):
    """Where ranks share packs, attention is torch's, block by block."""
    text = write_text(tmp_path / "text")
    flags = {
        "hidden_width": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "max_steps": 3,
        "document_masks": cp_size - 1,
    }
    train_decoder(text, tmp_path / "torch", bf16=1, backend="torch", **flags)
    said = train_decoder_by_te(text, tmp_path / "te", cp_size, cp_size=cp_size, **RECIPES[recipe] | flags)
    assert losses(tmp_path / "te") == pytest.approx(losses(tmp_path / "torch"), rel=0.01)
    assert losses(tmp_path / "te") != losses(tmp_path / "torch")
    assert "Backend: te (--backend te)" in said


MIXTRAL = {"model_type": "mixtral", "hidden_width": 128, "num_heads": 4, "intermediate_size": 128}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_decoder_with_experts_trains_like_bf16(recipe, tmp_path):
    text = write_text(tmp_path / "text")
    flags = MIXTRAL | {"activation_checkpointing": "full", "max_steps": 2, "save_final_model": False}
    train_decoder(text, tmp_path / "torch", bf16=1, backend="torch", **flags)
    said = train_decoder_by_te(text, tmp_path / "te", **RECIPES[recipe], **flags)
    assert losses(tmp_path / "te") == pytest.approx(losses(tmp_path / "torch"), rel=0.01)
    assert losses(tmp_path / "te") != losses(tmp_path / "torch")
    assert "Backend: te (--backend te)" in said


@pytest.mark.slow
def test_decoder_with_experts_resumes_and_exports_bit_exactly(tmp_path):
    """With delayed scaling, whose scales and histories of each expert a checkpoint holds."""
    text, whole, parted = (tmp_path / name for name in ("text", "whole", "parted"))
    write_text(text)
    flags = MIXTRAL | RECIPES["delayed"] | {"max_steps": 4, "checkpoint_freq": 2}
    train_decoder_by_te(text, whole, **flags)
    shutil.copytree(whole / "checkpoint-2", parted / "checkpoint-2")
    train_decoder_by_te(text, parted, **flags)
    assert losses(parted) == losses(whole)[2:]
    state = checkpoint_state(whole / "checkpoint-4", tmp_path)
    assert state["scales"]["layers.0.layernorm_mlp.fc1_matmul.scaling_fwd.scale"].shape == (3 * 8,), "of each expert"
    config = DecoderConfig.read(whole / "final_model" / "config.json")
    of_checkpoint = dict(ADAPTER.to_hf(state["model"].__getitem__, config))
    for out in (whole, parted):
        assert same_bits(load_file(out / "final_model" / "model.safetensors"), of_checkpoint)
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight" in of_checkpoint


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"fp8_params": 1}, "--fp8_params: not of a layer with experts"),
        ({"fp8": 0, "fp4": 1, "intermediate_size": 96}, "--fp4: Transformer Engine 2.20 casts rows of experts"),
    ],
)
def test_decoder_with_experts_refuses_formats_in_one_line(flags, said, tmp_path):
    flags = MIXTRAL | {"fp8": 1, "expect": 2} | flags
    printed = train_decoder_by_te(write_text(tmp_path / "text"), tmp_path / "out", **flags)
    assert said in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("way", ["p2p", pytest.param("a2a", marks=pytest.mark.slow)])
def test_cp_run_trains_like_one_process(way, dataset, tmp_path, in_bf16):
    """By Transformer Engine's own ring of keys or all-to-all of heads, around kernels of attention to packs."""
    train_by_te(dataset, tmp_path / "out", 2, "train_ddp_cp.py", cp_comm_type=way)
    assert losses(tmp_path / "out") == pytest.approx(in_bf16[1], rel=3e-4)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param("current", "biohub/ESMC-300M-hf", marks=pytest.mark.slow),
        ("nvfp4", "biohub/ESMC-300M-hf"),
        pytest.param("current", "chandar-lab/AMPLIFY_120M", marks=pytest.mark.slow),
    ],
)
def test_encoder_trains_like_bf16_up_to_the_formats(recipe, name, dataset, tmp_path):
    sizes = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=96"
    flags = {"config_name": name, "config_overrides": sizes, "max_steps": 3}
    train(dataset, tmp_path / "torch", bf16=True, backend="torch", **flags)
    said = train_by_te(dataset, tmp_path / "te", **RECIPES[recipe], **flags)
    assert losses(tmp_path / "te") == pytest.approx(losses(tmp_path / "torch"), rel=0.01)
    assert losses(tmp_path / "te") != losses(tmp_path / "torch")
    assert "Backend: te (--backend te)" in said
