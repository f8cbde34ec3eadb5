"""Weights of the recipe's training checkpoints, `<ckpt_dir>/train_{ddp,fsdp2,mfsdp}/step_N` (--model_name_or_path).

`train_ddp.py` there saves one `checkpoint.pt` (torch.save), the others torch.distributed.checkpoint's directory. Both
are pickled; they are read as data (extras.interop.checkpoint_format_1). Optimiser and scheduler are not read.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from common.cli import UserError, one_line
from common.files.safe_files import open_regular

SAVED, METADATA = "checkpoint.pt", ".metadata"
PREFIXES = ("app.model.", "model.")  # of FSDP2's names; of Megatron-FSDP's, and of an older FSDP2's
WRAPPERS = ("_orig_mod.", "module.")  # torch.compile, DDP and Megatron-FSDP
CONFIG = "config.json"


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint of the recipe that hold its weights; [] for any other directory."""
    if (directory / SAVED).is_file():
        return [directory / SAVED]
    if not (directory / METADATA).is_file() or (directory / "manifest.json").exists():  # a run's of ours has that
        return []
    return [directory / METADATA, *sorted(directory.glob("*.distcp"))]


def config_file(directory: Path) -> Path:
    """Its config.json, or that of the run's final_model/ beside it. UserError if there is none."""
    places = (directory / CONFIG, directory.parent / "final_model" / CONFIG)
    file = next((path for path in places if path.is_file()), None)
    if file is None:
        raise UserError(
            f"{directory}: a checkpoint of the recipe, which saves no {CONFIG} with it: copy that of its model there"
        )
    return file


def read(directory: Path) -> dict[str, Tensor]:
    """The model's tensors under the names of the recipe's class; all of them in memory.

    UserError if they cannot be read, or if something in the files is no part of a checkpoint.
    """
    from extras.interop.checkpoint_format_1 import EarlierReader, read_saved
    from extras.interop.stored_tensors import StoredTensors

    first, *shards = weight_files(directory)
    try:
        if shards:
            sizes = {path.name: path.stat().st_size for path in (first, *shards)}
            stored = StoredTensors(EarlierReader(directory, sizes))
            prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in stored.shapes)), PREFIXES[0])
            names = [name for name in stored.shapes if name.startswith(prefix) and not _is_state(name)]
            return {_unwrapped(name.removeprefix(prefix)): stored.read(name) for name in names}
        with open_regular(first) as file:
            tensors = read_saved(file, "model", _is_state)
    except (OSError, ValueError) as error:
        raise UserError(f"{first}: refused: {one_line(error)[:160]}") from error
    return {_unwrapped(name): tensor for name, tensor in tensors.items()}


def _is_state(name: str) -> bool:
    """Whether it is Transformer Engine's scales, not a weight."""
    return name.endswith("_extra_state")


def _unwrapped(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name
