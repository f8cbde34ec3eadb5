"""Checkpoint directories: list, verify, choose the one to resume, prune.

A directory is verified against its manifest.json (format version, the model's fingerprint, every file with size and
CRC-32), which is written last. Rank 0 reads the manifest, each rank verifies a share of the files, and all ranks get
the result. Directories are renamed to tmp-checkpoint-* before they are removed, so that a kill in between never leaves
an incomplete one under a checkpoint's name.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
from pathlib import Path

from isal import isal_zlib

from common.cli import UserError, one_line
from common.distributed.world import World
from common.files.json_files import check_type, file_size, is_plain_name, open_regular, read_json, shorten

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL, SUPERSEDED = "tmp-checkpoint-", "superseded-"
# NFS clients cache attributes for up to a minute before they see a file that another machine has written.
SHARED_PATIENCE_S = 90.0
SAVED = ".saved"  # an empty file: at least one checkpoint was completed here
OF_A_FINISHED_RUN = ("train_results.json", "final_model")
MANIFEST = "manifest.json"


class Corrupt(Exception):
    """A checkpoint that is incomplete or damaged; the message says how."""


class Refused(ValueError):
    """A checkpoint holds something that no checkpoint of this program holds."""


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory), newest (by number) first."""
    found = [(m, p) for p in output_dir.glob("checkpoint-*") if (m := NAME.fullmatch(p.name)) and p.is_dir()]
    return sorted(((int(m[1]), p) for m, p in found), reverse=True)


def check_nothing_was_completed(output_dir: Path) -> None:
    """UserError if an earlier run saved or finished but its checkpoints are gone: step 0 would overwrite its results.

    A run killed before its first checkpoint leaves neither mark, and starts over.
    """
    found = [name for name in OF_A_FINISHED_RUN if (output_dir / name).exists()]
    if (output_dir / SAVED).exists() or found:
        left = f"there is {' and '.join(found)}" if found else "one was saved here"
        raise UserError(
            f"{output_dir}: no checkpoint is left of an earlier run ({left}): put it back, or to start at step 0 give "
            "--overwrite_output_dir (removes that run's files), --resume_from_checkpoint false or another --output_dir"
        )


def read_manifest(path: Path) -> tuple[dict, dict[str, list[int]]]:
    """(model fingerprint, {file: [bytes, CRC-32]}) of the manifest. Corrupt if it cannot be read."""
    if not path.is_dir():
        raise Corrupt("no such directory")
    try:
        manifest = read_json(path / MANIFEST)
        version, model, files = manifest["format_version"], manifest["model"], manifest["files"]
        check_type("model", model, "dict")
        check_type("files", files, "dict")
    except (OSError, ValueError, KeyError) as error:
        raise Corrupt("not a checkpoint of this program, or torn: no readable manifest.json") from error
    if version != FORMAT_VERSION:
        raise Corrupt(f"format {shorten(version)}, this program reads {FORMAT_VERSION}")
    for name, recorded in files.items():
        if not is_plain_name(name):
            raise Corrupt(f"manifest.json names {shorten(name)}, which is no file of the directory")
        sizes = isinstance(recorded, list) and len(recorded) == 2 and all(type(n) is int and n >= 0 for n in recorded)
        if not sizes:
            raise Corrupt(f"manifest.json gives {name} the size {shorten(recorded)}")
    return model, files


def read_listed(path: Path, name: str) -> dict:
    """A JSON file of a checkpoint, which its manifest must list. UserError if it cannot be read."""
    try:
        if name not in read_manifest(path)[1]:
            raise Corrupt("it is not in the manifest")
        return read_json(path / name)
    except (OSError, ValueError, Corrupt) as error:
        raise UserError(f"{path / name}: refused: {one_line(error)}") from error


def check_same_model(path: Path, model: dict, fingerprint: dict) -> None:
    """UserError unless a checkpoint's `model` has this run's fingerprint."""
    model = {"hidden_act": fingerprint.get("hidden_act")} | model  # older checkpoints do not record it
    flags = {"hidden_act": "hidden_act (--gelu)"}
    differing = [
        f"{flags.get(k, k)} {shorten(model.get(k))} (now {v!r})" for k, v in fingerprint.items() if model.get(k) != v
    ]
    if differing:
        raise UserError(
            f"{path}: the checkpoint is of another model: {', '.join(differing)}; choose another --output_dir, "
            "or --overwrite_output_dir"
        )


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


def prune(output_dir: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` of the checkpoints up to `step`, which was just saved."""
    up_to = [path for number, path in list_checkpoints(output_dir) if number <= step]
    for path in up_to[max(keep, 1) :]:
        remove(path)


def set_aside_beyond(output_dir: Path, step: int) -> None:
    """Rename the checkpoints beyond `step`, where this run resumes: they are another trajectory's, or damaged.

    Otherwise the next restart and --save_total_limit would take them for this run's newest.
    """
    for number, path in list_checkpoints(output_dir):
        if number > step:
            aside = path.with_name(SUPERSEDED + path.name)
            if aside.exists():
                remove(aside)
            path.rename(aside)
            logger.warning("%s is not of this run, which resumes from step %d: renamed to %s", path, step, aside.name)


AT_STEP_0 = (
    "to start at step 0 give --resume_from_checkpoint false (sets them aside) or --overwrite_output_dir (removes them)"
)


def resume_from(told: str | None, output_dir: Path, restarted: bool) -> bool | Path:
    """--resume_from_checkpoint: True for the newest one, False for none, or that of a directory.

    The output directory itself, also where it is still to be made, stands for its newest one, and so does another
    directory of checkpoints for the newest there. A restart of the job that wrote to `output_dir` goes on from its own
    newest one, whatever its flags say.
    """
    if restarted and list_checkpoints(output_dir):
        return True
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "none": False, "0": False}
    if (word := (told or "true").lower()) in words:
        return words[word]
    path = Path(told)
    if path.resolve() == output_dir.resolve():
        return True
    there = [] if (path / MANIFEST).exists() else list_checkpoints(path)
    return there[0][1] if there else path


def choose(told: bool | Path, output_dir: Path, fingerprint: dict, world: World, training: bool) -> Path | None:
    """The checkpoint to start from, None for step 0; all ranks call together.

    told: as `resume_from` has it, on rank 0; training: whether the run is to go on from it. UserError where the one
    told of is damaged, where none is left of a run that is to go on, and as `newest_usable`.
    """
    told = world.broadcast_object(str(told) if isinstance(told, Path) else told)
    if told is False:
        return None
    if told is not True:
        told = Path(told)
        if damage := damage_of(told, fingerprint, world):
            _refuse(f"--resume_from_checkpoint {told}: {damage}", world)
        return told
    newest = newest_usable(output_dir, fingerprint, world)
    with world.on_main_rank() as is_main:
        if is_main and newest is None and training:
            check_nothing_was_completed(output_dir)
    return newest


def newest_usable(output_dir: Path, fingerprint: dict | None, world: World, otherwise: str = AT_STEP_0) -> Path | None:
    """The newest whole checkpoint, None where there is none at all; a damaged one is skipped with a warning.

    fingerprint: of the model that it must be of, None for any. UserError if the newest whole one is of another, and if
    there are checkpoints and none is whole: to start at step 0 over the remains of a run is for the user to decide, or
    what `otherwise` says.
    """
    there, damages = [], []
    with world.on_main_rank() as is_main:
        if is_main:
            there = [str(path) for _, path in list_checkpoints(output_dir)]
    for path in map(Path, world.broadcast_object(there)):
        damage = damage_of(path, fingerprint, world)
        if damage is None:
            return path
        damages.append(f"{path.name}: {damage}")
        logger.warning("%s: skipped: %s", path, damage)
    if damages:
        _refuse(f"{output_dir}: none of its checkpoints is whole ({'; '.join(damages)}): {otherwise}", world)
    return None


def damage_of(path: Path, fingerprint: dict | None, world: World) -> str | None:
    """What is wrong with a checkpoint, the same on every rank; None: it is whole. UserError if of another model."""
    recorded, damage = {}, None
    with world.on_main_rank() as is_main:
        if is_main:
            try:
                model, recorded = read_manifest(path)
                if fingerprint is not None:
                    check_same_model(path, model, fingerprint)
            except Corrupt as found:
                damage = str(found)
    recorded, damage = world.broadcast_object((recorded, damage))
    if damage is not None:
        return damage
    # The largest first, so that all ranks have about as much to read.
    order = sorted(recorded, key=lambda name: recorded[name][0], reverse=True)
    found = {}
    with world.raise_together():
        if not (path / MANIFEST).exists():
            raise UserError(f"{path}: not to be seen from here: --output_dir must be one directory for all nodes")
        for name in order[world.rank :: world.size]:
            try:
                check_file(path / name, recorded[name])
            except Corrupt as damaged:
                found[name] = str(damaged)
    everywhere = {name: text for part in world.gather(found) for name, text in part.items()}
    return next((everywhere[name] for name in recorded if name in everywhere), None)


def _refuse(why: str, world: World) -> None:
    """All ranks end, and one says why."""
    with world.on_main_rank() as is_main:
        if is_main:
            raise UserError(why)


def reason_of(error: BaseException) -> str:
    """The innermost cause in one line: DCP's own exception lists every rank's traceback."""
    causes = getattr(error, "failures", None)
    if causes:
        first = next(iter(causes.values()))
        error = first[0] if isinstance(first, tuple) else first
    return one_line(error)[:200]
