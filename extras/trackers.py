"""A run in TensorBoard or W&B: what --report_to opens. One run there through all restarts of an output directory.

A run that is broken off goes on from a checkpoint, so rows beyond it come again. In TensorBoard they replace the ones
before (`purge_step`). W&B keeps what it has, and its own step only grows: there every number is logged over
`global_step`, and rows that come again stand at the same place as the ones before, with the same values.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.cli import MachineFault, UserError, one_line
from common.distributed.stopping import PREEMPTED
from common.files.json_files import read_json_lines, write_json

logger = logging.getLogger(__name__)

EVENTS = "logs"
WANDB_RUN = "wandb_run.json"  # the id under which W&B knows the run of this directory
STEP = "global_step"
RESENT = 100  # rows: what comes in the seconds that W&B's own process takes to write or send what it has


class Tracker:
    """Tracks nothing: what the ranks other than 0 use, and rank 0 unless --report_to says more."""

    def write(self, row: dict) -> None:
        """The numbers of a row of metrics.jsonl, or of any {"step": ..., name: value}."""

    def go_on(self, metrics: Path) -> None:
        """Before the first new row: metrics.jsonl, with the rows that the run goes on from."""

    def close(self, status: int) -> None:
        """status: the exit status that the process is about to have."""

    def give_up(self) -> None:
        """Let go of one that has failed."""


class _TensorBoard(Tracker):
    def __init__(self, directory: Path, first_row: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_importable("tensorboard", error) from error
        self.writer = SummaryWriter(str(directory), purge_step=first_row)

    def write(self, row: dict) -> None:
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["step"])
        # What a thread of its own has still to write (where TensorFlow is installed, for up to 120 s) is lost when the
        # process is killed, and does not come again if it stands before a checkpoint.
        self.writer.flush()

    def close(self, status: int) -> None:
        self.writer.close()


class _WandB(Tracker):
    def __init__(self, config: dict, name: str | None, directory: Path, first_row: int | None, anew: bool):
        try:
            import wandb
        except ImportError as error:
            raise _not_importable("wandb", error) from error
        file = directory / WANDB_RUN
        known = None if anew else _known_id(file)
        run_id = os.environ.get("WANDB_RUN_ID") or known or secrets.token_hex(4)
        # Arguments win over the environment: what the user has set there is left to it.
        ours = {"WANDB_RUN_ID": ("id", run_id), "WANDB_RESUME": ("resume", "allow"), "WANDB_DIR": ("dir", directory)}
        arguments = {key: str(value) for variable, (key, value) in ours.items() if not os.environ.get(variable)}
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
        if first_row is not None and run_id != _known_id(file):
            write_json(file, {"id": run_id})
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)

    def write(self, row: dict) -> None:
        self.run.log({STEP: row["step"]} | _numbers(row))

    def go_on(self, metrics: Path) -> None:
        """The newest rows once more: a process that was killed took with it what W&B's had not written, and has no way
        to wait for that at each row."""
        for row in read_json_lines(metrics)[-RESENT:]:
            self.write(row)

    def close(self, status: int) -> None:
        if status == PREEMPTED:
            self.run.mark_preempting()
        self.run.finish(exit_code=status)

    def give_up(self) -> None:
        import wandb

        wandb.teardown()  # fails, too, but does not try again when the interpreter ends, with a traceback


class _Dispensable(Tracker):
    """Another tracker, given up with a warning when it fails: what it tells stands in metrics.jsonl, too.

    W&B's own process dies of the SIGTERM that a batch system sends to all there are, while the run still has to save.
    """

    def __init__(self, tracker: Tracker, name: str):
        self.tracker, self.name = tracker, name

    def write(self, row: dict) -> None:
        self._try(lambda: self.tracker.write(row))

    def go_on(self, metrics: Path) -> None:
        self._try(lambda: self.tracker.go_on(metrics))

    def close(self, status: int) -> None:
        self._try(lambda: self.tracker.close(status))

    def _try(self, told: Callable[[], None]) -> None:
        try:
            told()
        except Exception as error:
            logger.warning("--report_to %s: given up: %s; metrics.jsonl goes on", self.name, one_line(error))
            with suppress(Exception):
                self.tracker.give_up()
            self.tracker = Tracker()


def open_tracker(
    report_to: str, name: str | None, config: dict, output_dir: Path, first_row: int | None, anew: bool
) -> Tracker:
    """What --report_to asks for.

    name: the run's, None for the tracker's choice; config: the run's flags, for W&B; first_row: the step of the
    first row that is to come, None where nothing is to be trained; anew: this start goes on with nothing.
    Raises UserError for settings it cannot be opened with, MachineFault where its server does not answer.
    """
    if report_to == "tensorboard":
        return _Dispensable(_TensorBoard(output_dir / EVENTS, first_row), report_to)
    if report_to == "wandb":
        return _Dispensable(_WandB(config, name, output_dir, first_row, anew), report_to)
    return Tracker()


def _known_id(file: Path) -> str | None:
    try:
        return json.loads(file.read_text())["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        logger.warning("%s: not readable: this is a new run in W&B", file)
        return None


def _not_importable(name: str, error: ImportError) -> UserError:
    return UserError(f"--report_to {name}: cannot be imported ({one_line(error)}): ./install.sh --trackers")


def _numbers(row: dict) -> dict[str, float]:
    return {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
