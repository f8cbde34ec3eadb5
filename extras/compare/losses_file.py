"""The losses of single proteins that an evaluation kept (common/training/protein_losses.py), read again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.cli import UserError, one_line
from common.training.protein_losses import ProteinLosses


def read_losses(path: Path) -> tuple[ProteinLosses, int]:
    """What `write_losses` wrote, and the step. UserError for a file that is anything else."""
    try:
        table = pq.read_table(path)
        about = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
        columns = {name: table[name].to_numpy() for name in table.column_names}
        losses = ProteinLosses(
            columns["loss_sum"], columns["masked"], columns.get("cluster"), questions=about["questions"]
        )
        return losses, int(about["step"])
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: not losses of proteins ({one_line(error)}): remove it and run the command that made it again"
        ) from error
