"""Checkpoints as this program wrote them before 0.5: torch.distributed.checkpoint's own files, and metadata.json."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from common.checkpoint.reader import open_checkpoint
from extras.interop.stored_tensors import StoredTensors
from tests.training.hostile_changes import vouch

OPTIONS = {"lr": 0.1, "betas": (0.9, 0.98), "foreach": None, "fused": True, "params": ["a", "b"]}


def to_format_1(checkpoint: Path) -> Path:
    """Rewrite a checkpoint of today's format, in place."""
    stored = StoredTensors(open_checkpoint(checkpoint))
    state: dict[str, Any] = {name: stored.read(name) for name in stored.shapes}
    state |= {f"optimizer.param_groups.0.{name}": value for name, value in OPTIONS.items()}
    for path in (*checkpoint.glob("*.distcp"), checkpoint / "metadata.json"):
        path.unlink()
    write_format_1(checkpoint, state, no_dist=True)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"format_version": 1}))
    vouch(checkpoint)
    return checkpoint


def write_format_1(directory: Path, state: dict, **how) -> None:
    """The files of a state; how: for dcp.save."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), **how)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    (directory / "metadata.json").write_text(json.dumps(encode(metadata), separators=(",", ":")))


def encode(metadata: Metadata) -> dict[str, Any]:
    """The content of metadata.json. metadata: as completed by torch's FileSystemWriter."""
    files: dict[str, int] = {}

    def place(index: MetadataIndex) -> list[int]:
        info = metadata.storage_data[index]
        return [files.setdefault(info.relative_path, len(files)), info.offset, info.length]

    tensors, values = {}, {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            values[name] = place(MetadataIndex(name))
            continue
        chunks = [[list(c.offsets), list(c.sizes), *place(MetadataIndex(name, c.offsets))] for c in stored.chunks]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
    return {"files": list(files), "tensors": tensors, "values": values}
