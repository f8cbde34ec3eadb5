"""The outputs of a run while it trains: log lines, metrics.jsonl, *_results.json, a tracker, the curves."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common import console
from common.cli import MACHINE_FAULT, UserError
from common.distributed.stopping import PREEMPTED, Preempted
from common.distributed.world import World
from common.files.runs import METRICS, RUN_INFO, read_run_info
from common.files.safe_files import JsonLinesLog, read_json_lines, write_json
from common.flags import Flags, flag
from common.hooks import extra
from common.training.curves import draw_curves
from common.training.log_row import step_line, terminal_line
from common.training.protein_losses import ProteinLosses, write_losses
from common.training.verdict import held_out_key, verdicts

logger = logging.getLogger(__name__)

DRAW_EVERY_S = 60.0  # at most, of a run that is still training

# Dense bf16 peak in FLOP/s (without sparsity), from the vendors' data sheets, by words of the device's name. The
# longest matching key wins.
PEAK_FLOPS = {
    "A10": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
}


def peak_flops(device: torch.device, bf16: bool, given_tflops: float | None = None) -> float | None:
    """What MFU is a fraction of, in FLOP/s: the given peak, else the device's dense bf16 peak.

    None (no MFU is reported) on CPUs, MIG slices, unknown GPUs and in other precisions.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda" or not bf16:
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    matches = [key for key in PEAK_FLOPS if words.issuperset(key.split())]
    return PEAK_FLOPS[max(matches, key=len)] if matches and "MIG" not in words else None


def write_results(output_dir: Path, split: str, results: dict) -> None:
    """`<split>_results.json`, and the same keys merged into all_results.json, as transformers' Trainer does. Earlier
    results of the split are replaced in both."""
    own, merged = output_dir / f"{split}_results.json", output_dir / "all_results.json"
    known, earlier = (json.loads(path.read_text()) if path.exists() else {} for path in (merged, own))
    write_json(own, results)
    write_json(merged, {name: value for name, value in known.items() if name not in earlier} | results)


def format_block(split: str, results: dict) -> str:
    """The guides' `***** train metrics *****` block."""
    shown = {k: _format_value(k, v) for k, v in sorted(results.items())}
    width, right = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
    return "\n".join([f"***** {split} metrics *****", *(f"  {k:<{width}} = {v:>{right}}" for k, v in shown.items())])


def _format_value(key: str, value) -> str:
    if key.endswith("_runtime"):
        hours, rest = divmod(value, 3600)
        return f"{int(hours)}:{int(rest // 60):02d}:{rest % 60:05.2f}"
    if key == "total_flos":
        return f"{value / 1e9:,.0f}GF"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class LogFlags(Flags):
    group = "logging"
    file_only = ("straggler_every",)
    unlisted = ("profile_steps", "run_name", "metrics_port", "metrics_host", "disable_tqdm", "peak_tflops_per_gpu")

    logging_steps: int = flag(10, "Steps between log lines and rows of metrics.jsonl; 1 to see each.")
    straggler_every: int = flag(100, "Steps between comparisons of the ranks' own work; the slowest is named. 0: off.")
    profile_steps: str | None = flag(None, "Write a torch profiler trace of the steps A-B under output_dir/profile/.")
    report_to: str = flag(
        "none", "To watch a run: a tracker, which must be installed.", choices=("none", "tensorboard", "wandb")
    )
    run_name: str | None = flag(None, "Name of the run for --report_to and --metrics_port.")
    metrics_port: int | None = flag(None, "Rank 0 shows the newest row to Prometheus: http://HOST:PORT/metrics.")
    metrics_host: str = flag("127.0.0.1", "Address of --metrics_port; 0.0.0.0: reachable from other machines.")
    disable_tqdm: bool = flag(False, "No progress bar.")
    peak_tflops_per_gpu: float | None = flag(
        None, "Peak that mfu is a fraction of. Default: the GPU's dense bf16 peak, where it is known by its name."
    )

    def check(self) -> None:
        self.require_at_least(1, "logging_steps")
        self.require_above(0, "peak_tflops_per_gpu")
        self.require_at_least(0, "straggler_every")
        self.require_at_least(1024, "metrics_port")
        if (self.metrics_port or 0) > 65535:
            raise UserError(f"--metrics_port {self.metrics_port}: at most 65535")
        if self.profile_steps:
            parse_steps(self.profile_steps)
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise UserError(f"--report_to {self.report_to}: not installed: ./install.sh --trackers")


def parse_steps(text: str) -> range:
    """Parse "A-B" or "A": steps A to B inclusive, counted from 1."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--profile_steps {text}: expected steps as A-B, say 10-12, counted from 1")
    return range(first, last + 1)


class Tracker:
    """The interface of trackers (extras/publish/trackers.py). This one, the default, drops everything."""

    def write(self, row: dict) -> None:
        """Log the numbers of a row of metrics.jsonl, or of any {"step": ..., name: value}."""

    def picture(self, path: Path, step: int) -> None:
        """Log a PNG."""

    def resume(self, metrics: Path) -> None:
        """Called before the first new row. metrics: metrics.jsonl with the rows kept from before the restart."""

    def close(self, status: int) -> None:
        """status: the exit status the process is about to have."""

    def give_up(self) -> None:
        """Shut down after a failure."""


class RunLogger:
    """Writes on the main rank and does nothing on the others. Use as a context: leaving it closes the tracker.

    peak_flops: what MFU is a fraction of, in FLOP/s; None if unknown.
    """

    def __init__(self, flags: LogFlags, output_dir: Path, world: World, bf16: bool):
        self.flags, self.output_dir, self.world = flags, output_dir, world
        self.peak_flops = peak_flops(world.device, bf16, flags.peak_tflops_per_gpu)
        self.tracker = Tracker()
        self.metrics: JsonLinesLog | None = None  # opened by `begin`
        self.quant_stats: JsonLinesLog | None = None
        self.last_row: dict = {}
        self._line: Callable[[dict], str] = step_line  # formats a row for the log; the task's
        self._every = 1
        self._held_out: float | None = None  # loss of the last evaluation
        self._drawing: threading.Thread | None = None
        self._drawn_at = -DRAW_EVERY_S

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error, stack) -> None:
        if self._drawing is not None:
            self._drawing.join()
        failed = PREEMPTED if kind and issubclass(kind, Preempted) else MACHINE_FAULT
        self.tracker.close(failed if kind else 0)

    @contextmanager
    def progress_bar(self, total: int, done: int) -> Iterator[tqdm]:
        """A bar of the steps, on a terminal; log lines are written above it."""
        bar = console.bar(total, "steps", self.flags.disable_tqdm or not self.world.is_main, initial=done, leave=True)
        with bar, nullcontext() if bar.disable else logging_redirect_tqdm():  # writes a line's end by itself
            yield bar

    def track(self, config: dict, first_row: int | None, anew: bool) -> None:
        """Open the trackers of the flags, on all ranks together; see `open_tracker`. config: all flags of the run."""
        if self.flags.report_to == "none" and self.flags.metrics_port is None:
            return
        with self.world.on_main_rank() as is_main:
            if is_main:
                self.tracker = extra().open_tracker(self.flags, config, self.output_dir, first_row, anew)

    def begin(
        self,
        first_row: int,
        quant_stats_in: Path | None,
        step: int,
        about: dict,
        line: Callable[[dict], str],
        terminal_every: int = 1,
    ) -> None:
        """Open the files of rows before the first step.

        Rows that will be written again are dropped: those of metrics.jsonl from `first_row` on, those of
        quant_stats.jsonl beyond `step`. about: the title and labels of the curves; line: formats a row for a log that
        is no terminal's; terminal_every: as of the task.
        """
        self._line, self._every = line, terminal_every
        starts = [start for start in read_run_info(self.output_dir).get("starts", []) if start < first_row]
        write_json(self.output_dir / RUN_INFO, about | {"starts": [*starts, first_row]})
        self.metrics = JsonLinesLog(self.output_dir / METRICS, first_row - 1)
        earlier = read_json_lines(self.output_dir / METRICS)
        key = held_out_key(earlier)
        self._held_out = next((row[key] for row in reversed(earlier) if key in row), None)
        self.tracker.resume(self.output_dir / METRICS)
        if quant_stats_in:
            self.quant_stats = JsonLinesLog(quant_stats_in / extra().statistics_file(), step)

    def is_due(self, step: int) -> bool:
        """Whether --logging_steps asks for a row after `step` steps."""
        return step == 1 or step % self.flags.logging_steps == 0

    def row(self, row: dict) -> None:
        """Write a row of metrics.jsonl."""
        if self.metrics is not None:
            self.metrics.write(row)
            self.last_row = row
            self.tracker.write(row)
            self._held_out = row.get(held_out_key([row]), self._held_out)
            if "loss" in row and (line := self._shown(row)):
                logger.info("%s", line)

    def _shown(self, row: dict) -> str:
        """The row's line in the log; at a terminal one that fits, "" between those of every so many steps."""
        if not console.is_terminal():
            return self._line(row)
        step = row["step"]
        if step % self._every and step not in (1, row["total_steps"]) and "eval_loss" not in row:
            return ""
        return terminal_line(row, self._held_out, console.columns() - len("HH:MM:SS "))

    def quant_stats_rows(self, rows: list[dict]) -> None:
        """Write a step's rows of quant_stats.jsonl, if any."""
        if rows and self.quant_stats is not None:
            self.quant_stats.write(*rows)
            self.tracker.write(extra().statistics_scalars(rows))

    def draw(self) -> None:
        """Draw the curves in a background thread, at most once a minute; the main rank only."""
        busy = self._drawing is not None and self._drawing.is_alive()
        if not self.world.is_main or busy or time.monotonic() < self._drawn_at + DRAW_EVERY_S:
            return
        self._drawn_at = time.monotonic()
        self._drawing = threading.Thread(target=self._draw, name="curves", daemon=True)
        self._drawing.start()

    def draw_last(self) -> None:
        """Draw the curves of the whole run; all ranks together."""
        with self.world.raise_together():
            if self._drawing is not None:
                self._drawing.join()
            if self.world.is_main and (paths := draw_curves(self.output_dir)) and self.last_row:
                self.tracker.picture(paths[0], self.last_row["step"])

    def _draw(self) -> None:
        with suppress(OSError):  # a full disk ends the run at its next row or checkpoint
            draw_curves(self.output_dir)

    def results(self, split: str, step: int, results: dict, of_training: bool) -> None:
        """Write `<split>_results.json` and print the guides' block; all ranks together.

        of_training: a training run ends with these results. Then the tracker gets only the values it has not yet seen.
        """
        with self.world.on_main_rank() as is_main:
            if is_main:
                seen = self._seen_by_tracker(split, step, results) if of_training else {}
                write_results(self.output_dir, split, results)
                self.tracker.write({"step": step} | {k: v for k, v in results.items() if k not in seen})
                print(format_block(split, results), flush=True)
                for line in verdicts(results) if split == "eval" else ():
                    logger.info("%s", line)

    def losses(self, losses: Mapping[str, ProteinLosses], step: int, best: bool = False) -> None:
        """Write those of the proteins of each held-out set, after `step` steps; all ranks together."""
        with self.world.on_main_rank() as is_main:
            for prefix, each in losses.items() if is_main else ():
                write_losses(self.output_dir / f"{prefix}_losses{'_best' * best}.parquet", each, step)

    def trainer_state(self, state: dict) -> None:
        """Write trainer_state.json, with the rows of metrics.jsonl; all ranks together."""
        with self.world.on_main_rank() as is_main:
            if is_main:
                history = read_json_lines(self.output_dir / METRICS)
                write_json(self.output_dir / "trainer_state.json", state | {"log_history": history})

    def _seen_by_tracker(self, split: str, step: int, results: dict) -> dict:
        """The row of this step; all results, if a finished run was only started again."""
        if self.metrics is None and (self.output_dir / f"{split}_results.json").exists():
            return results
        row = self.last_row
        if self.metrics is None:  # killed between its last row and its results
            row = next(iter(read_json_lines(self.output_dir / METRICS)[-1:]), {})
        return row if row.get("step") == step else {}
