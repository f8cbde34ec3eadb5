"""What a run says of itself as it goes: on the terminal, in metrics.jsonl and *_results.json, to a tracker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.cli import MACHINE_FAULT, Flags, UserError, flag
from common.files.json_files import JsonLinesLog, read_json_lines, write_json
from common.outputs.curves import ABOUT, draw_curves, read_about
from common.outputs.metrics import format_block, results_file, step_line, write_results
from common.outputs.profiling import parse_steps
from common.outputs.trackers import Tracker, open_tracker
from common.precision import stats_plan
from common.precision.stats import scalars
from common.ranks.stopping import PREEMPTED, Preempted
from common.ranks.world import World

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
DRAW_EVERY_S = 60.0  # the picture of a run that goes on, at a checkpoint


@dataclass
class LogFlags(Flags):
    group = "logging"
    rarely = ("straggler_every", "profile_steps", "disable_tqdm")

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
            raise UserError(f"--report_to {self.report_to}: not installed: ./install.sh --trackers")


class Logbook:
    """Writes on the main rank; on the others nothing happens. Leaving it as a context closes the tracker."""

    def __init__(self, flags: LogFlags, output_dir: Path, world: World):
        self.flags, self.output_dir, self.world = flags, output_dir, world
        self.tracker = Tracker()
        self.metrics: JsonLinesLog | None = None  # None until rows are to come
        self.last_row: dict = {}
        self.line: Callable[[dict], str] = step_line  # of a row, for the terminal: the task's
        self._drawing: threading.Thread | None = None
        self._drawn_at = -DRAW_EVERY_S

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error, stack) -> None:
        if self._drawing is not None:  # not in the middle of it
            self._drawing.join()
        ended = PREEMPTED if kind and issubclass(kind, Preempted) else MACHINE_FAULT
        self.tracker.close(ended if kind else 0)

    def track(self, first_row: int | None, anew: bool) -> None:
        """Open what --report_to says, on all ranks together; see `open_tracker`."""
        flags = self.flags
        with self.world.main_does() as mine:
            if mine:
                where = (flags, self.output_dir, first_row, anew)
                self.tracker = open_tracker(flags.report_to, flags.run_name, *where)

    def begin(self, first_row: int, quant_stats_in: Path | None, step: int, about: dict) -> None:
        """Open the files of rows before the first step. Rows of metrics.jsonl from `first_row` on, and of
        quant_stats.jsonl beyond `step`, will come again: they are dropped. about: of the run, for its picture."""
        starts = [start for start in read_about(self.output_dir).get("starts", []) if start < first_row]
        write_json(self.output_dir / ABOUT, about | {"starts": [*starts, first_row]})
        self.metrics = JsonLinesLog(self.output_dir / METRICS, first_row - 1)
        self.tracker.go_on(self.output_dir / METRICS)
        if quant_stats_in:
            self.quant_stats = JsonLinesLog(quant_stats_in / stats_plan.FILE, step)

    def row(self, row: dict) -> None:
        """A row of metrics.jsonl."""
        if self.world.is_main:
            self.metrics.write(row)
            self.last_row = row
            self.tracker.write(row)
            if "loss" in row:
                logger.info(self.line(row))

    def draw(self) -> None:
        """Draw the curves, now and then, beside what the run does; the main rank only."""
        busy = self._drawing is not None and self._drawing.is_alive()
        if not self.world.is_main or busy or time.monotonic() < self._drawn_at + DRAW_EVERY_S:
            return
        self._drawn_at = time.monotonic()
        self._drawing = threading.Thread(target=self._draw, name="curves", daemon=True)
        self._drawing.start()

    def draw_last(self) -> None:
        """Draw the curves of all there is."""
        if self._drawing is not None:
            self._drawing.join()
        draw_curves(self.output_dir)

    def _draw(self) -> None:
        with suppress(OSError):  # of a full disk, of which the run hears by itself
            draw_curves(self.output_dir)

    def quant_stats_rows(self, rows: list[dict]) -> None:
        """The rows of quant_stats.jsonl of a step, if there are any."""
        if rows and self.world.is_main:
            self.quant_stats.write(*rows)
            self.tracker.write(scalars(rows))

    def results(self, split: str, step: int, results: dict, of_training: bool) -> None:
        """`<split>_results.json` and the guides' block of them; the main rank only.

        of_training: these end a run that trains, not an evaluation by itself; of them a tracker is told what it does
        not know.
        """
        known = self._known(split, step, results) if of_training else {}
        write_results(self.output_dir, split, results)
        self.tracker.write({"step": step} | {k: v for k, v in results.items() if k not in known})
        print(format_block(split, results), flush=True)

    def _known(self, split: str, step: int, results: dict) -> dict:
        """What a tracker has of them: the row of this very step; all, where a finished run was only started again."""
        if self.metrics is None and results_file(self.output_dir, split).exists():
            return results
        row = self.last_row
        if self.metrics is None:  # killed between its last row and its results
            row = next(iter(read_json_lines(self.output_dir / METRICS)[-1:]), {})
        return row if row.get("step") == step else {}
