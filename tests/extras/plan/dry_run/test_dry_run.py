"""--dry_run: held to what torch's allocator held in real runs on CPU ranks, and to layouts that are known to run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.allocator_peak import PLAIN, run_measured
from common.cli import UserError
from common.flags import with_flags
from common.models.esm2.config import esm2_config
from common.models.esm2.model import Esm2ForMaskedLM
from common.training.command_line import parse_run
from extras.plan.dry_run import auto_pack
from extras.plan.dry_run.dry_run import GIB, hybrid, largest_pack
from extras.plan.dry_run.memory_estimate import MemoryEstimate, fake_run
from tests.data_fixtures import load_script
from tests.decoder_fixtures import decoder_flags, write_text
from tests.forked import run_script
from tests.training_fixtures import flags_of, on_ranks, train

FLAGS = {"train_ddp.py": "DdpFlags", "train_fsdp2.py": "FsdpFlags", "train_mfsdp.py": "MegatronFlags"}
FSDP = "train_fsdp2.py"


def script_and_arguments(script: str, argv: list[str]):
    module = load_script(script)
    return module, parse_run("", getattr(module, FLAGS[script]), argv)


def predicted(script: str, nproc: int, argv: list[str], *more: str) -> MemoryEstimate:
    module, args = script_and_arguments(script, [*argv, "--dry_run", f"--world_size={nproc}", *more])
    with fake_run(args, module.build) as run:
        return run.step(args.pack_tokens)


DEEPER = "num_hidden_layers=3,hidden_size=160,num_attention_heads=10,intermediate_size=640"
WIDER = "num_hidden_layers=2,hidden_size=240,num_attention_heads=10,intermediate_size=960"
PROTEINS = {"max_steps": 2, "tokens_per_pack": 512, "per_device_train_batch_size": None}
LLAMA = {"model_type": "llama_v2", "hidden_width": 128, "num_layers": 3, "num_heads": 8, "num_key_value_heads": 4}
LLAMA |= {"intermediate_size": 352, "max_context_width": 128, "train_batch_size": 4, "max_steps": 2, "bf16": 0}


@pytest.mark.parametrize(
    ("script", "nproc", "model", "flags"),
    [
        ("train_ddp.py", 1, DEEPER, {"bf16": True}),
        pytest.param("train_ddp.py", 2, WIDER, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        (FSDP, 2, WIDER, {"gradient_accumulation_steps": 2, "activation_checkpointing": "selective"}),
        pytest.param(
            FSDP,
            4,
            WIDER,
            {"sharding_strategy": "hybrid", "hsdp_shard_size": 2, "optim": "muon"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "train_ddp.py", 1, WIDER, {"optim": "muon", "tokens_per_pack": 128}, marks=pytest.mark.slow
        ),  # its step holds the most
        pytest.param(FSDP, 1, None, {"activation_checkpointing": "none"}, marks=pytest.mark.slow),
        pytest.param(FSDP, 2, None, {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_dry_run_peak_is_that_of_a_real_run(dataset, tmp_path, script, nproc, model, flags):
    if model:
        argv = flags_of(dataset, tmp_path / "out", config_overrides=model, **PROTEINS | PLAIN | flags)
    else:
        text = write_text(tmp_path / "text")
        argv = decoder_flags(text, tmp_path / "out", **LLAMA | PLAIN | flags)
    codes, said = on_ranks(nproc, run_measured, script, argv, str(tmp_path / "peak"))
    assert codes == [0] * nproc, "\n".join(said)
    peaks = [int((tmp_path / f"peak.{rank}").read_text()) for rank in range(nproc)]
    # gloo allocates buffers during collectives, from threads of its own
    assert predicted(script, nproc, argv, "--use_cpu").peak == pytest.approx(max(peaks), rel=0.10)


def test_dry_run_counts_weights_and_moments_of_rank_0_shard():
    overrides = "num_hidden_layers=1,hidden_size=40,num_attention_heads=2,intermediate_size=50"  # 40 / 16: uneven
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", f"--config_overrides={overrides}", "--tokens_per_pack=1024"]
    with torch.device("meta"):
        shapes = [p.shape for p in Esm2ForMaskedLM(esm2_config(1, 40, 2, intermediate_size=50)).parameters()]
    whole = sum(shape.numel() for shape in shapes)
    dealt = sum(-(-shape[0] // 16) * shape[1:].numel() for shape in shapes)
    assert dealt > whole / 16
    for script, numbers in ((FSDP, dealt), ("train_ddp.py", whole)):
        held = predicted(script, 16, argv)
        steps = 4 * len(shapes)  # AdamW counts them for each tensor, in fp32
        assert held.kinds["weights"] == 4 * numbers
        assert held.kinds["optimizer"] == 8 * numbers + steps
        if script == FSDP:
            assert held.checkpoint_copy == 12 * numbers + steps
        else:  # replicas share the copying, tensor by tensor
            largest = 4 * max(shape.numel() for shape in shapes)
            assert held.checkpoint_copy == pytest.approx(12 * whole / 16 + steps, abs=largest)


def test_largest_pack_fits_and_next_does_not():
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=num_hidden_layers=1", "--bf16"]
    module, args = script_and_arguments(FSDP, [*argv, "--max_seq_length=256", "--dry_run", "--world_size=4"])
    with fake_run(args, module.build) as run:
        known = run.step(2048)
        limit = int(3.3 * known.peak)
        found = largest_pack(run.step, known, limit, 256)
        assert found.tokens % 256 == 0
        assert found.peak <= limit < run.step(found.tokens + 256).peak
        assert largest_pack(run.step, known, 1000, 256) is None


@pytest.mark.slow
def test_auto_pack_is_the_largest_that_divides_the_batch(tmp_path, monkeypatch):
    """A rank's 8,192 tokens a step in as few packs as fit: one fewer does not."""
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=num_hidden_layers=1", "--bf16"]
    (tmp_path / "reserve.yaml").write_text("device_reserve: 0\n")
    argv = [str(tmp_path / "reserve.yaml"), *argv, "--max_seq_length=256", "--tokens_per_step=16384"]
    limit = 1.02 * predicted("train_ddp.py", 2, argv, "--tokens_per_pack=2048").peak
    more = ["--dry_run", "--world_size=2", f"--device_memory={limit / GIB}", "--tokens_per_pack=auto"]
    module, args = script_and_arguments("train_ddp.py", argv + more)
    assert args.pack_tokens == 8 * 256  # as long as it is not resolved
    assert args.with_pack(module.build).data.tokens_per_pack == 2048
    assert predicted("train_ddp.py", 2, argv, f"--tokens_per_pack={8192 // 3 // 256 * 256}").peak > limit

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=limit))
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = with_flags(args, dry_run=False, world_size=None, device_memory=None, output_dir=str(tmp_path))
    monkeypatch.setattr(auto_pack, "find_spec", lambda name: None)
    assert run.with_pack(module.build).data.tokens_per_pack == 2048
    monkeypatch.setattr(auto_pack, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="counts the torch backend's layers: add --backend torch, or give a number"):
        run.with_pack(module.build)

    tight = with_flags(args, device_memory=args.dry_run.device_memory / 100)
    with pytest.raises(UserError, match="--tokens_per_pack auto: not one sequence of --max_seq_length 256 fits"):
        tight.with_pack(module.build)
    with pytest.raises(UserError, match="with --dry_run it needs the GPU's memory: add, say, --device_memory 80"):
        with_flags(args, device_memory=None).with_pack(module.build)


def test_auto_pack_keeps_the_packs_of_a_checkpoint(dataset, tmp_path):
    """Without one it is refused on a CPU."""
    flags = {"per_device_train_batch_size": None, "max_steps": 1}
    argv = flags_of(dataset, tmp_path, **flags, tokens_per_pack="auto", tokens_per_step=4096)
    module, args = script_and_arguments("train_ddp.py", argv)
    with pytest.raises(UserError, match="it fills the memory of a GPU, and this run is on a CPU: give a number"):
        args.with_pack(module.build)
    train(dataset, tmp_path, **flags, tokens_per_pack=448)
    assert args.with_pack(module.build).data.tokens_per_pack == 448
    for anew in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": "false"}):
        with pytest.raises(UserError, match="give a number"):
            with_flags(args, **anew).with_pack(module.build)
    with pytest.raises(UserError, match="missing: --tokens_per_step "):
        script_and_arguments("train_ddp.py", flags_of(dataset, tmp_path, **flags, tokens_per_pack="auto"))
    with pytest.raises(UserError, match="'many' is neither a number nor auto"):
        script_and_arguments("train_ddp.py", flags_of(dataset, tmp_path, **flags, tokens_per_pack="many"))


def test_dry_run_of_a_batch_ramp_counts_its_largest_step(tmp_path):
    """Of a number of packs above the ranks, each micro-batch but the last holds gradients of the ones before."""
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=num_hidden_layers=1", "--max_seq_length=64"]
    (tmp_path / "ramp.yaml").write_text("packs_per_step_schedule: 0:2,9:8,20:4\n")
    ramp = predicted(FSDP, 2, [str(tmp_path / "ramp.yaml"), *argv])
    largest, first = (predicted(FSDP, 2, argv, f"--packs_per_step={packs}") for packs in (8, 2))
    assert ramp == largest
    assert ramp.peak > first.peak


@pytest.mark.slow
def test_dry_run_subtracts_recomputed_and_offloaded_activations():
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=num_hidden_layers=4"]
    argv += ["--bf16", "--bf16_residual=False", "--tokens_per_pack=4096"]
    ways = (["none"], ["selective"], ["full"], ["full", "--offload_activations"])
    held = [predicted(FSDP, 4, argv, f"--activation_checkpointing={way}", *more) for way, *more in ways]
    assert [h.peak for h in held] == sorted((h.peak for h in held), reverse=True)
    # What each of four layers is given: fp32 tokens, and where four sequences begin and the last one ends, int32.
    # The device keeps that of two, of which one is on its way.
    assert held[3].activations_on_host == 4 * (4096 * 320 * 4 + 5 * 4)
    assert held[2].activations_on_host == 0


def test_dry_run_shows_hybrid_sharding_beyond_a_node():
    """Two nodes that each have all weights hold on a rank what one node does alone."""
    wide = "num_hidden_layers=1,hidden_size=2560,intermediate_size=10240"
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", f"--config_overrides={wide}", "--max_seq_length=64"]
    module, args = script_and_arguments(FSDP, [*argv, "--dry_run", "--world_size=16"])
    line, _ = hybrid(args, module.build)
    alone = predicted(FSDP, 8, argv).peak / GIB
    assert alone > 0.1
    assert float(line.split()[0]) == pytest.approx(alone, abs=0.006)
    assert "--sharding_strategy hybrid" in line
    assert hybrid(with_flags(args, world_size=8), module.build) == []
    assert hybrid(with_flags(args, device_memory=80.0), module.build) == []  # is what it takes by itself
    assert hybrid(with_flags(args, sharding_strategy="grad_op"), module.build) == []


@pytest.mark.parametrize(("memory", "chosen"), [(80, True), (0.5, False), (None, False)])
def test_dry_run_takes_hybrid_sharding_where_a_node_holds_the_state(memory, chosen):
    wide = "num_hidden_layers=1,hidden_size=2560,intermediate_size=10240"
    argv = ["--config_name=facebook/esm2_t6_8M_UR50D", f"--config_overrides={wide}", "--max_seq_length=64"]
    flags = [*argv, "--dry_run", "--world_size=16", *([f"--device_memory={memory}"] if memory else [])]
    module, args = script_and_arguments(FSDP, flags)
    with fake_run(args, module.build) as run:
        assert any("Each node of 8 GPUs has all weights" in remark for remark in run.built.remarks) == chosen
        assert (run.strategy.replica_group is not None) == chosen


@pytest.mark.slow
def test_dry_run_fits_the_guides_layout_of_llama_8b():
    """Guide 003: Llama 3.1 8B on four nodes of eight H100 of 80 GB, batch 1, full sharding, activations offloaded."""
    guide = ["--model=llama3_1_8b", "--max_context_width=8192", "--train_batch_size=1", "--offload_activations=1"]
    held = predicted(FSDP, 32, guide)
    assert held.kinds["weights"] == pytest.approx(4 * 8_030_261_248 / 32, rel=1e-3)
    assert held.peak + 5 * GIB < 80 * GIB


def test_dry_run_that_does_not_fit_is_one_line_and_status_2(tmp_path):
    flags = ["--dry_run", "--config_name=facebook/esm2_t6_8M_UR50D", f"--output_dir={tmp_path / 'out'}"]
    flags += ["--tokens_per_pack=2048", "--device_memory=5.1"]
    done = run_script("train_ddp.py", *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "packs of 2,048 tokens do not fit" in line
    assert "peak of a step on the device" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        (FSDP, ["--world_size=4", "--dataset_dir=x", "--output_dir=y"], "missing: --dry_run"),
        (FSDP, ["--dry_run", "--device_memory=0"], "--device_memory 0.0: must be above 0"),
    ],
)
def test_dry_run_refuses_bad_flags(script, flags, said):
    with pytest.raises(UserError, match=said):
        script_and_arguments(script, ["--config_name=facebook/esm2_t6_8M_UR50D", *flags])
