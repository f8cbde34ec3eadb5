"""Checkpoint directories as files: verify, prune, and which is the newest whole one.

`manifest.json` is written last and lists the format version, the model's fingerprint, and every file with its size and
CRC-32. A directory is renamed to tmp-checkpoint-* before it is removed, so that a kill in between never leaves a
partial directory under a checkpoint's name.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from isal import isal_zlib

from common.cli import UserError, one_line
from common.distributed.world import World
from common.files.runs import FINAL_MODEL, MANIFEST, list_checkpoints
from common.files.safe_files import check_type, file_size, is_plain_name, open_regular, read_json, shorten

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
EARLIER_VERSIONS = (1,)  # read by extras/interop/checkpoint_format_1.py
PARTIAL, SUPERSEDED = "tmp-checkpoint-", "superseded-"
# NFS clients cache attributes for up to a minute before they see a file that another machine has written.
SHARED_PATIENCE_S = 90.0
AT_STEP_0 = (
    "to start at step 0 give --resume_from_checkpoint false (sets them aside) or --overwrite_output_dir (removes them)"
)
SAVED = ".saved"  # an empty file: some checkpoint was once complete here
RESULTS = ("train_results.json", FINAL_MODEL)
CONFIG, TRAINER_STATE = "config.json", "trainer_state.json"


class Corrupt(Exception):
    """A checkpoint that is incomplete or damaged; the message says how."""


def check_nothing_was_completed(output_dir: Path) -> None:
    """UserError if an earlier run has saved or finished but its checkpoints are gone: step 0 would overwrite the rest.

    A run that was killed before its first checkpoint was complete simply starts over.
    """
    results = [name for name in RESULTS if (output_dir / name).exists()]
    if (output_dir / SAVED).exists() or results:
        left = f"there is {' and '.join(results)}" if results else "one was saved here"
        raise UserError(
            f"{output_dir}: no checkpoint is left of an earlier run ({left}): put it back, or to start at step 0 give "
            "--overwrite_output_dir (removes that run's files), --resume_from_checkpoint false or another --output_dir"
        )


@dataclass(frozen=True)
class Manifest:
    """version: of the format; model: its fingerprint; files: {file: [bytes, CRC-32]}."""

    version: int
    model: dict
    files: dict[str, list[int]]


def read_manifest(path: Path) -> Manifest:
    """Corrupt if there is no readable manifest, or one of a format that this program does not read."""
    if not path.is_dir():
        raise Corrupt("no such directory")
    try:
        manifest = read_json(path / MANIFEST)
        version, model, files = manifest["format_version"], manifest["model"], manifest["files"]
        check_type("model", model, "dict")
        check_type("files", files, "dict")
    except (OSError, ValueError, KeyError) as error:
        raise Corrupt("not a checkpoint of this program, or torn: no readable manifest.json") from error
    if type(version) is not int or version not in (FORMAT_VERSION, *EARLIER_VERSIONS):
        raise Corrupt(f"format {shorten(version)}, this program reads {FORMAT_VERSION} and earlier ones")
    for name, recorded in files.items():
        if not is_plain_name(name):
            raise Corrupt(f"manifest.json names {shorten(name)}, which is no file of the directory")
        sizes = isinstance(recorded, list) and len(recorded) == 2 and all(type(n) is int and n >= 0 for n in recorded)
        if not sizes:
            raise Corrupt(f"manifest.json gives {name} the size {shorten(recorded)}")
    return Manifest(version, model, files)


def read_listed(path: Path, name: str) -> dict:
    """A JSON file of a checkpoint, which its manifest must list. UserError if it cannot be read."""
    try:
        if name not in read_manifest(path).files:
            raise Corrupt("it is not in the manifest")
        return read_json(path / name)
    except (OSError, ValueError, Corrupt) as error:
        raise UserError(f"{path / name}: refused: {one_line(error)}") from error


def check_file(path: Path, recorded: list[int]) -> None:
    """Corrupt unless `path` is a regular file of the recorded size and checksum. Compares the size before reading."""
    try:
        with open_regular(path) as file:
            size, crc = file_size(file), 0
            while size == recorded[0] and (block := file.read(1 << 20)):
                crc = isal_zlib.crc32(block, crc)
    except OSError as error:
        raise Corrupt(f"{path.name} is missing or unreadable ({error.strerror})") from error
    if [size, crc] != recorded:
        raise Corrupt(f"{path.name} is damaged ({size} bytes, {recorded[0]} written, or checksum differs)")


def wait_for_shards(directory: Path, written: dict[str, list[int]]) -> None:
    """Wait until the shards of all ranks are visible here with their sizes (a file server may show them late).

    UserError if they do not appear: the ranks share no directory.
    """
    deadline = time.monotonic() + SHARED_PATIENCE_S
    while unseen := [name for name, (size, _) in written.items() if _size(directory / name) != size]:
        if time.monotonic() > deadline:
            ranks = ", ".join(sorted({name.split("_")[2] for name in unseen if name.startswith("__")}, key=int))
            raise UserError(
                f"{directory.parent}: what rank {ranks} wrote there is not to be seen from rank 0 (host "
                f"{socket.gethostname()}): --output_dir must be one directory for all nodes, on a shared file system"
            )
        os.listdir(directory)  # makes an NFS client drop its cache of missing names
        time.sleep(0.2)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def clear_partial(output_dir: Path) -> None:
    """Remove checkpoints that a killed run was writing or removing."""
    for leftover in output_dir.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    gone = path.with_name(f"{PARTIAL}removed-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def prune(output_dir: Path, step: int, keep: int, best: int | None = None) -> None:
    """Keep the newest `keep` of the checkpoints up to `step`, which was just saved, and that of step `best`."""
    up_to = [(number, path) for number, path in list_checkpoints(output_dir) if number <= step]
    for number, path in up_to[max(keep, 1) :]:
        if number != best:
            remove(path)


def set_aside_beyond(output_dir: Path, step: int) -> None:
    """Rename the checkpoints beyond `step`: they belong to another trajectory (or are damaged).

    Left in place, the next restart and --save_total_limit would take them for this run's newest.
    """
    for number, path in list_checkpoints(output_dir):
        if number > step:
            aside = path.with_name(SUPERSEDED + path.name)
            if aside.exists():
                remove(aside)
            path.rename(aside)
            logger.warning("%s is not of this run, which resumes from step %d: renamed to %s", path, step, aside.name)


def reason_of(error: BaseException) -> str:
    """The innermost cause in one line: DCP's own exception lists every rank's traceback."""
    causes = getattr(error, "failures", None)
    if causes:
        first = next(iter(causes.values()))
        error = first[0] if isinstance(first, tuple) else first
    return one_line(error)[:200]


def newest_usable(output_dir: Path, world: World, advice: str = AT_STEP_0) -> Path | None:
    """The newest whole checkpoint, None if there is no checkpoint at all; damaged ones are skipped with a warning.

    UserError if there are checkpoints and none is whole: whether to start at step 0 over the remains of a run is the
    user's decision. advice: what the error tells the user to do.
    """
    paths: list[str] = []
    damages = []
    with world.on_main_rank() as is_main:
        if is_main:
            paths = [str(path) for _, path in list_checkpoints(output_dir)]
    for path in map(Path, world.broadcast_object(paths)):
        damage = damage_of(path, world)
        if damage is None:
            return path
        damages.append(f"{path.name}: {damage}")
        logger.warning("%s: skipped: %s", path, damage)
    if damages:
        reasons = "; ".join(damages)
        world.raise_on_all(UserError(f"{output_dir}: none of its checkpoints is whole ({reasons}): {advice}"))
    return None


def damage_of(path: Path, world: World) -> str | None:
    """What is wrong with a checkpoint, the same on every rank; None if it is whole. All ranks together."""
    recorded, damage = {}, None
    with world.on_main_rank() as is_main:
        if is_main:
            try:
                recorded = read_manifest(path).files
            except Corrupt as error:
                damage = str(error)
    recorded, damage = world.broadcast_object((recorded, damage))
    if damage is not None:
        return damage
    # Largest first, so that all ranks read about the same amount.
    order = sorted(recorded, key=lambda name: recorded[name][0], reverse=True)
    damages = {}
    with world.raise_together():
        if not (path / MANIFEST).exists():
            raise UserError(f"{path}: not visible from here: --output_dir must be one directory for all nodes")
        for name in order[world.rank :: world.size]:
            try:
                check_file(path / name, recorded[name])
            except Corrupt as error:
                damages[name] = str(error)
    all_damages = {name: text for part in world.gather(damages) for name, text in part.items()}
    return next((all_damages[name] for name in recorded if name in all_damages), None)
