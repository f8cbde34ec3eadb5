"""Write a model's directory as `transformers` reads it: config.json, weights and model card, a tensor at a time.

A model of many gigabytes is never whole in memory here: tensors are written as they come, in files of at most
SHARD_BYTES.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.files.safe_files import replace_directory
from common.models.layers.hf_directory import INDEX
from common.models.layers.model_card import Export, card

CARD = "README.md"
SHARD_BYTES = 5 * 10**9


def write_directory(
    pieces: Iterable[tuple[str, Tensor]], export: Export, directory: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a directory that transformers' from_pretrained opens offline, tensors in fp32.

    The directory appears when it is complete and flushed; an existing one is replaced.
    """
    with replace_directory(directory) as partial:
        _write(pieces, export, partial, shard_bytes)


def _write(pieces: Iterable[tuple[str, Tensor]], export: Export, partial: Path, shard_bytes: int) -> None:
    stock = export.config.to_transformers()  # the loaded one may name another class and dtype
    stock.architectures, stock.dtype = [export.config.architecture], "float32"
    stock.save_pretrained(partial)
    files = _file_of_each(export.expected, shard_bytes)
    for file, group in groupby(pieces, lambda piece: files[piece[0]]):
        path = partial / file
        save_file({name: tensor.detach().to("cpu", torch.float32) for name, tensor in group}, path, {"format": "pt"})
        path.chmod(partial.stat().st_mode & 0o666)  # safetensors creates files readable by their owner only
    if len(written := set(files.values())) > 1:
        total = sum((partial / file).stat().st_size for file in written)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    notes = export.finish(partial) or {}
    (partial / CARD).write_text(card(export, notes), encoding="utf-8")


def _file_of_each(tensors: Mapping[str, Tensor], shard_bytes: int) -> dict[str, str]:
    """{tensor: file}, in the order they come; file names as transformers gives them."""
    shard, size, shards = 0, 0, {}
    for name, tensor in tensors.items():
        if size and size + 4 * tensor.numel() > shard_bytes:
            shard, size = shard + 1, 0
        shards[name] = shard
        size += 4 * tensor.numel()
    if shard == 0:
        return dict.fromkeys(tensors, "model.safetensors")
    return {name: f"model-{n + 1:05d}-of-{shard + 1:05d}.safetensors" for name, n in shards.items()}
