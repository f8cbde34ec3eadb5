"""A run's output directory: create, lock, recognise a restart, and remove an earlier run's files on request.

The directory may hold other files (the guides point it at the data): only files that a run writes are ever removed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from common.checkpoint.files import PARTIAL, SAVED, SUPERSEDED
from common.cli import UserError
from common.figures import FORMATS
from common.files.runs import CHECKPOINT, METRICS, RUN_INFO, list_checkpoints
from common.files.safe_files import open_private
from common.training.same_run import is_restart_of, this_job

logger = logging.getLogger(__name__)

RUN = ".run"  # the lock, and the identity of the job that wrote here last
EVENTS = "logs"  # directory of TensorBoard's files
WANDB_RUN = "wandb_run.json"  # the run's id at W&B
TRACES = "profile/rank*-steps-*.json.gz"
PICTURES = ("training_curves", "quant_stats")
OWN_FILES = (
    *(METRICS, "metrics.partial", f"{METRICS}.partial", "trainer_state.json"),
    *(RUN_INFO, f"{RUN_INFO}.partial"),
    *(f"{name}_results.json" for name in ("train", "eval", "test", "all")),
    *("quant_stats.jsonl", "quant_stats.partial", "quant_stats.jsonl.partial"),
    *(f"{name}.{form}{end}" for name in PICTURES for form in FORMATS for end in ("", ".partial")),
    *(SAVED, WANDB_RUN),
)
OWN_DIRECTORIES = ("final_model", "final_model.partial")
LOSSES = ("eval*_losses.parquet", "eval*_losses_best.parquet", "test_losses.parquet")
TRACKER_FILES = f"{EVENTS}/events.out.tfevents.*"
# A file server releases a dead machine's lock when its lease ends: 90 s by default for NFS 4.
LOCK_PATIENCE_S = 150.0


class RunDirectory:
    """The output directory, locked until `close` or the end of the context. For rank 0 only.

    restarted: whether this process restarts the job that wrote here last, with the same command line. It then resumes
    that job's newest checkpoint, whatever --overwrite_output_dir and --resume_from_checkpoint say. A context that
    fails before `keep` was called removes what it has created.
    Raises OSError if the directory is not writable, UserError while another run writes to it.
    """

    def __init__(self, path: Path):
        self.path, self._kept = path, False
        self._created = [each for each in (path / RUN, path, *path.parents) if not each.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._handle = hold(path / RUN)
        except OSError:
            self._remove_created()
            raise
        # Read through this handle: closing any other handle of the file would release a POSIX lock.
        self.restarted = is_restart_of(self._handle.read())

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind, *error) -> None:
        if kind is not None and not self._kept:
            if self.path in self._created:
                clear(self.path)
            self._remove_created()
        self.close()

    def overwrite(self) -> None:
        """--overwrite_output_dir: remove an earlier run's files, but not in a restart of the run that wrote them."""
        if self.restarted:
            logger.info("--overwrite_output_dir: not applied, this is a restart of the job that wrote %s", self.path)
        else:
            clear(self.path)

    def keep(self) -> None:
        """From now on there are results: an error does not remove what was made here."""
        self._kept = True

    def claim(self) -> None:
        """Record this job as the one that wrote here last."""
        self._write(this_job())

    def done(self) -> None:
        """Record that the job has finished."""
        self._write(this_job() | {"done": time.time()})

    def close(self) -> None:
        with suppress(OSError):  # closing flushes, which fails on a full disk
            self._handle.close()

    def _remove_created(self) -> None:
        for path in self._created:  # innermost first; directories that are not empty stay
            with suppress(OSError):
                path.unlink() if path.name == RUN else path.rmdir()

    def _write(self, job: dict) -> None:
        try:
            self._handle.truncate(0)
            self._handle.write(json.dumps(job))
            self._handle.flush()
        except OSError as error:
            error.filename = str(self.path)  # an error of a full disk names no file
            raise


def hold(path: Path, patience_s: float = LOCK_PATIENCE_S) -> TextIOWrapper:
    """Open `path` and lock it. A POSIX lock ends with its process, and forked workers do not hold it.

    UserError if another process still holds the lock after `patience_s`.
    """
    handle = open(path, "a+", opener=open_private)  # noqa: SIM115  (the caller's to close)
    deadline = time.monotonic() + patience_s
    warned = False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(path, handle):
                break
            # The other run has removed its directory, with the lock file.
            handle.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = open(path, "a+", opener=open_private)  # noqa: SIM115
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                handle.close()
                raise UserError(
                    f"{path.parent}: another run is writing here: wait for it, or choose another --output_dir"
                ) from None
            if not warned:
                logger.warning("%s: another run is writing here: waiting up to %.0f s", path.parent, patience_s)
                warned = True
            time.sleep(0.2)
        except OSError:  # the file system has no locks
            break
    handle.seek(0)
    return handle


def _is_same_file(path: Path, handle: TextIOWrapper) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def clear(output_dir: Path) -> None:
    """Remove the files of an earlier run, and no others."""
    if list_checkpoints(output_dir):
        logger.warning("Removing the earlier run in %s, as --overwrite_output_dir says", output_dir)
    numbered = (p for p in output_dir.iterdir() if CHECKPOINT.fullmatch(p.name.removeprefix(SUPERSEDED)))
    patterns = f"{PARTIAL}*", TRACKER_FILES, TRACES, *LOSSES
    own = [*numbered, *(path for pattern in patterns for path in output_dir.glob(pattern))]
    for path in [*own, *(output_dir / name for name in (*OWN_FILES, *OWN_DIRECTORIES))]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
