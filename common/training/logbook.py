"""What a run says of itself as it goes: on the terminal, in metrics.jsonl and *_results.json, to a tracker."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.cli import Flags, UserError, flag
from common.files.json_files import JsonLinesLog
from common.precision import stats_plan
from common.precision.stats import scalars
from common.ranks.world import World
from common.training.metrics import format_block, step_line, write_results
from common.training.profiling import parse_steps

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"


@dataclass
class LogFlags(Flags):
    logging_steps: int = flag(10, "Steps between log lines and rows of metrics.jsonl.")
    straggler_every: int = flag(100, "Steps between comparisons of the ranks' own work; the slowest is named. 0: off.")
    profile_steps: str | None = flag(None, "Write a torch profiler trace of the steps A-B under output_dir/profile/.")
    report_to: str = flag("none", "none, tensorboard or wandb (each must be installed).")
    run_name: str | None = flag(None, "Name of the run for --report_to.")
    disable_tqdm: bool = flag(False, "No progress bar.")

    def check(self) -> None:
        self.require_at_least(1, "logging_steps")
        self.require_at_least(0, "straggler_every")
        if self.profile_steps:
            parse_steps(self.profile_steps)
        self.require_choice("report_to", ("none", "tensorboard", "wandb"))
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise UserError(f"--report_to {self.report_to}: not installed: pip install {self.report_to}")


class Logbook:
    """Writes on the main rank; on the others nothing happens."""

    def __init__(self, flags: LogFlags, output_dir: Path, world: World):
        self.output_dir, self.is_main = output_dir, world.is_main
        self.tracker = Tracker()
        with world.main_does() as mine:
            if mine:
                self.tracker = open_tracker(flags, output_dir)

    def begin(self, keep_through: int, quant_stats_in: Path | None, step: int) -> None:
        """Open the files of rows before the first step; rows beyond `keep_through` (`step`) will come again."""
        self.metrics = JsonLinesLog(self.output_dir / METRICS, keep_through)
        if quant_stats_in:
            self.quant_stats = JsonLinesLog(quant_stats_in / stats_plan.FILE, step)

    def row(self, row: dict) -> None:
        """A row of metrics.jsonl."""
        if self.is_main:
            self.metrics.write(row)
            self.tracker.write(row)
            if "loss" in row:
                logger.info(step_line(row))

    def quant_stats_rows(self, rows: list[dict]) -> None:
        """The rows of quant_stats.jsonl of a step, if there are any."""
        if rows and self.is_main:
            self.quant_stats.write(*rows)
            self.tracker.write(scalars(rows))

    def results(self, split: str, step: int, results: dict) -> None:
        """`<split>_results.json` and the guides' block of them; the main rank only."""
        write_results(self.output_dir, split, results)
        self.tracker.write({"step": step, **results})
        print(format_block(split, results), flush=True)

    def close(self) -> None:
        self.tracker.close()


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
    def __init__(self, flags: LogFlags, directory: Path):
        try:
            import wandb
        except ImportError as error:
            raise UserError("--report_to wandb: not installed: pip install wandb") from error
        self.run = wandb.init(name=flags.run_name, dir=str(directory), config=vars(flags), resume="allow")

    def write(self, row: dict) -> None:
        self.run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self.run.finish()


def open_tracker(flags: LogFlags, output_dir: Path) -> Tracker:
    """A tracker with `write(row)` (a row of metrics.jsonl) and `close()`."""
    if flags.report_to == "tensorboard":
        return _TensorBoard(output_dir / "logs")
    if flags.report_to == "wandb":
        return _WandB(flags, output_dir)
    return Tracker()


def _numbers(row: dict) -> dict[str, float]:
    return {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
