"""TensorBoard and W&B for --report_to: one run there, through all restarts of an output directory.

A restart resumes from a checkpoint, so the rows beyond it are logged again. In TensorBoard they replace the old ones
(`purge_step`). W&B deletes nothing and its own step can only grow: all is plotted over `train/global_step`, where the
repeated rows coincide with the old ones.

Names are in groups (`grouped`): `train/`, `eval/`, `test/` as transformers' Trainer has them, `perf/` for speeds and
memory, `downstream/` for what else is evaluated. Units are those of metrics.jsonl: seconds, tokens per second, GB
(10^9 bytes), TFLOP/s (10^12), nats; `mfu` is a fraction.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.cli import MachineFault, UserError, one_line
from common.distributed.stopping import PREEMPTED
from common.files.safe_files import read_json_lines, write_json
from common.training.log_row import FIELDS
from common.training.run_directory import EVENTS, WANDB_RUN
from common.training.run_logger import LogFlags, Tracker
from extras.publish.live_page import LivePage

logger = logging.getLogger(__name__)

STEP = "train/global_step"  # the Trainer's name
CURVES = "train/curves"
DOWNSTREAM = re.compile("eval_(contacts|mutations|probe)_")
RESENT = 100  # rows: more than a run logs in the seconds that W&B's process buffers


class _TensorBoard(Tracker):
    def __init__(self, directory: Path, first_row: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_importable("tensorboard", error) from error
        self.writer = SummaryWriter(str(directory), purge_step=first_row)

    def write(self, row: dict) -> None:
        for name, value in grouped(row).items():
            self.writer.add_scalar(name, value, row["step"])
        # With TensorFlow installed a thread buffers rows for up to 120 s. A killed process would lose those of steps
        # before the checkpoint, which are not logged again.
        self.writer.flush()

    def picture(self, path: Path, step: int) -> None:
        from matplotlib.image import imread

        self.writer.add_image(CURVES, (imread(path)[..., :3] * 255).astype("uint8"), step, dataformats="HWC")

    def close(self, status: int) -> None:
        self.writer.close()


class _WandB(Tracker):
    def __init__(self, name: str | None, config: dict, directory: Path, first_row: int | None, anew: bool):
        try:
            import wandb
        except ImportError as error:
            raise _not_importable("wandb", error) from error
        file = directory / WANDB_RUN
        known = None if anew else _saved_id(file)
        run_id = os.environ.get("WANDB_RUN_ID") or known or secrets.token_hex(4)
        # wandb.init prefers arguments to the environment, so pass only what the user has not set there.
        defaults = {
            "WANDB_RUN_ID": ("id", run_id),
            "WANDB_RESUME": ("resume", "allow"),
            "WANDB_DIR": ("dir", directory),
        }
        arguments = {key: str(value) for variable, (key, value) in defaults.items() if not os.environ.get(variable)}
        try:
            self.run = wandb.init(name=name, config=config, **arguments)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError, ValueError) as error:
            raise UserError(
                f"--report_to wandb: {one_line(error)}: see WANDB_* in docs/training.md; WANDB_MODE=offline needs no "
                "account and no network"
            ) from error
        except wandb.errors.Error as error:
            raise MachineFault(
                f"--report_to wandb: {one_line(error)}: start again when the server answers; WANDB_MODE=offline needs "
                "none, `wandb sync` uploads later"
            ) from error
        if first_row is not None and run_id != _saved_id(file):
            write_json(file, {"id": run_id})
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)

    def write(self, row: dict) -> None:
        self.run.log({STEP: row["step"]} | grouped(row))

    def picture(self, path: Path, step: int) -> None:
        import wandb

        self.run.log({STEP: step, CURVES: wandb.Image(str(path))})

    def resume(self, metrics: Path) -> None:
        """Log the newest rows again: W&B's process may have been killed before it wrote them, and has no flush."""
        for row in read_json_lines(metrics)[-RESENT:]:
            self.write(row)

    def close(self, status: int) -> None:
        if status == PREEMPTED:
            self.run.mark_preempting()
        self.run.finish(exit_code=status)

    def give_up(self) -> None:
        import wandb

        wandb.teardown()  # fails as well, but keeps wandb's exit hook from retrying with a traceback


class _Trackers(Tracker):
    """Those of a run, by the flag that asked for each. One that fails is dropped with a warning, since metrics.jsonl
    has the same rows.

    W&B's process dies of the SIGTERM that a batch system sends to all processes, while the run still has to save.
    """

    def __init__(self, trackers: dict[str, Tracker]):
        self.trackers = trackers

    def write(self, row: dict) -> None:
        self._each(lambda tracker: tracker.write(row))

    def picture(self, path: Path, step: int) -> None:
        self._each(lambda tracker: tracker.picture(path, step))

    def resume(self, metrics: Path) -> None:
        self._each(lambda tracker: tracker.resume(metrics))

    def close(self, status: int) -> None:
        self._each(lambda tracker: tracker.close(status))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for flag, tracker in self.trackers.items():
            try:
                call(tracker)
            except Exception as error:
                logger.warning("%s: given up: %s; metrics.jsonl continues", flag, one_line(error))
                with suppress(Exception):
                    tracker.give_up()
                self.trackers[flag] = Tracker()


def open_tracker(flags: LogFlags, config: dict, output_dir: Path, first_row: int | None, anew: bool) -> Tracker:
    """The trackers of --report_to and --metrics_port.

    config: all flags of the run, which W&B saves as its configuration; first_row: the step of the first row to be
    logged, None if nothing is left to train; anew: whether this start resumes nothing.
    UserError: settings it cannot be opened with. MachineFault: its server does not answer.
    """
    trackers: dict[str, Tracker] = {}
    if flags.metrics_port is not None:
        trackers["--metrics_port"] = LivePage(flags, output_dir, anew)
    if flags.report_to == "tensorboard":
        trackers["--report_to tensorboard"] = _TensorBoard(output_dir / EVENTS, first_row)
    elif flags.report_to == "wandb":
        trackers["--report_to wandb"] = _WandB(flags.run_name, config, output_dir, first_row, anew)
    return _Trackers(trackers)


def _saved_id(file: Path) -> str | None:
    try:
        return json.loads(file.read_text())["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        logger.warning("%s: not readable: starting a new run in W&B", file)
        return None


def _not_importable(name: str, error: ImportError) -> UserError:
    return UserError(f"--report_to {name}: cannot be imported ({one_line(error)}): ./install.sh --trackers")


def grouped(row: dict) -> dict[str, float]:
    """The numbers of a row but its step, under the names that a tracker shows."""
    return {_name(k): v for k, v in row.items() if isinstance(v, int | float) and k != "step"}


def _name(key: str) -> str:
    if "/" in key:  # quant_stats/...
        return key
    if DOWNSTREAM.match(key):
        return f"downstream/{key.removeprefix('eval_')}"
    if key in {field.name for field in FIELDS if field.group == "perf"}:
        return f"perf/{key}"
    group, _, name = key.partition("_")
    if group in ("eval", "test"):
        return f"{group}/{name}"
    return f"eval/{key}" if key == "perplexity" else f"train/{key}"
