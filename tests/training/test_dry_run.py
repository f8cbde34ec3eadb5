"""--dry_run: held to what torch's allocator held in real runs on CPU ranks, and to layouts that are known to run."""

from __future__ import annotations

import pytest

from benchmarks.allocator_peak import PLAIN, run_measured
from common.cli import UserError
from common.training import dry_run
from common.training.held_memory import Held, rehearsed
from common.training.tasks import parse_run
from tests.data_fixtures import load_script
from tests.decoder_fixtures import decoder_flags, write_text
from tests.training_fixtures import flags_of, on_ranks, run_forked

FLAGS = {"train_ddp.py": "DdpFlags", "train_fsdp2.py": "FsdpFlags", "train_mfsdp.py": "MegatronFlags"}
FSDP = "train_fsdp2.py"
GB80 = ["--device_memory=80"]


def script_and_arguments(script: str, argv: list[str]):
    module = load_script(script)
    return module, parse_run("", getattr(module, FLAGS[script]), argv)


def predicted(script: str, nproc: int, argv: list[str], *more: str) -> Held:
    module, args = script_and_arguments(script, [*argv, "--dry_run", f"--world_size={nproc}", *more])
    with rehearsed(args, module.build) as run:
        return run.step(args.pack_tokens)


ESM2_8M = "num_hidden_layers=6,hidden_size=320,num_attention_heads=20,intermediate_size=1280"
WIDER = "num_hidden_layers=8,hidden_size=480,num_attention_heads=20,intermediate_size=1920"
PROTEINS = {"max_steps": 2, "tokens_per_pack": 2048, "per_device_train_batch_size": None}
LLAMA = {"model_type": "llama_v2", "hidden_width": 256, "num_layers": 4, "num_heads": 8, "num_key_value_heads": 4}
LLAMA |= {"intermediate_size": 704, "max_context_width": 256, "train_batch_size": 8, "max_steps": 2, "bf16": 0}


@pytest.mark.parametrize(
    ("script", "nproc", "model", "flags"),
    [
        ("train_ddp.py", 1, ESM2_8M, {"bf16": True}),
        ("train_ddp.py", 2, WIDER, {}),
        (FSDP, 2, ESM2_8M, {"gradient_accumulation_steps": 2, "activation_checkpointing": "selective"}),
        (FSDP, 4, WIDER, {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}),
        (FSDP, 1, None, {"activation_checkpointing": "none"}),
        (FSDP, 2, None, {"activation_checkpointing": "full"}),
    ],
)
def test_a_rank_of_a_real_run_holds_what_the_dry_run_says(dataset, tmp_path, script, nproc, model, flags):
    if model:
        argv = flags_of(dataset, tmp_path / "out", config_overrides=model, **PROTEINS | PLAIN | flags)
    else:
        text = write_text(tmp_path / "text")
        argv = decoder_flags(text, tmp_path / "out", **LLAMA | PLAIN | flags)
    codes, said = on_ranks(nproc, run_measured, script, argv, str(tmp_path / "peak"))
    assert codes == [0] * nproc, "\n".join(said)
    peaks = [int((tmp_path / f"peak.{rank}").read_text()) for rank in range(nproc)]
    # gloo has buffers of its own while it exchanges, which come and go with its threads
    assert predicted(script, nproc, argv, "--use_cpu").peak == pytest.approx(max(peaks), rel=0.10)
