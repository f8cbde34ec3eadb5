"""Directories of `transformers`: weights read from one, and a trained model written as one; a tensor at a time.

A model of many gigabytes is never whole in memory here: tensors are read when asked for, and written in files of at
most SHARD_BYTES, each as soon as its tensors are there. What is in them, each family of models knows (its
`pretrained`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.cli import UserError, one_line
from common.files.content_hash import combined_hash
from common.files.output_directory import sync_directory, sync_tree

SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


def local_directory(name_or_path: str) -> Path:
    """A directory as it is; of a name on the Hub the files of its newest revision, fetched where they are not here."""
    root = Path(name_or_path)
    if root.is_dir():
        return root
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["*.safetensors", "*.json", "vocab.txt"]))
    except Exception as error:
        reason = one_line(error)[:160]
        raise UserError(
            f"{name_or_path}: weights not found, neither there nor on the Hub ({reason}); "
            "to start from random weights use --config_name"
        ) from error


def model_files(name_or_path: str) -> list[Path]:
    """The files that make a model what it is: weights, configuration, vocabulary. UserError without weights."""
    root = local_directory(name_or_path)
    others = [root / name for name in ("config.json", "vocab.txt", INDEX)]
    return [*(path for path in others if path.is_file()), *_weight_files(root)]


def model_hash(name_or_path: str) -> str:
    """Identity of a model, wherever it is: one hash (hex) of the contents of its `model_files`.

    UserError where there are no weights, or one of the files is being written.
    """
    return combined_hash(model_files(name_or_path))


def read_tensors(directory: str) -> tuple[Path, dict[str, Tensor]]:
    """(where they are, the tensors) of a local directory's safetensors, or of a Hub repository's."""
    root = local_directory(directory)
    theirs: dict[str, Tensor] = {}
    for path in _weight_files(root):
        try:
            with safe_open(path, framework="pt") as file:
                # Memory-mapped: what is not used is not read.
                theirs |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read: {error}; cut short? Copy or download it again") from error
    return root, theirs


def check_finite(name: str, tensor: Tensor, where: str) -> Tensor:
    """The tensor. UserError, which begins with `where`, if it holds NaN or infinity."""
    if tensor.numel() and tensor.is_floating_point():
        extremes = torch.stack(torch.aminmax(tensor))  # a NaN is both; no copy, no mask
        if not extremes.isfinite().all():
            raise UserError(
                f"{where}: tensor {name} holds NaN or infinity: its training diverged, or the file is damaged: "
                "take an earlier checkpoint, or download it again"
            )
    return tensor


def _weight_files(root: Path) -> list[Path]:
    index = root / INDEX
    names = ["model.safetensors"]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not an index of safetensors shards") from error
    for name in names:
        if not (root / name).is_file():
            other = next(root.glob("pytorch_model*.bin"), None)
            hint = f"; {other.name} there is pickled: convert it with transformers' save_pretrained" if other else ""
            if next(root.glob("*.distcp"), None):
                hint = f"; a checkpoint of a run: python -m common.training.export {root} OUT makes a model of it"
            raise UserError(f"{root / name}: no such file; weights are read from safetensors only{hint}")
    return [root / name for name in names]


@dataclass(frozen=True)
class Content:
    """What a directory is to hold.

    stock: transformers' configuration; architecture: its class of the model; shapes: of every tensor, in the order in
    which the tensors come; finish: writes the tokenizer's files into it.
    """

    stock: Any
    architecture: str
    shapes: Mapping[str, torch.Size]
    finish: Callable[[Path], None]


def write_directory(
    pieces: Iterator[tuple[str, Tensor]], content: Content, directory: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a directory that transformers' from_pretrained opens offline, tensors in fp32.

    The directory appears when all of it is on the disk, or not at all; one that is there already is replaced.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(pieces, content, partial, shard_bytes)
        sync_tree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)
    sync_directory(directory.parent)


def _write(pieces: Iterator[tuple[str, Tensor]], content: Content, partial: Path, shard_bytes: int) -> None:
    stock = content.stock  # as loaded it may name another class, and the precision it was stored in
    stock.architectures, stock.dtype = [content.architecture], "float32"
    stock.save_pretrained(partial)
    files = _file_of_each(content.shapes, shard_bytes)
    held: dict[str, Tensor] = {}
    file = None
    for name, tensor in pieces:
        if held and files[name] != file:
            _save(held, partial / file)
            held = {}
        file = files[name]
        held[name] = tensor.detach().to("cpu", torch.float32)
    _save(held, partial / file)
    if file != "model.safetensors":
        total = sum((partial / file).stat().st_size for file in set(files.values()))
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    content.finish(partial)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors' own files are for nobody but their owner


def _file_of_each(shapes: Mapping[str, torch.Size], shard_bytes: int) -> dict[str, str]:
    """{tensor: file}, in the order they come; file names as transformers gives them."""
    shard, size, shards = 0, 0, {}
    for name, shape in shapes.items():
        if size and size + 4 * shape.numel() > shard_bytes:
            shard, size = shard + 1, 0
        shards[name] = shard
        size += 4 * shape.numel()
    if shard == 0:
        return dict.fromkeys(shapes, "model.safetensors")
    return {name: f"model-{n + 1:05d}-of-{shard + 1:05d}.safetensors" for name, n in shards.items()}
