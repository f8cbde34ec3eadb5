"""What the training tests share: a small dataset, a tiny model, and ways to run train_ddp.py and read what it left.

`run_training` starts the script as a user does (`python train_ddp.py` or `torchrun ... train_ddp.py`). `train` runs
the same `main` in processes forked from a server that has imported torch already: no mock, several times quicker.
train_mfsdp.py, which needs a GPU, finds stand-ins for what its library calls of CUDA (tests/megatron_on_cpu.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from benchmarks.measuring import file_first
from common.files.safe_files import read_json_lines
from common.flags import checked, with_flags
from common.models.layers.compiling import compile_layers
from common.training.masked_lm import TrainArguments
from extras.prepare.sample import write_sample
from tests import megatron_on_cpu
from tests.data_fixtures import DOWNLOAD, TOKENIZE, call
from tests.forked import ROOT, context, run_script
from tests.patience import TIMEOUT_S, join, run

TINY_OVERRIDES = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
TINY_MODEL = {"config_name": "facebook/esm2_t6_8M_UR50D", "config_overrides": TINY_OVERRIDES}
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 240, 40, 20
MAX_SEQ_LENGTH = 128
DEFAULTS = {
    "max_seq_length": MAX_SEQ_LENGTH,
    "per_device_train_batch_size": 4,  # packed: 512 tokens a pack
    "max_steps": 12,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "disable_tqdm": True,
    "save_total_limit": 0,  # tests look at all of them
}


def make_dataset(directory: Path, num_proteins: int, validation: int, test: int, seed: int = 7) -> Path:
    """Generated proteins through steps 0 and 1; returns the directory of the splits."""
    fasta = directory / "sample.fasta"
    write_sample(fasta, num_proteins=num_proteins, families=min(12, num_proteins), seed=seed)
    call(DOWNLOAD, "--source", fasta, "--output_dir", directory)
    sizes = ("--train_size", num_proteins - validation - test, "--validation_size", validation, "--test_size", test)
    where = ("--input_dir", directory / "csv", "--output_dir", directory / "processed")
    call(TOKENIZE, *where, *sizes, "--preprocessing_num_workers", 1)
    return directory / "processed" / "arrow"


def dataset_of_tests(directory: Path) -> Path:
    """What the fixture `dataset` (tests/conftest.py) is."""
    return make_dataset(directory, NUM_TRAIN + NUM_VALIDATION + NUM_TEST, NUM_VALIDATION, NUM_TEST)


def flags_of(dataset_dir: Path | None, output_dir: Path, **flags) -> list[str]:
    """The command line of a run of the tiny model for 12 steps, each logged; `flags` add to it, None takes away."""
    model = {} if {"config_name", "model_name_or_path"} & flags.keys() else TINY_MODEL
    first, chosen = file_first({"dataset_dir": dataset_dir, "output_dir": output_dir} | model | DEFAULTS | flags)
    return [*first, *words_of(chosen)]


def words_of(flags: dict[str, Any]) -> list[str]:
    """Of a command line; None takes a flag away."""
    groups = [
        [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
        for name, value in flags.items()
        if value is not None
    ]
    return [word for group in groups for word in group]


def arguments(dataset_dir: Path, **flags) -> TrainArguments:
    """The flags of such a run, given flat, for calling parts of it in this process."""
    model = {} if {"config_name", "model_name_or_path"} & flags.keys() else TINY_MODEL
    places = {"dataset_dir": str(dataset_dir), "output_dir": "unused"}
    return checked(with_flags(TrainArguments(), **places | model | DEFAULTS | flags))


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def training_command(
    dataset_dir: Path | None,
    output_dir: Path,
    nproc: int = 1,
    script: str = "train_ddp.py",
    python: str = sys.executable,
    **flags,
) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    return [python, *launcher, str(ROOT / script), *flags_of(dataset_dir, output_dir, **flags)]


def run_training(dataset_dir: Path | None, output_dir: Path, nproc: int = 1, **flags) -> subprocess.CompletedProcess:
    """Run the script as a user does (nproc > 1: under torchrun). The caller looks at the return code.

    flags: `script` and `python`, too: the interpreter, a fresh one by default (tests/warm_python.py has another).
    """
    command = training_command(dataset_dir, output_dir, nproc, **flags)
    return run(command, env=environment(), cwd=ROOT)


def run_forked(dataset_dir: Path | None, output_dir: Path, **flags) -> subprocess.CompletedProcess:
    """One process, forked; what it printed, by stream. The caller looks at the return code."""
    return run_script("train_ddp.py", *flags_of(dataset_dir, output_dir, **flags), env=environment())


def train(
    dataset_dir: Path | None,
    output_dir: Path,
    nproc: int = 1,
    expect: int = 0,
    script: str = "train_ddp.py",
    compiler: str = "inductor",
    **flags,
) -> str:
    """The same in forked processes; asserts that all exit with status `expect`, returns what rank 0 printed.

    compiler: --torch_compile's. "aot_eager" traces and differentiates and computes the graph as it is: what is ours is
    tested in a second, where Inductor's C++ takes ten and more, the first time on a machine.
    """
    codes, said = on_ranks(nproc, _main, flags_of(dataset_dir, output_dir, **flags), script, compiler)
    assert codes == [expect] * nproc, f"exit codes {codes}\n" + "\n".join(said)
    return said[0]


def on_ranks(nproc: int, function: Callable, *arguments) -> tuple[list[int], list[str]]:
    """Call `function(*arguments)` in `nproc` processes that find torchrun's environment variables set.

    Returns exit codes and what each printed on standard output and standard error.
    """
    directory = Path(os.environ.get("TMPDIR", "/tmp"))
    logs = [directory / f"rank-{os.getpid()}-{time.monotonic_ns()}-{rank}.log" for rank in range(nproc)]
    port = free_port()
    processes = [
        context().Process(target=_as_rank, args=(rank, nproc, port, log, function, arguments))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    try:
        join(processes)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    said = [log.read_text() if log.exists() else "" for log in logs]
    for log in logs:
        log.unlink(missing_ok=True)
    assert None not in codes, f"still running after {TIMEOUT_S} s: exit codes {codes}\n" + "\n".join(said)
    return codes, said


def free_port() -> int:
    """A port without a listener, below the ephemeral range: a port of that range is taken by another process, once
    in some thousand runs, before ours binds it."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(limits.read_text().split()[0]) if limits.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(min(20000, lowest - 8000), lowest)
        with contextlib.closing(socket.socket()) as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port


def _as_rank(rank: int, nproc: int, port: int, log: Path, function: Callable, arguments: tuple) -> None:
    with open(log, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if nproc > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    function(*arguments)


def _main(argv: list[str], script: str = "train_ddp.py", compiler: str = "inductor") -> None:
    compile_layers.__defaults__ = (compiler,)
    if script == "train_mfsdp.py":
        megatron_on_cpu.install()
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def rows(output_dir: Path) -> list[dict]:
    """metrics.jsonl."""
    return read_json_lines(output_dir / "metrics.jsonl")


def losses(output_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(output_dir) if "loss" in row]


def final_weights(output_dir: Path) -> dict[str, torch.Tensor]:
    """The exported model, under Hugging Face's names."""
    return load_file(output_dir / "final_model" / "model.safetensors")


def checkpoint_state(checkpoint: Path, scratch: Path) -> dict:
    """{"model": {name: tensor}, "optimizer": {"state": {name: {moment: tensor}}}, ...} of a checkpoint's directory.

    As torch's own reader of sharded safetensors has it. scratch: a directory to use.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as links:
        for shard in checkpoint.glob("*.distcp"):
            Path(links, f"{shard.name}.safetensors").symlink_to(shard.resolve())
        stored = HuggingFaceStorageReader(links).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in stored.items()}
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(links), no_dist=True)
    state: dict = {"model": {}, "optimizer": {"state": {}}}
    for name, tensor in tensors.items():
        if name.startswith("optimizer.state."):
            parameter, _, moment = name.removeprefix("optimizer.state.").rpartition(".")
            state["optimizer"]["state"].setdefault(parameter, {})[moment] = tensor
        else:
            part, _, key = name.partition(".")
            state.setdefault(part, {})[key] = tensor
    return state


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all tensors together (Euclidean norms in fp64)."""
    assert a.keys() == b.keys()
    difference = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return (difference / sum(b[name].double().square().sum() for name in b)).sqrt().item()


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
