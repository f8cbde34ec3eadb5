"""Embeddings whose record is of an earlier version, which had paths and dates in the place of hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.cli import UserError
from common.models.layers.hf_directory import model_files
from extras.prepare.output_directory import RECORD


def recorded_form(args: Any, directory: Path, made_from: dict, record: dict) -> dict:
    """`made_from`, or what an earlier version wrote for this model and input. args: EmbeddingFlags; record: of the
    output that is in the directory.

    UserError if the model is newer than that output: it may have been replaced.
    """
    fasta = Path(args.fasta).stat()
    earlier = args.settings | {"model_name_or_path": args.model_name_or_path, "fasta": Path(args.fasta).name}
    earlier |= {"size": fasta.st_size, "mtime_ns": fasta.st_mtime_ns}
    if record["made_from"] != earlier:
        return made_from
    model = [path.stat() for path in model_files(args.model_name_or_path)]
    if max(max(file.st_mtime_ns, file.st_ctime_ns) for file in model) >= (directory / RECORD).stat().st_ctime_ns:
        raise UserError(
            f"{directory}: made by an earlier version, and {args.model_name_or_path} may have changed since: give "
            "--overwrite to make it again, or another --output_dir"
        )
    return earlier
