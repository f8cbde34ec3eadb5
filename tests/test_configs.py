"""configs/: every file is taken by the scripts it is for, says what its source says, and the sanity run runs."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from common.cli import UserError
from common.data.training_data import open_data
from common.distributed.world import World
from common.files.runs import list_checkpoints
from common.flags import flat
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training import command_line as tasks
from extras.families.decoders.config import GUIDE_RUNS, PRESETS
from extras.families.decoders.model import DecoderForCausalLM
from extras.prepare.sample import SAMPLE
from tests.conftest import ROOT
from tests.data_fixtures import load_script
from tests.forked import run_script
from tests.training_fixtures import TINY_OVERRIDES, _main, environment, losses, on_ranks, rows

DDP, FSDP = ("train_ddp.py", "DdpFlags"), ("train_fsdp2.py", "FsdpFlags")
CP, MFSDP = ("train_ddp_cp.py", "DdpCpFlags"), ("train_mfsdp.py", "MegatronFlags")
PAPER = {"adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-8, "max_seq_length": 1024, "mlm_probability": 0.15}
LARGE = PAPER | {"max_steps": 500_000, "save_steps": 1000, "save_total_limit": 5, "logging_steps": 100, "bf16": True}
LARGE |= {"streaming": True, "dataset": "nvidia/esm2_uniref_pretraining_data", "dataset_dir": None}
GUIDE_RUN = {"config_name": "facebook/esm2_t6_8M_UR50D", "max_train_samples": 100_000, "max_seq_length": 512}
GUIDE_RUN |= {"pad_to_max_length": True, "bf16": True, "do_eval": True, "logging_steps": 16, "warmup_steps": 0}
GUIDE_RUN |= {"learning_rate": 5e-5, "lr_scheduler_type": "linear", "weight_decay": 0, "adam_beta2": 0.999}
CONFIGS = {  # NAME: (what the source says, scripts)
    "sanity": (PAPER | {"max_steps": 250, "per_device_train_batch_size": 2, "warmup_steps": 100}, [DDP, FSDP, MFSDP]),
    "sanity_cp": (
        PAPER
        | {"max_steps": 250, "cp_size": 2, "tokens_per_pack": 1600, "pad_sequences_to_be_divisible_by": 16}
        | {"warmup_steps": 100, "save_steps": 50, "save_total_limit": 5, "learning_rate": 4e-4},
        [CP, FSDP, MFSDP],
    ),
    "esm2_650m": (LARGE | {"per_device_train_batch_size": 4, "warmup_steps": 2000}, [DDP, FSDP, MFSDP]),
    "esm2_3b": (LARGE | {"per_device_train_batch_size": 16, "warmup_steps": 20_000}, [DDP, FSDP, MFSDP]),
    "esm2_15b": (
        LARGE | {"per_device_train_batch_size": 12, "learning_rate": 1.6e-4, "weight_decay": 0.1},
        [DDP, FSDP, MFSDP],
    ),
    "amplify_120m": (
        {"max_steps": 900_000, "learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
        | {"weight_decay": 0.01, "lr_scheduler_type": "cosine_linear", "min_lr_rate": 0.1, "warmup_steps": 1000}
        | {"mlm_probability": 0.15, "max_seq_length": 512, "config_name": "chandar-lab/AMPLIFY_120M"}
        | {"max_grad_norm": 1, "sequence_packing": False, "bf16": True},
        [DDP, FSDP, MFSDP],
    ),
    "guide_ddp": (
        GUIDE_RUN
        | {"per_device_train_batch_size": 8, "num_train_epochs": 1, "max_steps": -1, "ddp_bucket_cap_mb": 125},
        [DDP, CP],
    ),
    "guide_fsdp": (
        GUIDE_RUN
        | {"per_device_train_batch_size": 4, "packs_per_step": 22, "max_steps": 1136, "torch_compile": False},
        [FSDP, MFSDP],
    ),
}
PROTEINS = {"tokenizer": "residues", "directions": "both", "vocab_size": 64, "max_seq_length": 1024}
PROTEINS |= {"tokens_per_step": 1 << 19, "bf16": True, "num_attention_heads": 16, "adam_beta2": 0.95}
SHAPES = {  # ProGen2's,
    "protein_decoder_151m": ({"num_hidden_layers": 12, "hidden_size": 1024, "learning_rate": 6e-4}, 151e6),
    "protein_decoder_764m": ({"num_hidden_layers": 27, "hidden_size": 1536, "learning_rate": 2.5e-4}, 764e6),
}
CONFIGS |= {name: (PROTEINS | shape, [DDP, FSDP, MFSDP]) for name, (shape, _) in SHAPES.items()}
# The FSDP guides' runs, by this project's flag names.
for name, run in GUIDE_RUNS.items():
    own_directory = run.checkpoint_dir not in (None, "checkpoints")
    said = {"model": name, "max_steps": run.max_steps, "per_device_train_batch_size": run.train_batch_size}
    said |= {"max_seq_length": PRESETS[name].context, "save_steps": run.checkpoint_freq or 1000}
    said |= {"seed": run.seed or 12345}  # theirs, or their script's default
    said |= {"eval_steps": run.validation_freq, "dataset": "allenai/c4", "dataset_config_name": "en"}
    said |= {"output_dir": run.checkpoint_dir if own_directory else f"checkpoints/{name}", "offload_activations": True}
    CONFIGS[name] = (said | {"activation_checkpointing": "full", "sharding_strategy": "full"}, [FSDP])


def parse(script: tuple[str, str], *argv):
    module = load_script(script[0])
    return module.parse_run("", getattr(module, script[1]), [str(word) for word in argv])


def test_configs_are_all_tested():
    assert {path.stem for path in (ROOT / "configs").glob("*.*")} == set(CONFIGS)  # sizes/: tests/ops/test_defaults.py


@pytest.mark.parametrize("name", CONFIGS)
def test_config_matches_its_source(name):
    """Of a repository, its header names the commit: a later one may have other values."""
    said, scripts = CONFIGS[name]
    header = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert "# Source: " in header
    assert name.startswith(("guide_", *SHAPES)) or re.search(r"\bat [0-9a-f]{7}\b", header)
    for script in scripts:
        args = parse(script, ROOT / "configs" / f"{name}.yaml")
        assert said.items() <= flat(args).items()


@pytest.mark.parametrize("name", SHAPES)
def test_protein_decoder_has_the_published_number_of_parameters(name):
    model = parse(DDP, ROOT / "configs" / f"{name}.yaml").model
    config, _ = model.decoder_config(1024)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DecoderForCausalLM(config).parameters())
    layer = config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size + 2)
    assert parameters == config.num_hidden_layers * layer + (2 * 64 + 1) * config.hidden_size
    assert parameters == pytest.approx(SHAPES[name][1], rel=0.003)


def test_amplify_step_has_its_authors_proteins():
    """README, Example 2: 2 nodes of 4 GPUs, per_device_batch_size 256, gradient_accumulation_steps 2."""
    batches = parse(DDP, ROOT / "configs" / "amplify_120m.yaml").data
    assert batches.per_device_train_batch_size * batches.packs_per_step == 2 * 4 * 256 * 2
    assert batches.packs_per_step % 8 == 0  # a node of 8 GPUs


@pytest.mark.parametrize(
    "words",
    ["--config-name {}", "--config_name={}", "--seed=7 --config-name={} --bf16", "--bf16 --config-name {} --seed=7"],
)
@pytest.mark.parametrize(("name", "file"), [*tasks.RECIPE_CONFIGS.items(), ("esm2_3b", "esm2_3b")])
def test_config_name_runs_the_config_of_that_name(name, file, words):
    rest = (
        words.replace("--config-name {}", "").replace("--config_name={}", "").replace("--config-name={}", "").split()
    )
    named = parse(DDP if file != "sanity_cp" else CP, *words.format(name).split())
    assert flat(named) == flat(parse(DDP if file != "sanity_cp" else CP, ROOT / "configs" / f"{file}.yaml", *rest))


def test_config_name_of_a_model_is_no_file_of_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = ["--dataset_dir=d", "--output_dir=out"]
    for name in ("facebook/esm2_t6_8M_UR50D", "../configs/sanity", "no_such_name"):
        assert parse(DDP, "--config_name", name, *where).model.config_name == name
    (tmp_path / "sanity").mkdir()  # a configuration of somebody's own
    assert parse(DDP, "--config_name=sanity", *where).model.config_name == "sanity"


@pytest.mark.parametrize("name", ["L1_5B", "bench_b200_3b_fp8"])
def test_config_name_of_the_recipe_alone_names_those_that_are_here(name):
    with pytest.raises(UserError, match=f"--config_name {name}: .* L0_sanity, L0_sanity_cp, L1_650M, .*: choose one"):
        parse(DDP, "--config-name", name, "--bf16")


def test_config_name_excludes_another_file_of_flags():
    with pytest.raises(UserError, match=r"--config_name L0_sanity: .*configs/sanity.yaml, .*other.yaml another: drop"):
        parse(DDP, "other.yaml", "--config-name", "L0_sanity")


def test_dataset_dir_replaces_the_dataset_of_a_config():
    args = parse(FSDP, ROOT / "configs" / "esm2_650m.yaml", "--dataset_dir=processed/arrow")
    assert (args.data.dataset_dir, args.data.dataset, args.data.streaming) == ("processed/arrow", None, False)


@pytest.mark.parametrize(
    ("argv", "starts_from"),
    [
        (["configs/esm2_650m.yaml", "--model_name_or_path=d"], "d"),
        (["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=a=1", "--model_name_or_path=d"], "d"),
        (["--model_name_or_path=d", "--config_name=facebook/esm2_t6_8M_UR50D"], None),
        (["configs/llama3_2_1b.yaml", "--model_name_or_path=d"], "d"),
        (["--model=llama3_2_1b", "--model_name_or_path", "d"], "d"),
        (["--model_name_or_path=d", "--model", "llama3_2_1b"], None),
    ],
)
def test_last_of_config_and_weights_wins(argv, starts_from):
    args = parse(FSDP, *argv, "--dataset=x", "--max_steps=1", "--output_dir=out")
    named = flat(args).get("config_name") or flat(args).get("model")
    assert (args.model.model_name_or_path, named is None) == (starts_from, starts_from is not None)


@pytest.mark.parametrize("script", [DDP, FSDP, MFSDP], ids=["ddp", "fsdp2", "mfsdp"])
def test_script_without_flags_is_the_sanity_run(script, caplog):
    with caplog.at_level(logging.INFO):
        assert flat(parse(script)) == flat(parse(script, tasks.CONFIGS / "sanity.yaml"))
    (line,) = caplog.messages
    assert "250 short steps" in line
    assert "into out/sanity" in line
    assert "sanity.yaml --dataset my.fasta --output_dir out/mine" in line


def _without_flags(directory: str, script: str) -> None:
    """`python SCRIPT` in its own directory, stopped once the first step is in metrics.jsonl."""
    os.chdir(directory)
    metrics = Path("out/sanity/metrics.jsonl")

    def stop() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    _main([], script)


def test_script_without_flags_trains(tmp_path):
    codes, said = on_ranks(1, _without_flags, str(tmp_path), "train_ddp.py")
    assert codes == [75], said[0]
    assert "No flags given" in said[0]
    assert rows(tmp_path / "out" / "sanity")[0]["total_steps"] == 250
    assert list_checkpoints(tmp_path / "out" / "sanity")


def test_cp_script_without_flags_on_two_ranks_and_on_one(tmp_path):
    codes, said = on_ranks(1, _without_flags, str(tmp_path), "train_ddp_cp.py")
    assert codes == [2], said[0]
    assert "/configs/sanity_cp.yaml: 250 short steps of facebook/esm2_t6_8M_UR50D" in said[0]
    assert "into out/sanity_cp. " in said[0]
    assert said[0].splitlines()[-1] == (
        "error: --cp_size 2 does not divide the number of ranks, 1: choose --cp_size 1, or start 2 ranks (torchrun "
        "--nproc_per_node)"
    )
    assert not list(tmp_path.iterdir())


def sanity(out: Path, *more: str, name: str = "sanity") -> list[str]:
    where = [f"--output_dir={out}", f"--config_overrides={TINY_OVERRIDES}"]
    return [f"configs/{name}.yaml", "--max_steps=3", *where, *more]


def test_sanity_run_of_one_process_is_complete_for_two(tmp_path):
    """README's two first commands one after the other: what one of them has done, the other finds done."""
    done = run_script("train_ddp.py", *sanity(tmp_path), env=environment())
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path)) == 2  # after the first step and the last
    made = (tmp_path / SAMPLE / "train.fasta").stat().st_mtime_ns
    codes, said = on_ranks(2, _main, sanity(tmp_path), "train_fsdp2.py")
    assert codes == [0, 0], "\n".join(said)
    assert "Step 3 of 3 is done already: nothing to train" in said[0]
    assert (tmp_path / SAMPLE / "train.fasta").stat().st_mtime_ns == made
    codes, said = on_ranks(2, _main, sanity(tmp_path, "--max_steps=4"), "train_fsdp2.py")
    assert codes == [2, 2]
    assert "a global batch of 1 packs does not divide among 2 data-parallel ranks" in said[0]


def test_sanity_run_on_two_processes_with_evaluation(tmp_path):
    codes, said = on_ranks(2, _main, sanity(tmp_path, "--do_eval", "--max_eval_samples=20"), "train_fsdp2.py")
    assert codes == [0, 0], "\n".join(said)
    assert "nothing to train" not in said[0]
    assert "eval_loss" in (tmp_path / "eval_results.json").read_text()


def test_sanity_run_with_context_parallelism(tmp_path):
    codes, said = on_ranks(2, _main, sanity(tmp_path, name="sanity_cp"), CP[0])
    assert codes == [0, 0], "\n".join(said)
    first, last = [row for row in rows(tmp_path) if "loss" in row]
    assert (first["step"], last["step"]) == (1, 3)
    assert 2 * 1600 < last["tokens"] <= 3 * 1600  # of one pack a step, which both ranks have a part of


def test_sample_is_not_a_directory_of_that_name(tmp_path, monkeypatch):
    (tmp_path / SAMPLE).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--dataset sample: a built-in name, but ./sample exists too"):
        open_data(
            parse(DDP).data,
            ESM2_TOKENS,
            World(0, 0, 1, torch.device("cpu")),
            False,
            {SAMPLE: lambda: pytest.fail("made")},
        )
