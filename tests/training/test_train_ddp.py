"""The training run is right: its loss and gradients are the reference's, and nothing but data, flags and seed count.

The reference is transformers' EsmForMaskedLM with the same weights, run one protein at a time, so that it shares
neither packing, padding, accumulation nor ranks with what it judges.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import EsmForMaskedLM, get_scheduler

from common.data.collators import MaskingCollator
from common.data.loader import TrainLoader
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import PreparedData
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from common.models.layers.config_base import override
from tests.data_fixtures import DOWNLOAD, TOKENIZE, call, write_fasta
from tests.marks import cases
from tests.training_fixtures import (
    NUM_TRAIN,
    TINY_MODEL,
    TINY_OVERRIDES,
    _main,
    arguments,
    checkpoint_state,
    final_weights,
    flags_of,
    losses,
    on_ranks,
    relative_difference,
    rows,
    run_training,
    same_bits,
    train,
)

PACKS_PER_STEP = 4
LAYOUTS = {1: 4, 2: 2, 4: 1}  # ranks: accumulation steps
MODES = {"packed": {}, "padded": {"sequence_packing": False}, "padded to the maximum": {"pad_to_max_length": True}}


def tiny_config():
    return override(load_config(TINY_MODEL["config_name"]), TINY_OVERRIDES)


def micro_batches(dataset_dir, step: int = 0, packs: int = PACKS_PER_STEP, **flags) -> list[dict]:
    """What the micro-batches of a global step hold, as one process would read them."""
    args = arguments(dataset_dir, **flags)
    steps = TrainLoader(
        PreparedData(args.data, ESM2_TOKENS).order(PacksPerStep.of(packs)),
        MaskingCollator(ESM2_TOKENS, args.data.seed),
        num_steps=step + 1,
    )
    return list(steps)[step].micro_batches


def proteins(batch: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) of each sequence of a batch."""
    lengths = batch["cu_seqlens"].diff().tolist()
    return list(zip(batch["input_ids"].split(lengths), batch["labels"].split(lengths), strict=True))


def reference(model: Esm2ForMaskedLM) -> EsmForMaskedLM:
    theirs = EsmForMaskedLM(tiny_config().to_transformers())
    weights = dict(ADAPTER.to_hf(model.state_dict().__getitem__, model.config))
    missing, _ = theirs.load_state_dict(weights, strict=False)
    assert all("inv_freq" in name or "decoder" in name for name in missing), missing
    return theirs


def reference_loss_and_gradients(batches: list[dict], seed: int = 42) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean cross-entropy over all masked residues of the global batch, and its gradients under transformers' names."""
    model = reference(build_model(tiny_config(), seed))
    loss = mean_loss(model, batches)
    loss.backward()
    return loss.item(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def mean_loss(model: EsmForMaskedLM, batches: list[dict]) -> torch.Tensor:
    loss, masked = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in (protein for batch in batches for protein in proteins(batch)):
        logits = model(ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0]
        loss = loss + F.cross_entropy(logits.double(), labels, reduction="sum")
        masked += (labels != -100).sum().item()
    return loss / masked


def _main_keeping_gradients(argv: list[str], path) -> None:
    """train_ddp.py; what reaches the optimiser of the last rank goes to `path`."""

    def keep(optimizer, args, kwargs) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            torch.save([p.grad for group in optimizer.param_groups for p in group["params"]], path)

    register_optimizer_step_pre_hook(keep)
    _main(argv)


def first_gradients(dataset_dir, output_dir, nproc: int, **flags) -> dict[str, torch.Tensor]:
    """Gradients of step 1 as the optimiser sees them, under transformers' names; the run leaves output_dir."""
    path = output_dir.with_suffix(".gradients")
    argv = flags_of(dataset_dir, output_dir, **{"max_steps": 1} | flags)
    codes, said = on_ranks(nproc, _main_keeping_gradients, argv, path)
    assert codes == [0] * nproc, "\n".join(said)
    model = build_model(tiny_config(), 0)
    names = [k for k, p in model.named_parameters() if p.dim() > 1]
    names += [k for k, p in model.named_parameters() if p.dim() == 1]
    gradients = dict(zip(names, torch.load(path), strict=True))
    gradients = dict(ADAPTER.to_hf(gradients.__getitem__, model.config))
    return {k: v for k, v in gradients.items() if "contact_head" not in k and "position_embeddings" not in k}


def cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    flat = [torch.cat([x[name].double().flatten() for name in sorted(a)]) for x in (a, b)]
    return F.cosine_similarity(*flat, dim=0).item()


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([g.double().flatten() for g in gradients.values()]).norm().item()


@pytest.mark.parametrize("mode", cases(MODES, slow={"padded to the maximum"}))
def test_ddp_loss_and_gradients_equal_reference(dataset, tmp_path, mode):
    loss, expected = reference_loss_and_gradients(micro_batches(dataset, **MODES[mode]))
    for nproc, accumulation in LAYOUTS.items():
        out = tmp_path / f"{nproc}"
        flags = MODES[mode] | {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0}
        gradients = first_gradients(dataset, out, nproc, **flags)
        (row,) = rows(out)
        # fp32 sums in another order: measured 7e-8 (loss), 6e-8 (norm of the gradients), 2.3e-7 (norm of the
        # difference). A mean of local means, or gradients averaged once too often, differs by more than 1e-3.
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm(expected), rel=1e-6)
        assert relative_difference(gradients, expected) < 3e-6
        assert cosine(gradients, expected) > 0.999999


@pytest.mark.parametrize("mode", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
def test_ddp_run_is_independent_of_ranks(dataset, tmp_path, mode):
    for nproc, accumulation in LAYOUTS.items():
        train(
            dataset,
            tmp_path / f"{nproc}",
            nproc,
            gradient_accumulation_steps=accumulation,
            max_steps=10,
            **MODES[mode],
        )
    alone = tmp_path / "1"
    assert [row["step"] for row in rows(alone)] == list(range(1, 11))
    assert losses(alone)[-1] < losses(alone)[0] - 0.05
    for nproc in (2, 4):
        out = tmp_path / f"{nproc}"
        # Sums in another order, fp32: measured 1.6e-7 (losses) and 5.5e-8 (weights) after 20 steps.
        assert losses(out) == pytest.approx(losses(alone), rel=2e-6)
        assert relative_difference(final_weights(out), final_weights(alone)) < 1e-6
        for one, other in zip(rows(alone), rows(out), strict=True):
            assert [one[k] for k in ("tokens", "epoch", "learning_rate")] == [
                other[k] for k in ("tokens", "epoch", "learning_rate")
            ]


@pytest.mark.parametrize("backend", ["torch", pytest.param("hf", marks=pytest.mark.slow)])
def test_ddp_run_equals_plain_loop_over_transformers(dataset, tmp_path, backend):
    """Six steps of stock model, AdamW, schedule and clipping against the script's on two ranks."""
    steps, peak, clip, decay = 6, 1e-3, 2.0, 0.1
    flags = {"max_steps": steps, "learning_rate": peak, "max_grad_norm": clip, "weight_decay": decay}
    flags |= {"lr_scheduler_type": "linear", "warmup_steps": 2, "adam_beta2": 0.95, "gradient_accumulation_steps": 2}
    train(dataset, tmp_path, 2, **flags, save_steps=1, backend=backend)

    model = reference(build_model(tiny_config(), 42))
    bare = ("bias", "LayerNorm.weight", "layer_norm.weight", "layer_norm_after.weight")
    groups = [
        {"params": [p for k, p in model.named_parameters() if k.endswith(bare) == is_bare], "weight_decay": wd}
        for is_bare, wd in ((False, decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
    logged = rows(tmp_path)
    assert len(logged) == steps
    for step, row in enumerate(logged):
        optimizer.zero_grad()
        loss = mean_loss(model, micro_batches(dataset, step))
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        # fp32 sums in another order: measured 9e-8 (loss), 1.2e-7 (norm) and, below, 2.4e-8 (weights).
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert row["grad_norm"] == pytest.approx(grad_norm.item(), rel=1e-6)
        assert row["learning_rate"] == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        schedule.step()
    assert max(row["grad_norm"] for row in logged) > clip > min(row["grad_norm"] for row in logged)
    ours = final_weights(tmp_path)
    expected = {k: p.detach() for k, p in model.named_parameters() if k in ours and "contact_head" not in k}
    assert len(expected) > 35
    assert relative_difference({k: ours[k] for k in expected}, expected) < 3e-7


@pytest.fixture(scope="module")
def short_proteins(tmp_path_factory):
    """200 proteins of 1 to 3 residues: most batches of one have no masked residue at all."""
    directory = tmp_path_factory.mktemp("short")
    fasta = write_fasta(directory / "in.fasta", [(f"P{i}", "MKVLA"[i % 5 :][: 1 + i % 3]) for i in range(200)])
    call(DOWNLOAD, "--source", fasta, "--output_dir", directory)
    call(TOKENIZE, "--input_dir", directory / "csv", "--output_dir", directory / "processed")
    return directory / "processed" / "arrow"


def test_ddp_ranks_without_masked_residue_add_no_nan(short_proteins, tmp_path):
    flags = {"sequence_packing": False, "per_device_train_batch_size": 1, "seed": 3}
    counts = [[b["num_targets"] for b in micro_batches(short_proteins, step, **flags)] for step in range(6)]
    assert 0 in counts[0], "choose a seed whose first step has a rank without a masked residue"
    assert any(counts[0])
    assert [0, 0, 0, 0] in counts, "and one later step where no rank has one"
    loss, expected = reference_loss_and_gradients(micro_batches(short_proteins, **flags), seed=3)
    gradients = first_gradients(short_proteins, tmp_path / "first", 4, max_grad_norm=0, **flags)
    assert cosine(gradients, expected) > 0.999999
    assert losses(tmp_path / "first") == pytest.approx([loss], rel=1e-6)
    for nproc, accumulation in ((1, 4), (4, 1)):
        out = tmp_path / f"{nproc}"
        train(short_proteins, out, nproc, max_steps=6, gradient_accumulation_steps=accumulation, **flags)
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    has_loss = ["loss" in row for row in rows(tmp_path / "1")]
    assert has_loss == [any(of_step) for of_step in counts], "a step without a masked residue has none"
    assert min(losses(tmp_path / "1")) > 1
    assert all(torch.isfinite(w).all() for w in final_weights(tmp_path / "4").values())
    assert relative_difference(final_weights(tmp_path / "4"), final_weights(tmp_path / "1")) < 1e-5


def test_ddp_clipping_scales_global_gradient(dataset, tmp_path):
    whole = first_gradients(dataset, tmp_path / "whole", 2, max_grad_norm=0)
    assert norm(whole) > 1
    clipped = first_gradients(dataset, tmp_path / "clipped", 2, max_grad_norm=0.1)
    loose = first_gradients(dataset, tmp_path / "loose", 2, max_grad_norm=1000)
    # clip_grad_norm_ divides by norm + 1e-6
    assert norm(clipped) == pytest.approx(0.1, rel=1e-5)
    assert cosine(clipped, whole) > 0.999999
    assert same_bits(loose, whole)
    for name in ("whole", "clipped", "loose"):
        assert rows(tmp_path / name)[0]["grad_norm"] == pytest.approx(norm(whole), rel=1e-6)


def test_ddp_bf16_keeps_weights_and_moments_in_fp32(dataset, tmp_path):
    for name, bf16 in (("fp32", False), ("bf16", True)):
        train(dataset, tmp_path / name, bf16=bf16)
    state = checkpoint_state(tmp_path / "bf16" / "checkpoint-12", tmp_path)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}
    moments = [value for entry in state["optimizer"]["state"].values() for value in entry.values()]
    assert len(moments) == 3 * len(state["model"])
    assert {value.dtype for value in moments} == {torch.float32}
    assert {tensor.dtype for tensor in final_weights(tmp_path / "bf16").values()} == {torch.float32}
    # Updates smaller than bf16 can add to a weight (2^-9 of it) are kept: the weights are no bf16 numbers.
    fc1 = state["model"]["encoder.layers.0.layernorm_mlp.fc1_weight"]
    assert (fc1 != fc1.bfloat16().float()).float().mean() > 0.9
    exact, rounded = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert exact != rounded
    # bf16 has 8 bits, but these are means over many residues: measured 3.4e-4 at most over 20 steps.
    assert rounded == pytest.approx(exact, abs=4e-3)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ddp_resume_after_stop_is_bit_identical(dataset, tmp_path, nproc):
    flags = {"max_steps": 9, "lr_scheduler_type": "cosine", "warmup_steps": 3, "save_steps": 100}
    train(dataset, tmp_path / "whole", nproc, **flags)
    for stop in ({"stop_at_step": 4}, {}):
        train(dataset, tmp_path / "parts", nproc, **flags, **stop)
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    exact = ("step", "loss", "grad_norm", "learning_rate", "tokens", "epoch")
    assert [[row[k] for k in exact] for row in parts] == [[row[k] for k in exact] for row in whole]
    assert len({row["learning_rate"] for row in whole}) == 9
    assert same_bits(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))
    whole, parts = (checkpoint_state(tmp_path / name / "checkpoint-9", tmp_path) for name in ("whole", "parts"))
    for name, entry in whole["optimizer"]["state"].items():
        assert same_bits(parts["optimizer"]["state"][name], entry), name


def test_ddp_run_is_determined_by_its_seed(dataset, tmp_path):
    flags = {"max_steps": 4}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):  # --deterministic is for GPUs: a CPU always is
        train(dataset, tmp_path / name, seed=seed, deterministic=name == "b", **flags)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert same_bits(final_weights(tmp_path / "a"), final_weights(tmp_path / "b"))
    assert not set(losses(tmp_path / "a")) & set(losses(tmp_path / "c"))


def test_ddp_loader_workers_change_no_bit(dataset, tmp_path):
    for workers in (0, 2):
        flags = {"max_steps": 6, "gradient_accumulation_steps": 2, "dataloader_num_workers": workers}
        train(dataset, tmp_path / f"{workers}", 2, **flags)
    assert losses(tmp_path / "2") == losses(tmp_path / "0")
    assert same_bits(final_weights(tmp_path / "2"), final_weights(tmp_path / "0"))


def test_ddp_pad_to_max_length_trains_the_same_model(dataset, tmp_path):
    train(dataset, tmp_path / "longest", max_steps=5, sequence_packing=False)
    train(dataset, tmp_path / "maximum", max_steps=5, pad_to_max_length=True)
    # Padding is taken out on the way in: the arithmetic is the same.
    assert losses(tmp_path / "maximum") == losses(tmp_path / "longest")
    assert same_bits(final_weights(tmp_path / "maximum"), final_weights(tmp_path / "longest"))


@pytest.mark.parametrize(("epochs", "steps", "found"), [(1, 15, 1), (0.51, 8, 31 / 60), (1.1, 17, 1.1)])
def test_ddp_padded_epochs_have_expected_steps(dataset, tmp_path, epochs, steps, found):
    """240 proteins in batches of 4 are 60 batches, 4 a step: 15 steps an epoch; the last step takes the rest."""
    flags = {"sequence_packing": False, "gradient_accumulation_steps": 4, "max_steps": None, "logging_steps": 100}
    said = train(dataset, tmp_path, num_train_epochs=epochs, **flags)
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (state["step"], state["sequences"]) == (steps, round(NUM_TRAIN * found))
    results = json.loads((tmp_path / "train_results.json").read_text())
    assert results["epoch"] == pytest.approx(found, abs=1e-12)
    assert results["train_samples"] == NUM_TRAIN
    assert [row["step"] for row in rows(tmp_path)] == [1, steps]
    assert ("Num Epochs = 0.51: to the nearest pack, 0.516667\n" in said) == (epochs == 0.51)


def test_ddp_packed_epoch_reads_every_protein(dataset, tmp_path):
    args = arguments(dataset)
    packs = PreparedData(args.data, ESM2_TOKENS).plan.packs_per_epoch()
    train(dataset, tmp_path, num_train_epochs=1, max_steps=None, logging_steps=100)
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (state["step"], state["sequences"], state["epoch"]) == (packs, NUM_TRAIN, 1.0)
    assert 0.9 * packs * args.data.tokens_per_pack < state["tokens"] <= packs * args.data.tokens_per_pack


@pytest.mark.slow
def test_ddp_guides_command_runs_under_torchrun(dataset, tmp_path):
    """The first guide's flags, as it writes them; the model is the tiny one."""
    flags = {
        "dataloader_num_workers": 2,
        "bf16": True,
        "do_eval": True,
        "do_preprocess": False,
        "do_train": True,
        "gradient_accumulation_steps": 1,
        "logging_steps": 16,
        "num_train_epochs": 1,
        "max_steps": None,
        "per_device_train_batch_size": 8,
        "max_train_samples": 200,
        "tokenizer_name": "facebook/esm2_t6_8M_UR50D",
        "torch_compile": False,
        "pad_to_max_length": True,
        "max_seq_length": 96,
        "ddp_bucket_cap_mb": 125,
        "disable_tqdm": None,
    }
    out = tmp_path / "out"
    done = run_training(dataset, out, nproc=2, **flags)
    assert done.returncode == 0, done.stderr
    for split in ("train", "eval"):
        assert done.stdout.count(f"***** {split} metrics *****") == 1, "rank 0 alone speaks"
    assert done.stderr.count("step: 13/13") == 1
    assert [row["step"] for row in rows(out)] == [1, 13]
    written = {path.name for path in out.iterdir()}
    results = {f"{name}_results.json" for name in ("train", "eval", "test", "all")}
    assert results | {"metrics.jsonl", "training_curves.png", "trainer_state.json", "final_model"} <= written
    assert "UserWarning" not in done.stderr
    # What the other tests start in forked processes is this very run.
    train(dataset, tmp_path / "forked", nproc=2, **flags | {"do_eval": False})
    assert losses(out) == losses(tmp_path / "forked")
    assert same_bits(final_weights(out), final_weights(tmp_path / "forked"))
