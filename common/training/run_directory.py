"""The directory a run writes to: made, tried, locked, and cleared of an earlier run if --overwrite_output_dir says so.

It may hold other things (the guides use the data directory): only what a run writes itself is ever removed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from common.cli import UserError
from common.training.checkpoint_files import NAME, PARTIAL, SAVED, SUPERSEDED, list_checkpoints
from extras.launcher.restart_limit import private, unique_id
from extras.profiling import TRACES
from extras.trackers import EVENTS, WANDB_RUN

logger = logging.getLogger(__name__)

RUN = ".run"  # lock, and identity of the job that wrote here last
OWN_FILES = (
    *("metrics.jsonl", "metrics.partial", "trainer_state.json", "training_curves.png", "training_curves.partial.png"),
    *("about.json", "about.json.partial"),
    *(f"{name}_results.json" for name in ("train", "eval", "test", "all")),
    *("quant_stats.jsonl", "quant_stats.partial", "quant_stats.png", "quant_stats.partial.png"),
    *(SAVED, WANDB_RUN),
)
OWN_DIRECTORIES = ("final_model", "final_model.partial")
TRACKER_FILES = f"{EVENTS}/events.out.tfevents.*"
# A file server lets go of a dead machine's lock after its lease: 90 s by default for NFS 4.
LOCK_PATIENCE_S = 150.0
# No operator starts a pod of a job again that has been done for so long; a user may start the same job anew.
DONE_FOR_S = 3600.0


class RunDirectory:
    """The output directory, held for this process until `close`, or as a context. For rank 0 alone.

    restarted: this is a restart of the very job that wrote here last, with the same command line: it must go on, and
    neither wipe out what it did before nor go back to where --resume_from_checkpoint made it start. If the context
    ends by an error before `keep` was called, nothing of what it has made is left.
    Raises OSError where the directory is not writable, UserError while another run writes there.
    """

    def __init__(self, path: Path):
        self.path, self._kept = path, False
        self._created = [made for made in (path / RUN, path, *path.parents) if not made.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._handle = hold(path / RUN)
        except OSError:
            self._remove_created()
            raise
        # Read through this very handle: to close another one of the file would let go of the lock.
        self.restarted = _is_restart_of(self._handle.read())

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
        """From now on what is here is this job's."""
        self._write(_job())

    def done(self) -> None:
        """The job has done all it was told to."""
        self._write(_job() | {"done": time.time()})

    def close(self) -> None:
        with suppress(OSError):  # what a full disk did not take is still to be written
            self._handle.close()

    def _remove_created(self) -> None:
        for path in self._created:  # the innermost first; those that hold something stay
            with suppress(OSError):
                path.unlink() if path.name == RUN else path.rmdir()

    def _write(self, job: dict) -> None:
        try:
            self._handle.truncate(0)
            self._handle.write(json.dumps(job))
            self._handle.flush()
        except OSError as error:
            error.filename = str(self.path)  # writing to a full disk does not say where
            raise


def hold(path: Path, patience_s: float = LOCK_PATIENCE_S) -> TextIOWrapper:
    """Open `path` and lock it. The lock is the process' own (POSIX): it ends with it, and forked workers lack it."""
    handle = open(path, "a+", opener=private)  # noqa: SIM115  (the caller's to close)
    deadline = time.monotonic() + patience_s
    told = False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, handle):
                break
            # The run that was waited for has left nothing, its lock included.
            handle.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = open(path, "a+", opener=private)  # noqa: SIM115
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                handle.close()
                raise UserError(
                    f"{path.parent}: another run is writing here: wait for it, or choose another --output_dir"
                ) from None
            if not told:
                logger.warning("%s: another run is writing here: waiting up to %.0f s", path.parent, patience_s)
                told = True
            time.sleep(0.2)
        except OSError:  # a file system without locks
            break
    handle.seek(0)
    return handle


def _is(path: Path, handle: TextIOWrapper) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _job() -> dict:
    """What tells a restart of this very job, by torchrun, an operator or the batch system, from a new one of the same
    user: the batch system's number or the API's UID, which no two jobs share, or torchrun's --rdzv_id, which they may
    (the guides' variables give a constant), with the torchrun itself and the command line."""
    if os.environ.get("SLURM_JOB_ID"):
        return {"job": f"slurm {os.environ['SLURM_JOB_ID']}", "uid": unique_id()}
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return {"job": None}
    one_node = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    return {
        "job": None if run_id == "none" else f"torchelastic {run_id}",  # torchrun's default, for all jobs
        "torchrun": _parent(),
        "by_hand": one_node and "KUBERNETES_SERVICE_HOST" not in os.environ,
        "command": sys.argv[1:],
        "uid": unique_id(),
    }


def _parent() -> str | None:
    """This process' parent, unlike any other one of this or another machine; None where the system does not say."""
    pid = os.getppid()
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {pid} {began}"
    except OSError:
        return None


def _is_restart_of(text: str) -> bool:
    """text: what `claim` has written, or an earlier version of it."""
    now = _job()
    try:
        before = json.loads(text)
    except ValueError:
        before = {"job": text}
    if now.get("torchrun") and before.get("torchrun") == now["torchrun"]:
        return True
    if now.get("uid") and before.get("uid"):  # either may be missing where the API did not answer
        return (now["job"], now["uid"]) == (before.get("job"), before["uid"])
    if now["job"] is None or now["job"] != before.get("job"):
        return False
    # Nobody but a user starts a torchrun of one machine anew: with the same --rdzv_id it is a new job all the same. So
    # it is elsewhere, with other flags or long after the end.
    both_by_hand = now.get("by_hand") and before.get("by_hand")
    other_flags = before.get("command", now.get("command")) != now.get("command")
    over = time.time() - before.get("done", math.inf) > DONE_FOR_S
    return not (both_by_hand or other_flags or over)


def clear(output_dir: Path) -> None:
    """Remove an earlier run's files, and nothing else."""
    if list_checkpoints(output_dir):
        logger.warning("Removing the earlier run in %s, as --overwrite_output_dir says", output_dir)
    numbered = (p for p in output_dir.iterdir() if NAME.fullmatch(p.name.removeprefix(SUPERSEDED)))
    own = [*numbered, *output_dir.glob(f"{PARTIAL}*"), *output_dir.glob(TRACKER_FILES), *output_dir.glob(TRACES)]
    for path in [*own, *(output_dir / name for name in (*OWN_FILES, *OWN_DIRECTORIES))]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
