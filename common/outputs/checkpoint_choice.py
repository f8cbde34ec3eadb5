"""Which checkpoint a run goes on from: the one it is told, or the newest that is whole.

All ranks together: rank 0 reads the manifest, each rank checks its share of the files, and all hear of what any found.
"""

from __future__ import annotations

import logging
from pathlib import Path

from common.cli import UserError
from common.outputs.checkpoint_files import (
    MANIFEST,
    Corrupt,
    check_file,
    check_nothing_was_completed,
    check_same_model,
    list_checkpoints,
    read_manifest,
)
from common.ranks.world import World

logger = logging.getLogger(__name__)

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
    told = world.share(str(told) if isinstance(told, Path) else told)
    if told is False:
        return None
    if told is not True:
        told = Path(told)
        if damage := damage_of(told, fingerprint, world):
            _refuse(f"--resume_from_checkpoint {told}: {damage}", world)
        return told
    newest = newest_usable(output_dir, fingerprint, world)
    with world.main_does() as mine:
        if mine and newest is None and training:
            check_nothing_was_completed(output_dir)
    return newest


def newest_usable(output_dir: Path, fingerprint: dict | None, world: World, otherwise: str = AT_STEP_0) -> Path | None:
    """The newest whole checkpoint, None where there is none at all; a damaged one is skipped with a warning.

    fingerprint: of the model that it must be of, None for any. UserError if the newest whole one is of another, and if
    there are checkpoints and none is whole: to start at step 0 over the remains of a run is for the user to decide, or
    what `otherwise` says.
    """
    there, damages = [], []
    with world.main_does() as mine:
        if mine:
            there = [str(path) for _, path in list_checkpoints(output_dir)]
    for path in map(Path, world.share(there)):
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
    with world.main_does() as mine:
        if mine:
            try:
                model, recorded = read_manifest(path)
                if fingerprint is not None:
                    check_same_model(path, model, fingerprint)
            except Corrupt as found:
                damage = str(found)
    recorded, damage = world.share((recorded, damage))
    if damage is not None:
        return damage
    # The largest first, so that all ranks have about as much to read.
    order = sorted(recorded, key=lambda name: recorded[name][0], reverse=True)
    found = {}
    with world.together():
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
    with world.main_does() as mine:
        if mine:
            raise UserError(why)
