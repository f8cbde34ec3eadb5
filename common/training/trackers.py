"""Optional experiment trackers, imported only when asked for."""

from __future__ import annotations

from pathlib import Path

from common.cli import UserError


class Tracker:
    """Tracks nothing: what the ranks other than 0 use, and rank 0 unless --report_to says more."""

    def write(self, row: dict) -> None: ...

    def close(self) -> None: ...


class _TensorBoard(Tracker):
    def __init__(self, directory: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("--report_to tensorboard: not installed: pip install tensorboard") from error
        self.writer = SummaryWriter(str(directory))

    def write(self, row: dict) -> None:
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class _WandB(Tracker):
    def __init__(self, args, directory: Path):
        try:
            import wandb
        except ImportError as error:
            raise UserError("--report_to wandb: not installed: pip install wandb") from error
        self.run = wandb.init(name=args.run_name, dir=str(directory), config=vars(args), resume="allow")

    def write(self, row: dict) -> None:
        self.run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self.run.finish()


def open_tracker(args, output_dir: Path) -> Tracker:
    """A tracker with `write(row)` (a row of metrics.jsonl) and `close()`."""
    if args.report_to == "tensorboard":
        return _TensorBoard(output_dir / "logs")
    if args.report_to == "wandb":
        return _WandB(args, output_dir)
    return Tracker()


def _numbers(row: dict) -> dict[str, float]:
    return {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
