"""The model's directory that --model_name_or_path of the scripts after training stands for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from common.files.runs import MANIFEST, final_model_of, list_checkpoints


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint of a run, or a run that has one."""
    return (path / MANIFEST).exists() or bool(list_checkpoints(path))


def exported(name: str, stack: ExitStack) -> str:
    """The directory of transformers' files that --model_name_or_path stands for: of a run its final_model/, of a
    checkpoint an export in a temporary directory, which the stack removes; else the name as it is."""
    name = final_model_of(name)
    if not is_checkpoint(path := Path(name)):
        return name
    from extras.export import choose, export  # a model's own directory needs no reader of checkpoints

    directory = Path(stack.enter_context(TemporaryDirectory(prefix="exported-"))) / "model"
    export(choose(path), directory)
    return str(directory)
