"""Runs of decoders: the reference is transformers' model in one process, over the same contexts."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.cli import UserError
from common.data.loader import TrainLoader
from common.data.packs_per_step import PacksPerStep
from common.distributed.world import World
from common.training.command_line import parse_run
from common.training.load_model import load_model
from extras.export import export
from extras.families.decoders.convert import ADAPTER
from extras.families.text.contexts import causal_batches
from extras.families.text.data import open_text
from extras.families.text.tokenizers import ByteTokenizer
from tests.data_fixtures import load_script
from tests.decoder_fixtures import decoder_flags, train_decoder, write_text
from tests.extras.families.text.test_tokenizers import trained
from tests.forked import run_script
from tests.live_runs import LiveRun, assert_same_run, newest_step
from tests.training.hostile_changes import vouch
from tests.training_fixtures import (
    checkpoint_state,
    final_weights,
    losses,
    on_ranks,
    relative_difference,
    rows,
    same_bits,
)

STEPS = 6
MIXTRAL = {"model_type": "mixtral", "activation_checkpointing": "none"}
EMULATED = {"fp8": 1, "emulate_precision": 1}
TIED = {"hidden_width": 64, "num_layers": 2, "model_type": None, "model": "llama3_2_1b", "num_heads": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "documents")


def arguments(text: Path, out: Path, **flags):
    return parse_run("", load_script("train_fsdp2.py").FsdpFlags, decoder_flags(text, out, **flags))


def reference(text: Path, out: Path, **flags) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, gradient norms, weights) of `STEPS` steps of transformers' model with torch's own AdamW.

    It begins with our initial weights, and takes the contexts of each step one by one.
    """
    args, alone = arguments(text, out, **flags), World(0, 0, 1, torch.device("cpu"))
    built = load_model(args, alone)
    weights = {name: p.detach().clone() for name, p in built.model.named_parameters()}
    stock = built.config.to_transformers()
    coefficient = stock.router_aux_loss_coef if built.config.num_local_experts else 0.0
    stock.output_router_logits = bool(coefficient)
    directory = out / "transformers"
    model = getattr(transformers, built.config.architecture)(stock)
    model.save_pretrained(directory)
    tensors = dict(ADAPTER.to_hf(weights.__getitem__, built.config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    matrices, norms = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    groups = [
        {"params": matrices, "weight_decay": args.optimizer.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=0.0, betas=(args.optimizer.adam_beta1, args.optimizer.adam_beta2), eps=args.optimizer.adam_epsilon
    )
    data = open_text(args.data, alone, False, ByteTokenizer())
    order = data.order(PacksPerStep.of(args.data.packs_per_step))
    loader = TrainLoader(order, causal_batches(args.data, alone.mesh), num_steps=STEPS)
    found, of_norms = [], []
    for step, share in enumerate(loader):
        total, predicted = torch.zeros(()), sum(batch["num_targets"] for batch in share.micro_batches)
        for batch in share.micro_batches:
            ids = batch["input_ids"].view(-1, args.data.max_seq_length)
            output = model(ids)
            logits = output.logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
            if coefficient:
                loss = loss + coefficient * output.aux_loss * batch["num_targets"]
            (loss / predicted).backward()
            total += loss.detach() / predicted
        of_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.optimizer.max_grad_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = args.optimizer.schedule(STEPS)(step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    model.save_pretrained(directory)
    return found, of_norms, load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    return reference(text, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def two_ranks(text, tmp_path_factory):
    """(directory, what was printed) of train_fsdp2.py on two ranks, uninterrupted."""
    out = tmp_path_factory.mktemp("fsdp2") / "run"
    return out, train_decoder(text, out, 2, validation_freq=3)


def check(out: Path, expected: tuple[list[float], list[float], dict[str, torch.Tensor]]) -> None:
    """Losses to 1e-5, gradient norms to 1e-4, the weights after six steps to 1e-5 of their norm.

    fp32 sums of other orders differ by some 1e-7; Adam's first steps carry a gradient's rounding, where it is small
    itself, over into the weights.
    """
    theirs, norms, weights = expected
    assert losses(out) == pytest.approx(theirs, rel=1e-5)
    assert [row["grad_norm"] for row in rows(out)] == pytest.approx(norms, rel=1e-4)
    assert relative_difference(final_weights(out), weights) < 1e-5


def test_decoder_run_equals_transformers(text, plain, tmp_path):
    train_decoder(text, tmp_path, script="train_ddp.py")
    check(tmp_path, plain)


def test_decoder_run_on_two_ranks_equals_transformers(plain, two_ranks):
    check(two_ranks[0], plain)


@pytest.mark.parametrize(("script", "ranks"), [("train_fsdp2.py", 4), ("train_ddp.py", 2), ("train_mfsdp.py", 2)])
def test_decoder_run_of_any_strategy_equals_transformers(text, plain, tmp_path, script, ranks):
    train_decoder(text, tmp_path, ranks, script=script)
    check(tmp_path, plain)


@pytest.mark.parametrize("family", [MIXTRAL, TIED], ids=["mixtral", "tied"])
def test_decoder_experts_and_tied_embeddings_equal_transformers(text, tmp_path, family):
    expected = reference(text, tmp_path, **family)
    train_decoder(text, tmp_path / "run", 2, **family)
    check(tmp_path / "run", expected)
    generates_alike(tmp_path / "run" / "final_model", family)


def generates_alike(directory: Path, flags: dict) -> None:
    """transformers' greedy generation from an export is ours, token for token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert model.config.eos_token_id == tokenizer.eos_token_id == ByteTokenizer.eos_id
    assert model.config.tie_word_embeddings == (flags is TIED)
    ids = tokenizer("train 5: the", return_tensors="pt")["input_ids"]
    theirs = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
    args = parse_run(
        "", load_script("train_ddp.py").DdpFlags, [f"--model_name_or_path={directory}", "--dataset=x", "--bf16=0"]
    )
    mine = load_model(args, World(0, 0, 1, torch.device("cpu"))).model
    with torch.no_grad():
        for _ in range(24):
            if ids[0, -1] == ByteTokenizer.eos_id:
                break
            ids = torch.cat((ids, mine(ids).logits[:, -1:].argmax(-1)), 1)
    assert ids[0].tolist() == theirs.tolist()


def test_decoder_export_generates_like_the_model(two_ranks):
    generates_alike(two_ranks[0] / "final_model", {})


def results_of(card: str) -> str:
    return card[card.index("\n## Results") : card.index("\n## Training")]


def test_decoder_export_of_checkpoint_equals_final_model(two_ranks, tmp_path):
    out, _ = two_ranks
    done = run_script("extras.export", out / "checkpoint-6", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert same_bits(exported, final_weights(out))
    names = {path.name for path in (out / "final_model").iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    assert "tokenizer.json" in names
    cards = [(directory / "README.md").read_text() for directory in (out / "final_model", tmp_path / "model")]
    assert cards[0].replace(results_of(cards[0]), "") == cards[1]  # a checkpoint knows no results
    assert "| training steps | 6 |\n" in cards[0]


def test_decoder_export_refuses_other_tokenizer(two_ranks, tmp_path):
    """The name in a checkpoint may be any path, and the tokenizer there may have been replaced."""
    checkpoint = Path(shutil.copytree(two_ranks[0] / "checkpoint-6", tmp_path / "checkpoint-6"))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["arguments"]["tokenizer"] = str(trained(tmp_path / "other"))
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    vouch(checkpoint)
    with pytest.raises(UserError, match="trained with another tokenizer than is at"):
        export(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_decoder_log_has_the_guides_lines(two_ranks):
    out, said = two_ranks
    parameters = 2 * 272 * 48 + 48 + 2 * (2 * 48 + 48 * 80 + 48 * 48 + 3 * 48 * 80)
    assert f"Created model with total parameters: {parameters} (0.00 B)" in said
    found = re.findall(r"Batch (\d+) Loss: (\d+\.\d{5}), Speed: (\d+\.\d\d) samples/sec, lr: (\d\.\d{6}),", said)
    assert [int(number) for number, *_ in found] == list(range(STEPS))
    for (_, loss, speed, rate), row in zip(found, rows(out), strict=True):
        assert float(loss) == pytest.approx(row["loss"], abs=1e-5)
        assert float(rate) == pytest.approx(row["learning_rate"], abs=1e-6)
        # 4 packs of 2 contexts a step, of all ranks, in the seconds that hold the wait for data.
        assert float(speed) == pytest.approx(8 / row["step_seconds"], abs=0.01)
        assert row["data_wait_seconds"] < row["step_seconds"]
    assert [row["step"] for row in rows(out) if "eval_loss" in row] == [3, 6]


@pytest.mark.slow
def test_decoder_resume_after_stop_is_bit_identical(text, two_ranks, tmp_path):
    """With both directories the same, as the guides have it: at first there is nothing; then the newest counts."""
    out = tmp_path / "checkpoints"
    flags = {"resume_from_checkpoint": out, "validation_freq": 3}
    train_decoder(text, out, 2, stop_at_step=3, **flags)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-3"]
    train_decoder(text, out, 2, **flags)
    assert same_bits(final_weights(out), final_weights(two_ranks[0]))
    assert losses(out) == losses(two_ranks[0])
    assert "nothing to train" in train_decoder(text, out, 2, **flags)


def test_decoder_resume_after_kill_is_bit_identical(text, tmp_path):
    out, flags = tmp_path / "killed", {"max_steps": 60}
    argv = decoder_flags(text, out, **flags)
    with LiveRun(None, out, tmp_path / "logs", 2, script="train_fsdp2.py", argv=argv) as run:
        run.until(lambda: newest_step(out) >= 6)
        run.signal(signal.SIGKILL)
        assert run.end() == [-signal.SIGKILL] * 2
    end = newest_step(out) + 6
    for directory in (out, tmp_path / "whole"):
        train_decoder(text, directory, 2, **flags, stop_at_step=end)
    assert_same_run(out, tmp_path / "whole", end, tmp_path)


def test_decoder_resumes_on_other_number_of_ranks(text, plain, tmp_path):
    train_decoder(text, tmp_path, 2, stop_at_step=3)
    train_decoder(text, tmp_path, 4, script="train_ddp.py")
    check(tmp_path, plain)


CP, GATHERED = {"script": "train_ddp_cp.py"}, {"cp_size": 2, "cp_comm_type": "all_gather"}


@pytest.mark.parametrize(
    "legs",
    [[(2, CP), (4, GATHERED)], pytest.param([(2, CP), (1, {}), (4, CP | {"cp_size": 4})], marks=pytest.mark.slow)],
    ids=["DDP, FSDP2", "2, 1, 4"],
)
def test_decoder_with_shared_packs_equals_transformers_and_resumes_on_other_size(text, plain, tmp_path, legs):
    """legs: (ranks, flags) of each start; 2 ranks in a ring first. DDP, FSDP2: then two groups of two that gather."""
    for number, (ranks, flags) in enumerate(legs, 1):
        train_decoder(text, tmp_path, ranks, stop_at_step=STEPS * number // len(legs), **flags)
    check(tmp_path, plain)


def test_decoder_refuses_checkpoint_of_other_model(text, two_ranks, tmp_path):
    """The guides' five sizes of Llama share one directory: there 13B would resume from 7B."""
    out, _ = two_ranks
    before = sorted(path.name for path in out.iterdir())
    said = train_decoder(text, out, expect=2, resume_from_checkpoint=out, num_layers=3)
    assert "the checkpoint is of another model: num_hidden_layers 2 (now 3)" in said
    assert sorted(path.name for path in out.iterdir()) == before
    elsewhere = train_decoder(text, tmp_path / "new", expect=2, resume_from_checkpoint=out, hidden_width=36)
    assert "of another model: hidden_size 48 (now 36)" in elsewhere
    assert not (tmp_path / "new").exists()


def _initial_rows(argv: list[str], directory: str) -> None:
    """Every rank writes the rows of the initial weights that it holds."""
    from common.distributed.process_group import distributed_run
    from common.distributed.shards import local_shard

    script = load_script("train_fsdp2.py")
    args = script.parse_run("", script.FsdpFlags, argv)
    with distributed_run(args.process) as world:
        model = load_model(
            args, world, shard=lambda model: script.shard(model, world, args.strategy, args.precision.bf16)
        ).model
        held = {name: (local_shard(p)[1], local_shard(p)[0].clone()) for name, p in model.named_parameters()}
        torch.save(held, f"{directory}/{world.rank}.pt")


def test_decoder_initial_weights_are_independent_of_ranks(text, tmp_path):
    flags = MIXTRAL | {"vocab_size": 600}  # more rows than a stream of random numbers has
    args = arguments(text, tmp_path, **flags)
    whole = dict(load_model(args, World(0, 0, 1, torch.device("cpu"))).model.named_parameters())
    codes, said = on_ranks(3, _initial_rows, decoder_flags(text, tmp_path, **flags), str(tmp_path))
    assert codes == [0, 0, 0], said
    seen = dict.fromkeys(whole, 0)
    for rank in range(3):
        for name, (first, held) in torch.load(tmp_path / f"{rank}.pt").items():
            assert torch.equal(held, whole[name][first : first + len(held)]), (rank, name)
            seen[name] += len(held)
    assert seen == {name: len(parameter) for name, parameter in whole.items()}


@pytest.mark.slow
def test_decoder_learns_more_than_frequencies(text, tmp_path):
    """PlotLabels of a list, in bytes: below the entropy of single bytes (about 3 nats) by far."""
    train_decoder(text, tmp_path, 1, max_steps=60, lr=8e-3, validation_freq=60, bf16=1, document_masks=1)
    counts = torch.bincount(torch.tensor(list((text / "train.jsonl").read_bytes()))).double()
    share = counts[counts > 0] / counts.sum()
    unigram = -(share * share.log()).sum().item()
    held_out = [row["eval_loss"] for row in rows(tmp_path) if "eval_loss" in row][-1]
    assert math.isclose(losses(tmp_path)[0], math.log(272), rel_tol=0.15)  # it begins by guessing
    assert held_out < 0.75 * unigram


@pytest.mark.parametrize(
    "flags",
    [
        {"activation_checkpointing": "selective", "offload_activations": 1},
        {"cpu_offload": 1, "sharding_strategy": "hybrid", "hsdp_shard_size": 1},
        {"document_masks": 1, "sync_each_batch": 1},
    ],
    ids=["selective", "offload", "documents"],
)
def test_decoder_memory_flags_change_no_result(text, two_ranks, tmp_path, flags):
    train_decoder(text, tmp_path, 2, max_steps=2, save_final_model=False, **flags)
    same = "document_masks" not in flags
    assert (losses(tmp_path) == pytest.approx(losses(two_ranks[0])[:2], rel=1e-5)) == same


@pytest.mark.parametrize(
    ("family", "recipes"),
    [
        pytest.param({}, {"delayed": {}, "nvfp4": {"fp8": 0, "fp4": 1}}, marks=pytest.mark.slow),
        (MIXTRAL, {"nvfp4": {"fp8": 0, "fp4": 1}}),
    ],
    ids=["llama", "mixtral"],
)
def test_decoder_layers_compute_in_emulated_formats(text, tmp_path, family, recipes):
    """Each format rounds differently, so each run has other losses; experts get any number of rows."""
    sizes = {"hidden_width": 64, "num_heads": 4, "intermediate_size": 96, "max_steps": 2, "save_final_model": False}
    seen = {}
    for name, recipe in {"exact": None, **recipes}.items():
        out = tmp_path / name
        train_decoder(text, out, **sizes, **family, **({} if recipe is None else EMULATED | recipe))
        seen[name] = tuple(losses(out))
    exact = seen["exact"]
    assert len(set(seen.values())) == 1 + len(recipes)
    for name in recipes:  # rounding is at most 1/8 in E2M1 and 1/16 in E4M3, averaged over a matmul's terms
        assert seen[name] == pytest.approx(exact, rel=0.1 if name == "nvfp4" else 0.03), name


def test_decoder_checkpoint_stores_tied_embeddings_once(text, tmp_path):
    train_decoder(text, tmp_path, 2, max_steps=1, save_final_model=False, **TIED)
    model = checkpoint_state(tmp_path / "checkpoint-1", tmp_path)["model"]
    assert sum(name in ("embed_tokens.weight", "lm_head.weight") for name in model) == 1


@pytest.mark.parametrize("flags", [pytest.param({}, marks=pytest.mark.slow), MIXTRAL], ids=["llama", "mixtral"])
def test_decoder_with_muon_equals_one_process(text, tmp_path, flags):
    flags = flags | {"optim": "muon"}
    train_decoder(text, tmp_path / "alone", **flags)
    train_decoder(text, tmp_path / "fsdp2", 4, sharding_strategy="hybrid", hsdp_shard_size=2, **flags)
    assert losses(tmp_path / "fsdp2") == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    assert relative_difference(final_weights(tmp_path / "fsdp2"), final_weights(tmp_path / "alone")) < 1e-5
