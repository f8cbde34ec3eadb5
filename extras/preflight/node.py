"""Preflight's checks of a single node: GPUs, versions, shared memory, disks, the dataset."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import UserError
from common.data.alphabet import recorded_alphabet
from common.data.token_store import open_split
from common.files.runs import CHECKPOINT
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import ESM2_SIZES
from common.models.family import Family, family_of
from common.models.layers.initialise import count_parameters
from extras.families.decoders.config import PRESETS
from extras.preflight.report import ERROR, OK, WARN, Finding
from extras.prepare.sources.find_files import Source, open_source
from extras.prepare.sources.streamed_data import MemoryStore

BYTES_PER_PARAMETER = 12  # weights and two moments in fp32
BYTES_OF_MOMENT = 4


def named_model(name: str) -> Any:
    """A model with a built-in name, on the meta device; None for another name."""
    family: Family
    if name in PRESETS:
        family = family_of(PRESETS[name].config.model_type)
    elif name in ESM2_SIZES:
        family = family_of("esm")
    else:
        return None
    with torch.device("meta"):
        return family.make(family.load_config(name))


def bytes_needed(made: Any, limit: int, optim: str = "adamw_torch_fused") -> int:
    """Bytes of `limit` checkpoints of a model (0: at least two) and the next, written before the oldest is removed.

    optim: of the run; Muon keeps one moment of the layers' matrices.
    """
    size = BYTES_PER_PARAMETER * count_parameters(made)
    if optim == "muon":
        size -= BYTES_OF_MOMENT * sum(made.get_parameter(name).numel() for name in made.hidden_matrices())
    return size * ((limit or 2) + 1)


def checkpoint_bytes(output_dir: Path) -> int:
    """Bytes of the checkpoints that are there already, which newer ones replace."""
    return sum(
        file.stat().st_size
        for directory in output_dir.glob("checkpoint-*")
        if CHECKPOINT.fullmatch(directory.name)
        for file in directory.rglob("*")
        if file.is_file()
    )


DOCKER_SHM = 64 << 20  # docker's default /dev/shm: a few batches of a loader worker
ROOMY_SHM = 1 << 30
GB = 1e9
FULL_DISK = 1 * GB
SPLITS = ("train", "validation", "test")
EPHEMERAL = ("overlay", "tmpfs", "ramfs")


# ---- GPUs and versions --------------------------------------------------------------------------------------


def check_gpus(asked: int | None, use_cpu: bool, driver: Path = Path("/proc/driver/nvidia")) -> Finding:
    """GPUs that torch sees on this node, against the required number (None: any)."""
    if use_cpu:
        return Finding("gpus", OK, "not used (--use_cpu)")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not seen and driver.exists():
        todo = "compare nvidia-smi with torch.version.cuda: the driver is older, or torch was built without CUDA"
        return Finding("gpus", ERROR, f"the NVIDIA driver is loaded, but torch {torch.__version__} sees no GPU", todo)
    if seen:
        names = ", ".join(sorted({torch.cuda.get_device_name(number) for number in range(seen)}))
        detail = f"{seen} x {names}" if asked is None else f"{seen} x {names}, {asked} required"
    else:
        detail = "none" if not asked else f"none, {asked} required"
    if asked is not None and seen < asked:
        todo = "see nvidia-smi on that node; in a container: --gpus all, or nvidia.com/gpu in its resources"
        return Finding("gpus", ERROR, detail, todo)
    if asked and seen > asked:
        return Finding("gpus", WARN, detail, "the others are idle: raise --nproc_per_node")
    return Finding("gpus", OK, detail)


def check_own_gpu(local_rank: int) -> Finding | None:
    """Whether this rank's GPU computes; None if it does."""
    try:
        value = torch.ones(1024, device=f"cuda:{local_rank}").sum().item()
    except RuntimeError as error:
        todo = "drain the node and check the GPU (nvidia-smi -q, dmesg for Xid)"
        return Finding("gpus", ERROR, f"GPU {local_rank} does not compute: {str(error).splitlines()[0]}", todo)
    return None if value == 1024 else Finding("gpus", ERROR, f"GPU {local_rank} adds 1024 ones up to {value}")


def versions() -> dict[str, str]:
    """Versions, which must be the same on every node."""
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "transformer_engine"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "none"
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
        installed["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    installed["driver"] = nvidia_driver() or "none"
    if torch.cuda.is_available():
        installed["gpu"] = torch.cuda.get_device_name()
    return installed


def nvidia_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The driver's version, from the kernel module."""
    match = re.search(r"(?<!\S)\d\S*\.\S*", file.read_text()) if file.exists() else None
    return match and match[0]


# ---- memory and disks ---------------------------------------------------------------------------------------


def check_shm(num_workers: int, path: str = "/dev/shm") -> Finding:
    """Shared memory, through which loader workers (and NCCL within a node) pass data."""
    disk = os.statvfs(path)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    detail = f"{size / GB:.2f} GB, {free / GB:.2f} free"
    todo = "docker: --ipc=host or --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    if min(size, free) <= DOCKER_SHM and num_workers > 0:
        return Finding("shm", ERROR, f"{detail}: too small for loader workers", todo)
    return Finding("shm", OK if free >= ROOMY_SHM else WARN, detail, "" if free >= ROOMY_SHM else todo)


def check_output(
    output_dir: str,
    min_free_gb: float,
    model: str = "",
    make: Callable[[], Any] = lambda: None,
    limit: int = 3,
    optim: str = "adamw_torch_fused",
) -> Finding:
    """Whether checkpoints can be written there: filesystem and free space.

    model, limit, optim: of the run, for the size of its checkpoints; those that are there already are replaced. make:
    the model on the meta device, or None if its size is not known.
    """
    path = Path(output_dir).expanduser().absolute()
    where, free = _free_space(path)
    kind = _filesystem(where)
    detail = f"{path} ({kind}): {free / GB:.1f} GB free"
    built = make()
    needed = 0 if built is None else bytes_needed(built, limit, optim)
    if free + checkpoint_bytes(path) < needed:
        what = f"{detail}: too little for checkpoints of {model}: {limit or 2} and the next take {needed / GB:.1f}"
        return Finding("output", ERROR, what, "free disk space, or lower --save_total_limit")
    if free < min_free_gb * GB:
        todo = f"free disk space: a checkpoint is {BYTES_PER_PARAMETER} bytes per parameter (want {min_free_gb:g})"
        return Finding("output", ERROR if free < FULL_DISK else WARN, detail, todo)
    if kind in EPHEMERAL:
        todo = "this filesystem is lost with the container or node: use a shared volume"
        return Finding("output", WARN, detail, todo)
    return Finding("output", OK, detail)


def check_cache(needed: bool) -> Finding:
    """The Hub's cache. needed: the run downloads into it."""
    from huggingface_hub import constants

    path = Path(constants.HF_HOME)
    level, todo = ERROR if needed else WARN, "set HF_HOME to a directory on the shared volume"
    try:
        _, free = _free_space(path)
    except UserError as error:
        return Finding("cache", level, str(error), todo)
    detail = f"{path}: {free / GB:.1f} GB free"
    return Finding("cache", level, detail, todo) if free < FULL_DISK else Finding("cache", OK, detail)


def existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free_space(path: Path) -> tuple[Path, int]:
    """The nearest existing directory and its free bytes; UserError unless files can be created in it."""
    where = existing(path)
    if not where.is_dir():
        raise UserError(f"{path}: {where} is a file, not a directory: name another one")
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            file.write(b"preflight")
            file.flush()
    except OSError as error:
        what = f"{path}: cannot be written to ({error.strerror}): fix its permissions or name another"
        raise UserError(what) from error
    disk = os.statvfs(where)
    return where, disk.f_bavail * disk.f_frsize


def _filesystem(path: Path) -> str:
    """Type of the filesystem of a path ("lustre", "ext4")."""
    path, best = path.resolve(), ("", "unknown")
    with open("/proc/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            point, kind = line.split()[1:3]
            point = point.replace("\\040", " ")
            if path.is_relative_to(point) and len(point) >= len(best[0]):
                best = point, kind
    return best[1]


# ---- the dataset --------------------------------------------------------------------------------------------


def check_dataset_dir(dataset_dir: str) -> tuple[Finding, dict[str, str]]:
    """The tokenised splits: counts, whether the first and last record can be read, and fingerprints."""
    counts, facts = [], {}
    for split in SPLITS:
        if split != "train" and not (Path(dataset_dir) / split).is_dir():
            continue
        try:
            store = open_split(dataset_dir, split, recorded_alphabet(dataset_dir) or ESM2_TOKENS)
        except UserError as error:
            if split != "train" and "empty" in str(error):
                continue
            raise
        ends = np.array([0, len(store) - 1])
        store.gather(ends, np.zeros_like(ends), store.lengths(ends))
        counts.append(f"{len(store):,} {split}")
        facts[f"dataset/{split}"] = store.fingerprint
    return Finding("dataset", OK, f"{dataset_dir}: {', '.join(counts)} records"), facts


def check_dataset(name: str) -> tuple[Finding, dict[str, str]]:
    """The files of a --dataset, and whether its first protein can be read, without downloading everything."""
    source: Source = open_source(name, streaming=True)
    files = source.splits["train"]
    splits = [f"{len(files)} {split} files ({_bytes(files) / GB:.2f} GB)" for split, files in source.splits.items()]
    if not len(MemoryStore.read(files, max_records=1)):
        raise UserError(f"--dataset {name}: no protein in its training files")
    # One rank has asked the Hub for all; each node sees local files by itself.
    facts = {} if source.revision else {"dataset/train": f"{len(files)} files of {_bytes(files):,} bytes"}
    return Finding("dataset", OK, f"{name}: {', '.join(splits)}"), facts


def _bytes(files: Iterable) -> int:
    return sum(file.size for file in files)
