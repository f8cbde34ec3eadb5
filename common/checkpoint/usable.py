"""Which checkpoints are whole, and the newest of those.

Rank 0 reads the manifest, each rank verifies its share of the files, and all ranks get the same answer.
"""

from __future__ import annotations

import logging
from pathlib import Path

from common.checkpoint.files import MANIFEST, Corrupt, check_file, read_manifest
from common.cli import UserError
from common.distributed.world import World
from common.files.runs import list_checkpoints

logger = logging.getLogger(__name__)

AT_STEP_0 = (
    "to start at step 0 give --resume_from_checkpoint false (sets them aside) or --overwrite_output_dir (removes them)"
)


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
